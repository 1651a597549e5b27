"""verl's trainers with our groups, advantages and votes in them.

Invariants: the votes of a batch are counted before it is cut; one step of learning is ``minibatches`` updates, whatever
the number of rows; whoever waits for episodes hears of it when they cannot come.
"""

# What verl's classes say of themselves does not hold (calls that wait by themselves look as if they had to be awaited):
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
from clawgym.trainers import algorithms
from clawgym.trainers.batching import MaskedSequence
from clawgym.trainers.config import TrainConfig
from clawgym.trainers.credit import ScoredEpisode, figures_of, scores_of, taught_advantages
from clawgym.trainers.verl.formulas import NAME, token_votes
from clawgym.trainers.verl.rows import attempts_of, beside, imitation_of, padded
from clawgym.trainers.verl.timeline import Span
from clawgym.trainers.verl.worker import RATE, ColocatedLearner, DetachedLearner

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from verl.workers.rollout.llm_server import LLMServerClient

__all__ = ["Episodes", "Owner", "in_verl"]


def in_verl(mode: str) -> str:
    """The name in verl's registry of our trainer of ``verl.mode``."""
    return f"clawgym_{mode}"


_POLL = 0.1
"""Seconds between two looks at whether groups have ended."""


class Owner(Protocol):
    """Whose run it is: told what happens, and asked what verl does not know."""

    config: TrainConfig

    def check(self) -> None:
        """Called while waiting; raises what ends the run."""
        ...

    def begins(self, trainer: Any) -> None:
        """Before the first step of this call."""
        ...

    def used(self) -> float:
        """The share of the budget that is used up, in [0, 1]."""
        ...

    def worth(self, setting: str) -> float:
        """What process counts for in tasks of ``setting``."""
        ...

    def imitated(self, number: int) -> Sequence[MaskedSequence]:
        """The rows that are imitated in an update."""
        ...

    def solved(self, episodes: Sequence[tuple[str, str, MaskedSequence]]) -> None:
        """Task, id and row of those of a batch that can be imitated from now on."""
        ...

    def seen(self, attempts: list[ScoredEpisode]) -> Mapping[str, float]:
        """The episodes of a batch; figures."""
        ...

    def learnt(self, trainer: Any, groups: list[int]) -> None:
        """A step is done, and the servers have its weights."""
        ...

    def figures(self, trainer: Any, figures: Mapping[str, float]) -> None:
        """Of the step that was learnt last; a checkpoint may be written now."""
        ...


class Episodes:
    """The agent loop manager: every group goes to a host, which gives its rows to verl when it has ended."""

    def __init__(self, hosts: list[Any], version: Callable[[], int]) -> None:
        self._hosts = hosts
        self._version = version
        self._running: list[Any] = []

    def generate_sequences(self, prompts: TensorDict) -> None:
        """Begin groups; does not wait for them."""
        for uid, number in zip(prompts["uid"], prompts["index"], strict=True):
            host = self._hosts[int(number) % len(self._hosts)]
            self._running.append(host.group.remote(str(uid), int(number), self._version()))

    def check(self) -> None:
        """Raise what a group, or its host, died of."""
        if self._running:
            ended, self._running = ray.wait(self._running, num_returns=len(self._running), timeout=0)
            ray.get(ended)


class _Waiting:
    """A replay buffer that looks often, and notices what ends the run."""

    check: Callable[[], None]

    def _wait_for_next_poll(self, partition_id: str, last_debug_time: float) -> float:
        self.check()
        time.sleep(_POLL)
        return last_debug_time


class _Sync(_Waiting, ReplayBuffer): ...


class _Async(_Waiting, ReplayBufferAsync): ...


