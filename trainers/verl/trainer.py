"""verl's trainers with ClawGym's groups, advantages and token weights.

Invariants: token weights are computed over the whole batch, before it is split. A step is ``minibatches`` updates per
epoch, whatever the number of training sequences. If episodes can no longer arrive, waiting for them raises an error.
"""

# Type annotations of verl's classes are wrong (blocking calls look as if they had to be awaited):
# pyright: reportIncompatibleMethodOverride=false, reportUnusedCoroutine=false, reportOptionalMemberAccess=false
# pyright: reportOptionalSubscript=false, reportArgumentType=false

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import ray
import torch
import transfer_queue as tq
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync
from verl.trainer.ppo.v1.trainer_base import PPOTrainer, register_trainer
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.metric import reduce_metrics
from verl.utils.py_functional import rename_dict
from verl.utils.tensordict_utils import list_of_dict_to_tensordict
from verl.workers.utils.padding import response_to_nested

from clawgym.errors import TrainingError
from clawgym.trainers.batching import MaskedSequence
from clawgym.trainers.common.advantages import TurnAdvantages, advantages_by_turn
from clawgym.trainers.config import TrainConfig
from clawgym.trainers.credit import ScoredEpisode, batch_metrics, distilled_advantages, scores_of, trained_episodes
from clawgym.trainers.verl.formulas import NAME, batch_importance, batch_token_weights
from clawgym.trainers.verl.queue_entries import episodes_of_tags, imitation_entry, interleave, pad_like
from clawgym.trainers.verl.timeline import Span
from clawgym.trainers.verl.worker import RATE, ColocatedLearner, DetachedLearner

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from verl.workers.rollout.llm_server import LLMServerClient

__all__ = ["EpisodeDispatcher", "RunCallbacks", "verl_trainer_name"]


def verl_trainer_name(mode: str) -> str:
    """The name in verl's registry of ClawGym's trainer for ``verl.mode``."""
    return f"clawgym_{mode}"


_POLL = 0.1
"""Seconds between two checks for ended groups."""


class RunCallbacks(Protocol):
    """What a run provides to verl's trainer: settings that verl does not have, and callbacks."""

    config: TrainConfig

    def check(self) -> None:
        """Called while waiting for episodes; raises the error that ends the run."""
        ...

    def on_train_begin(self, trainer: Any) -> None:
        """Called before the first step."""
        ...

    def budget_used(self) -> float:
        """The fraction of the budget that is used up, in [0, 1]."""
        ...

    def process_weight(self, setting: str) -> float:
        """The weight of the process reward in tasks of ``setting``, in [0, 1]."""
        ...

    def imitation(self, number: int) -> Sequence[MaskedSequence]:
        """The sequences to imitate in update ``number``."""
        ...

    def add_solved(self, episodes: Sequence[tuple[str, str, MaskedSequence]]) -> None:
        """Add solved episodes of a batch to the imitation data: task, episode id, training sequence."""
        ...

    def add_episodes(self, scored: list[ScoredEpisode]) -> Mapping[str, float]:
        """Called with the episodes of a batch. Returns metrics."""
        ...

    def on_advantages(self, group: int, advantages: TurnAdvantages) -> None:
        """Called with the advantages of a group of a batch, before the step on it."""
        ...

    def on_step_trained(self, trainer: Any, groups: list[int]) -> None:
        """Called after a step on ``groups``, when the servers have its weights."""
        ...

    def on_metrics(self, trainer: Any, metrics: Mapping[str, float]) -> None:
        """Called with the metrics of the last step. A checkpoint may be written now."""
        ...


class EpisodeDispatcher:
    """verl's agent loop manager: sends each group to a host, which puts its training sequences into verl's queue."""

    def __init__(self, hosts: list[Any], version: Callable[[], int]) -> None:
        self._hosts = hosts
        self._version = version
        self._running: list[Any] = []

    def generate_sequences(self, prompts: TensorDict) -> None:
        """Start groups without waiting for them."""
        for uid, number in zip(prompts["uid"], prompts["index"], strict=True):
            host = self._hosts[int(number) % len(self._hosts)]
            self._running.append(host.group.remote(str(uid), int(number), self._version()))

    def check(self) -> None:
        """Raise the error of a group or a host that failed."""
        if self._running:
            ended, self._running = ray.wait(self._running, num_returns=len(self._running), timeout=0)
            ray.get(ended)