class _Ours(PPOTrainer):
    """What is ours in each of verl's trainers."""

    learner: ClassVar[type[Any]] = ColocatedLearner

    def __init__(self, config: DictConfig, owner: Owner) -> None:
        self.owner = owner
        self._figures: dict[str, float] = {}
        self._numbers: list[int] = []
        self._began = time.monotonic()
        self._sampled = time.time()
        self._room = 0
        self.spans: list[Span] = []
        """When the last step learnt, and sent weights."""
        super().__init__(config)

    @property
    def version(self) -> int:
        """Of the weights that the servers sample by."""
        return max(0, self.global_steps - 1)

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        for role in (Role.Actor, Role.ActorRollout, Role.ActorRolloutRef):
            if role in self.role_worker_mapping:
                self.role_worker_mapping[role] = ray.remote(self.learner)

    def reader(self) -> LLMServerClient:
        """A client that gives back all that a server says, in every mode."""
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
        made.check = self.owner.check
        return made

    def _get_required_batch_multiple(self, dp_size: int) -> int:
        return dp_size * self.owner.config.algorithm.minibatches

    def _balance_batch(self, batch: KVBatchMeta, metrics: Any, **kwargs: Any) -> KVBatchMeta:
        self._sampled = time.time()
        longest = max(tag["seq_len"] for tag in batch.tags)
        batch = super()._balance_batch(batch, metrics, **kwargs)
        # A micro-batch has room for the longest row there is, not for the longest there could be.
        self._room = max(self.owner.config.compute.micro_tokens, longest)
        batch.extra_info["max_token_len_per_gpu"] = self._room
        return batch

    def _compute_ref_log_prob(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        # What was said of a batch is lost wherever the queue gives it back.
        batch.extra_info["max_token_len_per_gpu"] = self._room
        return super()._compute_ref_log_prob(batch, metrics)

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        train = self.owner.config
        wanted = ["response_mask", "rollout_log_probs", "old_log_probs", "turns"]
        wanted += ["teacher_log_probs"] if train.distillation.hints else []
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=wanted)
        lengths = data["response_mask"]
        whole = {name: padded(data[name], lengths) for name in wanted}
        mask = whole["response_mask"]
        attempts, episode = attempts_of(batch.tags)
        seed = train.seed * 1_000_003 + self.version
        figures: dict[str, float] = {}
        given, returns = core_algos.get_adv_estimator_fn(NAME)(
            token_level_rewards=None,
            response_mask=mask,
            config=self.config.algorithm,
            attempts=attempts,
            episode=episode,
            turn=whole["turns"],
            train=train,
            seed=seed,
            worth=self.owner.worth,
            figures=figures,
        )
        votes = factors = token_votes(mask, episode, train)
        if train.algorithm.old == "recompute":
            factors = votes * algorithms.truncated_importance(
                whole["old_log_probs"], whole["rollout_log_probs"], cap=train.algorithm.importance_cap
            )
        trained = mask.bool()
        if train.distillation.hints:
            teacher = torch.where(trained, whole["teacher_log_probs"], torch.nan)
            given = taught_advantages(given, whole["old_log_probs"], teacher, train.distillation)
            figures["opd/tokens_taught_frac"] = float(teacher[trained].isfinite().float().mean())
        apart = (whole["old_log_probs"].exp() - whole["rollout_log_probs"].exp()).abs()[trained]
        self._numbers = sorted({tag["number"] for tag in batch.tags if not tag.get("is_padding")})
        lags = [self.version - tag["min_global_steps"] for tag in batch.tags if not tag.get("is_padding")]
        self._figures = {
            **figures_of(attempts, train, seed=seed),
            **figures,
            **self.owner.seen(attempts),
            "actor/advantage_abs_mean": float(given[trained].abs().mean()) if trained.any() else 0.0,
            "training/rollout_probs_diff": float(apart.mean()),
            "training/rollout_probs_diff_max": float(apart.max()),
            "staleness/mean": sum(lags) / len(lags),
            "staleness/max": float(max(lags)),
        }
        made = {"advantages": given, "returns": returns, "rollout_is_weights": factors, "votes": votes}
        if train.algorithm.imitation:
            made["imitated"] = torch.zeros_like(given)
            self.owner.solved(self._solved(batch, attempts, episode, seed))
        fields = TensorDict(
            {name: response_to_nested(value, lengths) for name, value in made.items()}, batch_size=len(batch)
        )
        return tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)

    def _solved(
        self, batch: KVBatchMeta, attempts: Sequence[ScoredEpisode], episode: torch.Tensor, seed: int
    ) -> list[tuple[str, str, MaskedSequence]]:
        """Task, id and row of each episode that earned everything, those of one row."""
        scores = scores_of(attempts, self.owner.config, seed=seed)
        chosen = [n for n, e in enumerate(episode.tolist()) if e >= 0 and scores[e] >= 1.0 and attempts[e].n_rows == 1]
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
        # As verl does it, but the size of a mini-batch follows from the batch: rows are as many as there are.
        actor = self.config.actor_rollout_ref.actor
        cut, rate = self.owner.config.algorithm.minibatches, self._rate()
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
        with self._demonstrations(batch) as learnt:
            output = self.actor_rollout_wg.update_actor(learnt)
        said = rename_dict(output["metrics"], "actor/")
        said["perf/mfu/actor"] = said.pop("actor/mfu")
        metrics.update(reduce_metrics(said) | {"actor/lr": rate})
        if (weight := self.owner.config.algorithm.imitation) > 0:
            metrics["sft/loss"] = metrics.pop("actor/imitation") / weight
        self._guard(metrics)
        self.spans = [("training", self._sampled, time.time())]
        return batch

    @contextmanager
    def _demonstrations(self, batch: KVBatchMeta) -> Iterator[KVBatchMeta]:
        """The batch with what is imitated beside it, in every mini-batch; it is in verl's queue only meanwhile."""
        about, ranks = self.owner.config.algorithm, max(self.actor_rollout_wg._dispatch_info["actor"]) + 1
        fields = [*_LEARNT, *(["ref_log_prob"] if about.kl else []), *(["imitated"] if about.imitation else [])]
        learnt = KVBatchMeta(
            partition_id=batch.partition_id,
            keys=batch.keys,
            tags=batch.tags,
            fields=fields,
            extra_info=batch.extra_info,
        )
        if not about.imitation:
            yield learnt
            return
        keys: list[list[str]] = []
        rows: list[dict[str, Any]] = []
        for n in range(about.minibatches):
            paths = self.owner.imitated(self._updates + n)
            weight = about.imitation / sum(sum(path.mask) for path in paths)
            made = [imitation_of(path, weight) for path in paths]
            made += [imitation_of(paths[0], 0.0)] * (-len(made) % ranks)
            keys.append([f"imitated_{n}_{place}" for place in range(len(made))])
            rows += [{name: row[name] for name in fields} for row in made]
        own = [key for some in keys for key in some]
        tags = dict(zip(batch.keys, batch.tags, strict=True)) | {key: {"is_padding": True} for key in own}
        tq.kv_batch_put(
            keys=own, partition_id=batch.partition_id, fields=list_of_dict_to_tensordict(rows),
            tags=[tags[key] for key in own],
        )  # fmt: skip
        learnt.keys = beside(batch.keys, keys, ranks)
        learnt.tags = [tags[key] for key in learnt.keys]
        size, longest = len(learnt.keys) // about.minibatches, max(len(row["input_ids"]) for row in rows)
        learnt.extra_info.update(
            global_batch_size=size,
            mini_batch_size=size,
            max_token_len_per_gpu=max(longest, self._room),
        )
        try:
            yield learnt
        finally:
            tq.kv_clear(keys=own, partition_id=batch.partition_id)

    @property
    def _updates(self) -> int:
        """Before this step."""
        about = self.owner.config.algorithm
        return (self.global_steps - 1) * about.minibatches * about.epochs

    def _rate(self) -> float:
        """As in the local trainer, but the same for all updates of a step."""
        about = self.owner.config.optimizer
        rising = min(1.0, (self._updates + 1) / max(1, about.warmup))
        return about.lr * rising * (1 - 0.9 * self.owner.used() if about.decay else 1.0)

    def on_train_begin(self) -> None:
        self.owner.begins(self)
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
        self.tokens = int(self._figures["rollout/sampled_tokens"])
        self.owner.learnt(self, self._numbers)

    def _compute_metrics(
        self, batch: KVBatchMeta, metrics: dict[str, Any], timing_raw: Any, global_steps: int, epoch: int
    ) -> None:
        # In place of verl's: the same names mean the same in the folder of every run.
        found = dict(self._figures)
        found |= {name: float(metrics[name]) for name in _KEPT if name in metrics}
        waited = timing_raw.get("gen", 0.0)
        found |= {
            "timing/step": self.seconds,
            "timing/wait_for_batch": waited,
            "timing/update": sum(timing_raw.get(name, 0.0) for name in ("old_log_prob", "adv", "update_actor")),
            "timing/weights": timing_raw.get("update_weights", 0.0),
            "perf/trainer_idle_ratio": waited / self.seconds,
            "perf/sampled_tokens_per_second": self.tokens / self.seconds,
        }
        self.owner.figures(self, found)

    def write_checkpoint(self, folder: Path) -> None:
        """All that a run goes on from, into a folder ``global_step_N`` that every rank can write."""
        self.actor_rollout_wg.save_checkpoint(str(folder / "actor"), None, self.global_steps, max_ckpt_to_keep=None)
        torch.save(self.train_dataloader.state_dict(), folder / "data.pt")
        if self.trainer_mode != "sync":
            tq.save_checkpoint(str(folder / "transfer_queue"), metadata={"global_steps": self.global_steps})

    def go_back(self, folder: Path) -> None:
        """Sample by the weights of a checkpoint, ``global_step_N``."""
        self.actor_rollout_wg.load_checkpoint(local_path=str(folder / "actor"), del_local_after_load=False)
        self.global_steps, self.timing_raw = int(folder.name.removeprefix("global_step_")), {}
        if self.trainer_mode != "separate_async":
            self.checkpoint_manager.sleep_replicas()
        super().on_step_end()

    def _guard(self, metrics: Mapping[str, Any]) -> None:
        """Before anybody samples by weights that have gone wrong, and before they are saved."""
        guards = self.owner.config.guards
        norm, entropy = float(metrics["actor/grad_norm"]), float(metrics["actor/entropy"])
        moved = float(metrics.get("actor/approx_kl", 0.0))
        if not math.isfinite(norm):
            raise TrainingError(
                "the gradient is not a number: go on from the last checkpoint with a lower optimizer.lr, or with "
                "model.dtype=float32"
            )
        if not entropy >= guards.min_entropy:
            raise TrainingError(
                f"the entropy of the policy fell to {entropy:.2g} nats a token (guards.min_entropy is "
                f"{guards.min_entropy:g}): go on from an earlier checkpoint with a lower optimizer.lr"
            )
        if moved > guards.max_kl:
            raise TrainingError(
                f"the policy moved {moved:.3g} nats a token away within one step (guards.max_kl is "
                f"{guards.max_kl:g}): go on from the last checkpoint with a lower optimizer.lr"
            )


_LEARNT = (
    "prompts", "responses", "response_mask", "loss_mask", "input_ids", "position_ids", "old_log_probs", "advantages",
    "rollout_is_weights", "votes",
)  # fmt: skip
"""What a process that learns is given of a row."""
_KEPT = (
    "actor/pg_loss", "actor/entropy", "actor/grad_norm", "actor/lr", "actor/clip_fraction", "actor/clip_fraction_low",
    "actor/clip_fraction_high", "actor/dual_clip_fraction", "actor/ratio_mean", "actor/ratio_max", "actor/approx_kl",
    "actor/ref_kl", "sft/loss",
)  # fmt: skip


@register_trainer(in_verl("sync"))
class _SyncTrainer(_Ours, PPOTrainerSync):
    def on_sample_end(self) -> None:
        # A group that came too late has left requests behind, which no server may hold while it sleeps.
        self.checkpoint_manager.abort_replicas()
        super().on_sample_end()

    def on_step_end(self) -> None:
        PPOTrainerSync.on_step_end(self)
        self.checkpoint_manager.resume_generation_replicas()
        self._after_step()


@register_trainer(in_verl("colocate_async"))
class _ColocatedTrainer(_Ours, PPOTrainerColocateAsync): ...


@register_trainer(in_verl("separate_async"))
class _SeparateTrainer(_Ours, PPOTrainerSeparateAsync):
    learner = DetachedLearner