class _PollingBuffer:
    """A replay buffer that polls often and checks whether the run must end."""

    check: Callable[[], None]

    def _wait_for_next_poll(self, partition_id: str, last_debug_time: float) -> float:
        self.check()
        time.sleep(_POLL)
        return last_debug_time


class _Sync(_PollingBuffer, ReplayBuffer): ...


class _Async(_PollingBuffer, ReplayBufferAsync): ...


class _ClawGymTrainer(PPOTrainer):
    """The changes to each of verl's trainers."""

    learner: ClassVar[type[Any]] = ColocatedLearner

    def __init__(self, config: DictConfig, callbacks: RunCallbacks) -> None:
        self.callbacks = callbacks
        self._step_metrics: dict[str, float] = {}
        self._loss_metrics: tuple[str, ...] = ()
        """Names of the metrics of the loss in the last update."""
        self._numbers: list[int] = []
        self._began = time.monotonic()
        self._sampled = time.time()
        self._room = 0
        self.spans: list[Span] = []
        """When the last step trained and sent weights."""
        super().__init__(config)

    @property
    def version(self) -> int:
        """The version of the servers' weights."""
        return max(0, self.global_steps - 1)

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        for role in (Role.Actor, Role.ActorRollout, Role.ActorRolloutRef):
            if role in self.role_worker_mapping:
                self.role_worker_mapping[role] = ray.remote(self.learner)

    def reader(self) -> LLMServerClient:
        """A client that returns all fields of a server's answer, in every mode."""
        manager: Any = getattr(self, "standalone_server_manager", self.llm_server_manager)
        return manager.get_client()

    def _build_replay_buffer(self) -> ReplayBuffer:
        about = self.config.trainer.v1.sampler
        given: dict[str, Any] = {
            "trainer_mode": self.trainer_mode,
            "trainer_config": self.config.trainer.v1.get(self.trainer_mode, {}),
            "max_off_policy_threshold": about.max_off_policy_threshold,
            "max_off_policy_strategy": about.max_off_policy_strategy,
            "sampler_kwargs": about.sampler_kwargs,
            "refill_fn": self._add_prompts_to_generate,
            "sync_refill_failed_groups": about.sync_refill_failed_groups,
        }
        if self.trainer_mode == "sync":
            size = self.config.data.train_batch_size
            made: Any = _Sync(**given, train_batch_size=size, gen_batch_size=1)
        else:
            made = _Async(**given)
        made.check = self.callbacks.check
        return made

    def _get_required_batch_multiple(self, dp_size: int) -> int:
        return dp_size * self.callbacks.config.algorithm.minibatches

    def _balance_batch(self, batch: KVBatchMeta, metrics: Any, **kwargs: Any) -> KVBatchMeta:
        self._sampled = time.time()
        longest = max(tag["seq_len"] for tag in batch.tags)
        batch = super()._balance_batch(batch, metrics, **kwargs)
        # A micro-batch must hold the longest sequence of this batch, not the longest possible one.
        self._room = max(self.callbacks.config.compute.micro_tokens, longest)
        batch.extra_info["max_token_len_per_gpu"] = self._room
        return batch

    def _compute_ref_log_prob(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        # The queue drops extra_info when it returns a batch.
        batch.extra_info["max_token_len_per_gpu"] = self._room
        return super()._compute_ref_log_prob(batch, metrics)

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        train = self.callbacks.config
        wanted = ["response_mask", "rollout_log_probs", "old_log_probs", "turns"]
        wanted += ["teacher_log_probs"] if train.distillation.hints else []
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=wanted)
        lengths = data["response_mask"]
        whole = {name: pad_like(data[name], lengths) for name in wanted}
        mask = whole["response_mask"]
        scored, episode = episodes_of_tags(batch.tags)
        seed = train.seed * 1_000_003 + self.version
        process_metrics: dict[str, float] = {}
        given, returns = core_algos.get_adv_estimator_fn(NAME)(
            token_level_rewards=None,
            response_mask=mask,
            config=self.config.algorithm,
            scored=scored,
            episode=episode,
            turn=whole["turns"],
            train=train,
            seed=seed,
            process_weight=self.callbacks.process_weight,
            metrics=process_metrics,
        )
        trained = mask.bool()
        signal = given != 0
        if train.distillation.hints:
            teacher = torch.where(trained, whole["teacher_log_probs"], torch.nan)
            given = distilled_advantages(given, whole["old_log_probs"], teacher, train.distillation)
            process_metrics["opd/tokens_taught_frac"] = float(teacher[trained].isfinite().float().mean())
            signal |= teacher.isfinite()
        used = trained_episodes(scored, episode[signal.any(1)].tolist(), train)
        process_metrics["rollout/groups_trained"] = float(len({scored[n].group for n in used}))
        weighted = trained & torch.isin(episode, torch.tensor(used, dtype=episode.dtype))[:, None]
        weights = batch_token_weights(weighted, episode, train)
        factors = batch_importance(whole["old_log_probs"], whole["rollout_log_probs"], mask, train)
        if train.algorithm.importance.startswith("masked"):
            process_metrics["training/importance_masked_frac"] = float((factors[trained] == 0).float().mean())
        apart = (whole["old_log_probs"].exp() - whole["rollout_log_probs"].exp()).abs()[trained]
        self._numbers = sorted({tag["number"] for tag in batch.tags if not tag.get("is_padding")})
        lags = [self.version - tag["min_global_steps"] for tag in batch.tags if not tag.get("is_padding")]
        self._step_metrics = {
            **batch_metrics(scored, train, seed=seed),
            **process_metrics,
            **self.callbacks.add_episodes(scored),
            "actor/advantage_abs_mean": float(given[trained].abs().mean()) if trained.any() else 0.0,
            "training/rollout_probs_diff": float(apart.mean()),
            "training/rollout_probs_diff_max": float(apart.max()),
            "staleness/mean": sum(lags) / len(lags),
            "staleness/max": float(max(lags)),
        }
        self._record(batch, weighted, episode, whole["turns"], given)
        made = {"advantages": given, "returns": returns, "rollout_is_weights": factors, "votes": weights}
        if train.algorithm.imitation:
            made["imitated"] = torch.zeros_like(given)
            if train.algorithm.self_imitation:
                self.callbacks.add_solved(self._solved(batch, scored, episode, seed))
        fields = TensorDict(
            {name: response_to_nested(value, lengths) for name, value in made.items()}, batch_size=len(batch)
        )
        return tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)

    def _record(
        self, batch: KVBatchMeta, used: torch.Tensor, episode: torch.Tensor, turns: torch.Tensor, given: torch.Tensor
    ) -> None:
        """Report the advantages of the tokens that ``used``, (B, T) bool, has."""
        owners = {e: tag for e, tag in zip(episode.tolist(), batch.tags, strict=True) if e >= 0}
        of_token = episode[:, None].expand_as(used)[used].numpy()
        ids = [owners[e]["episode"] for e in range(len(owners))]
        found = advantages_by_turn(ids, of_token, turns[used].long().numpy(), given[used].double().numpy())
        groups: dict[int, TurnAdvantages] = {}
        for tag in owners.values():
            if tag["episode"] in found:
                groups.setdefault(tag["number"], {})[tag["episode"]] = found[tag["episode"]]
        for number, advantages in groups.items():
            self.callbacks.on_advantages(number, advantages)

    def _solved(
        self, batch: KVBatchMeta, scored: Sequence[ScoredEpisode], episode: torch.Tensor, seed: int
    ) -> list[tuple[str, str, MaskedSequence]]:
        """Task, id and training sequence of each episode with the full reward and exactly one training sequence."""
        scores = scores_of(scored, self.callbacks.config, seed=seed)
        chosen = [
            n for n, e in enumerate(episode.tolist()) if e >= 0 and scores[e] >= 1.0 and scored[e].n_sequences == 1
        ]
        if not chosen:
            return []
        chosen.sort(key=lambda n: int(episode[n]))
        data = tq.kv_batch_get(
            keys=[batch.keys[n] for n in chosen], partition_id=batch.partition_id,
            select_fields=["input_ids", "response_mask"],
        )  # fmt: skip
        found = []
        for n, ids, mask in zip(chosen, data["input_ids"].unbind(0), data["response_mask"].unbind(0), strict=True):
            row = MaskedSequence(tuple(ids.tolist()), (*(0,) * (len(ids) - len(mask)), *mask.tolist()))
            found.append((batch.tags[n]["task"], batch.tags[n]["episode"], row))
        return found

    def _update_actor(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        # As in verl, but the size of a mini-batch depends on the batch, whose number of sequences varies.
        actor = self.config.actor_rollout_ref.actor
        cut, rate = self.callbacks.config.algorithm.minibatches, self._rate()
        batch.extra_info.update(
            {RATE: rate},
            max_token_len_per_gpu=self._room,
            calculate_entropy=True,
            distillation_use_topk=False,
            distillation_only=False,
            global_batch_size=len(batch) // cut,
            mini_batch_size=len(batch) // cut,
            epochs=actor.ppo_epochs,
            seed=actor.data_loader_seed,
            dataloader_kwargs={"shuffle": False},
            temperature=self.config.actor_rollout_ref.rollout.temperature,
        )
        with self._demonstrations(batch) as augmented:
            output = self.actor_rollout_wg.update_actor(augmented)
        # Metrics of the loss have the prefix already. verl's own have none, and win where names are equal.
        of_loss = {name: value for name, value in output["metrics"].items() if name.startswith("actor/")}
        said = of_loss | rename_dict({n: v for n, v in output["metrics"].items() if n not in of_loss}, "actor/")
        self._loss_metrics = tuple(of_loss)
        said["perf/mfu/actor"] = said.pop("actor/mfu")
        metrics.update(reduce_metrics(said) | {"actor/lr": rate})
        if (weight := self.callbacks.config.algorithm.imitation) > 0:
            metrics["sft/loss"] = metrics.pop("actor/imitation") / weight
        self._guard(metrics)
        self.spans = [("training", self._sampled, time.time())]
        return batch

    @contextmanager
    def _demonstrations(self, batch: KVBatchMeta) -> Iterator[KVBatchMeta]:
        """The batch with sequences to imitate added to every mini-batch. They are in verl's queue only inside this
        context manager."""
        about, ranks = self.callbacks.config.algorithm, max(self.actor_rollout_wg._dispatch_info["actor"]) + 1
        fields = [
            *_TRAINING_FIELDS,
            *(["ref_log_prob"] if about.kl else []),
            *(["imitated"] if about.imitation else []),
        ]
        augmented = KVBatchMeta(
            partition_id=batch.partition_id,
            keys=batch.keys,
            tags=batch.tags,
            fields=fields,
            extra_info=batch.extra_info,
        )
        if not about.imitation:
            yield augmented
            return
        keys: list[list[str]] = []
        rows: list[dict[str, Any]] = []
        for n in range(about.minibatches):
            paths = self.callbacks.imitation(self._updates + n)
            weight = about.imitation / sum(sum(path.mask) for path in paths)
            made = [imitation_entry(path, weight) for path in paths]
            made += [imitation_entry(paths[0], 0.0)] * (-len(made) % ranks)
            keys.append([f"imitated_{n}_{place}" for place in range(len(made))])
            rows += [{name: row[name] for name in fields} for row in made]
        own = [key for some in keys for key in some]
        tags = dict(zip(batch.keys, batch.tags, strict=True)) | {key: {"is_padding": True} for key in own}
        tq.kv_batch_put(
            keys=own, partition_id=batch.partition_id, fields=list_of_dict_to_tensordict(rows),
            tags=[tags[key] for key in own],
        )  # fmt: skip
        augmented.keys = interleave(batch.keys, keys, ranks)
        augmented.tags = [tags[key] for key in augmented.keys]
        size, longest = len(augmented.keys) // about.minibatches, max(len(row["input_ids"]) for row in rows)
        augmented.extra_info.update(
            global_batch_size=size,
            mini_batch_size=size,
            max_token_len_per_gpu=max(longest, self._room),
        )
        try:
            yield augmented
        finally:
            tq.kv_clear(keys=own, partition_id=batch.partition_id)

    @property
    def _updates(self) -> int:
        """Optimizer updates before this step."""
        about = self.callbacks.config.algorithm
        return (self.global_steps - 1) * about.minibatches * about.epochs

    def _rate(self) -> float:
        """The learning rate: as in the local trainer, but the same for all updates of a step."""
        about = self.callbacks.config.optimizer
        rising = min(1.0, (self._updates + 1) / max(1, about.warmup))
        return about.lr * rising * (1 - 0.9 * self.callbacks.budget_used() if about.decay else 1.0)

    def on_train_begin(self) -> None:
        self.callbacks.on_train_begin(self)
        super().on_train_begin()

    def on_step_begin(self) -> None:
        self._began = time.monotonic()
        super().on_step_begin()

    def on_step_end(self) -> None:
        super().on_step_end()
        self._after_step()

    def _after_step(self) -> None:
        self.seconds = time.monotonic() - self._began
        self.spans.append(("weights", self.spans[-1][2], time.time()))
        self.tokens = int(self._step_metrics["rollout/sampled_tokens"])
        self.callbacks.on_step_trained(self, self._numbers)

    def _compute_metrics(
        self, batch: KVBatchMeta, metrics: dict[str, Any], timing_raw: Any, global_steps: int, epoch: int
    ) -> None:
        # Replaces verl's metrics, so that names mean the same for every trainer.
        found = dict(self._step_metrics)
        kept = (*self._loss_metrics, *_KEPT_METRICS)
        found |= {name: float(metrics[name]) for name in kept if name in metrics}
        waited = timing_raw.get("gen", 0.0)
        found |= {
            "timing/step": self.seconds,
            "timing/wait_for_batch": waited,
            "timing/update": sum(timing_raw.get(name, 0.0) for name in ("old_log_prob", "adv", "update_actor")),
            "timing/weights": timing_raw.get("update_weights", 0.0),
            "perf/trainer_idle_ratio": waited / self.seconds,
            "perf/sampled_tokens_per_second": self.tokens / self.seconds,
        }
        self.callbacks.on_metrics(self, found)

    def write_checkpoint(self, folder: Path) -> None:
        """Write all state for resuming into ``folder``, named ``global_step_N``. Every rank must be able to write
        it."""
        self.actor_rollout_wg.save_checkpoint(str(folder / "actor"), None, self.global_steps, max_ckpt_to_keep=None)
        torch.save(self.train_dataloader.state_dict(), folder / "data.pt")
        if self.trainer_mode != "sync":
            tq.save_checkpoint(str(folder / "transfer_queue"), metadata={"global_steps": self.global_steps})

    def load_checkpoint(self, folder: Path) -> None:
        """Load the weights of a checkpoint, ``global_step_N``, into trainer and servers."""
        self.actor_rollout_wg.load_checkpoint(local_path=str(folder / "actor"), del_local_after_load=False)
        self.global_steps, self.timing_raw = int(folder.name.removeprefix("global_step_")), {}
        if self.trainer_mode != "separate_async":
            self.checkpoint_manager.sleep_replicas()
        super().on_step_end()

    def _guard(self, metrics: Mapping[str, Any]) -> None:
        """Check the guards before the weights are sent to servers or saved."""
        guards = self.callbacks.config.guards
        norm, entropy = float(metrics["actor/grad_norm"]), float(metrics["actor/entropy"])
        moved = float(metrics.get("actor/approx_kl", 0.0))
        if not math.isfinite(norm):
            raise TrainingError(
                "the gradient is NaN or infinite: resume from the last checkpoint with a lower optimizer.lr, or with "
                "model.dtype=float32"
            )
        if not entropy >= guards.min_entropy:
            raise TrainingError(
                f"the entropy of the policy fell to {entropy:.2g} nats per token (guards.min_entropy is "
                f"{guards.min_entropy:g}): resume from an earlier checkpoint with a lower optimizer.lr"
            )
        if moved > guards.max_kl:
            raise TrainingError(
                f"the KL of one step is {moved:.3g} nats per token (guards.max_kl is {guards.max_kl:g}): resume from "
                "the last checkpoint with a lower optimizer.lr"
            )


_TRAINING_FIELDS = (
    "prompts", "responses", "response_mask", "loss_mask", "input_ids", "position_ids", "old_log_probs", "advantages",
    "rollout_is_weights", "votes",
)  # fmt: skip
"""The fields of a queue entry that training processes get."""
_KEPT_METRICS = ("actor/grad_norm", "actor/lr", "sft/loss")
"""Metrics of an update that are logged, besides those of the loss."""


@register_trainer(verl_trainer_name("sync"))
class _SyncTrainer(_ClawGymTrainer, PPOTrainerSync):
    def on_sample_end(self) -> None:
        # Abort requests that late groups left behind: a server must have none while it sleeps.
        self.checkpoint_manager.abort_replicas()
        super().on_sample_end()

    def on_step_end(self) -> None:
        PPOTrainerSync.on_step_end(self)
        self.checkpoint_manager.resume_generation_replicas()
        self._after_step()


@register_trainer(verl_trainer_name("colocate_async"))
class _ColocatedTrainer(_ClawGymTrainer, PPOTrainerColocateAsync): ...


@register_trainer(verl_trainer_name("separate_async"))
class _SeparateTrainer(_ClawGymTrainer, PPOTrainerSeparateAsync):
    learner = DetachedLearner
