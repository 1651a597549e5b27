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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import ray
import torch
import transfer_queue as tq
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.metric import reduce_metrics
from verl.utils.py_functional import rename_dict
from verl.workers.utils.padding import response_to_nested

from clawgym.errors import TrainingError
from clawgym.trainers import algorithms
from clawgym.trainers.config import TrainConfig
from clawgym.trainers.credit import Attempt, figures_of
from clawgym.trainers.verl.formulas import NAME, token_factors
from clawgym.trainers.verl.timeline import Span

if TYPE_CHECKING:
    from omegaconf import DictConfig

__all__ = ["TRAINERS", "Episodes", "Owner", "attempts_of"]

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

    def worth(self) -> float:
        """What process counts for."""
        ...

    def seen(self, attempts: list[Attempt]) -> Mapping[str, float]:
        """The episodes of a batch; figures."""
        ...

    def learnt(self, trainer: Any, groups: list[int]) -> None:
        """A step is done, and the servers have its weights."""
        ...

    def figures(self, step: int, figures: Mapping[str, float]) -> None:
        """Of a step."""
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

    def __init__(self, config: DictConfig, owner: Owner) -> None:
        self.owner = owner
        self._figures: dict[str, float] = {}
        self._numbers: list[int] = []
        self._began = time.monotonic()
        self._sampled = time.time()
        self.spans: list[Span] = []
        """When the last step learnt, and sent weights."""
        super().__init__(config)

    @property
    def version(self) -> int:
        """Of the weights that the servers sample by."""
        return max(0, self.global_steps - 1)

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
        batch.extra_info["max_token_len_per_gpu"] = max(self.owner.config.compute.micro_tokens, longest)
        return batch

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        train = self.owner.config
        wanted = ["response_mask", "rollout_log_probs", "old_log_probs", "turns"]
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=wanted)
        lengths = data["response_mask"]
        padded = {name: _padded(data[name], lengths) for name in wanted}
        mask = padded["response_mask"]
        attempts, episode = attempts_of(batch.tags)
        seed = train.seed * 1_000_003 + self.version
        figures: dict[str, float] = {}
        given, returns = core_algos.get_adv_estimator_fn(NAME)(
            token_level_rewards=None,
            response_mask=mask,
            config=self.config.algorithm,
            attempts=attempts,
            episode=episode,
            turn=padded["turns"],
            train=train,
            seed=seed,
            worth=self.owner.worth(),
            figures=figures,
        )
        importance = None
        if train.algorithm.old == "recompute":
            importance = algorithms.truncated_importance(
                padded["old_log_probs"], padded["rollout_log_probs"], cap=train.algorithm.importance_cap
            )
        factors = token_factors(mask, episode, importance, train)
        trained = mask.bool()
        apart = (padded["old_log_probs"].exp() - padded["rollout_log_probs"].exp()).abs()[trained]
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
        made = {"advantages": given, "returns": returns, "rollout_is_weights": factors}
        fields = TensorDict(
            {name: response_to_nested(value, lengths) for name, value in made.items()}, batch_size=len(batch)
        )
        return tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)

    def _update_actor(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        # As verl does it, but the size of a mini-batch follows from the batch: rows are as many as there are.
        actor = self.config.actor_rollout_ref.actor
        size = len(batch) // self.owner.config.algorithm.minibatches
        batch.extra_info.update(
            calculate_entropy=True,
            distillation_use_topk=False,
            distillation_only=False,
            global_batch_size=size,
            mini_batch_size=size,
            epochs=actor.ppo_epochs,
            seed=actor.data_loader_seed,
            dataloader_kwargs={"shuffle": False},
            temperature=self.config.actor_rollout_ref.rollout.temperature,
        )
        output = self.actor_rollout_wg.update_actor(batch)
        said = rename_dict(output["metrics"], "actor/")
        said["perf/mfu/actor"] = said.pop("actor/mfu")
        metrics.update(reduce_metrics(said))
        metrics.setdefault("actor/entropy", metrics["actor/entropy_loss"])
        self._guard(metrics)
        self.spans = [("training", self._sampled, time.time())]
        return batch

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
        self.owner.figures(global_steps, found)

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


_KEPT = (
    "actor/pg_loss", "actor/entropy", "actor/grad_norm", "actor/lr", "actor/clip_fraction", "actor/clip_fraction_low",
    "actor/clip_fraction_high", "actor/dual_clip_fraction", "actor/ratio_mean", "actor/ratio_max", "actor/approx_kl",
)  # fmt: skip


def _padded(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """(B, T) rows filled up with 0 behind the length that each has in ``like``."""
    rows, sizes = values.unbind(), [len(row) for row in like.unbind()]
    made = torch.zeros((len(sizes), max(sizes)), dtype=rows[0].dtype)
    for place, (row, size) in enumerate(zip(rows, sizes, strict=True)):
        made[place, :size] = row[:size]
    return made


def attempts_of(tags: Sequence[Mapping[str, Any]]) -> tuple[list[Attempt], torch.Tensor]:
    """The episodes that rows are of, in an order that does not depend on that of the rows; and of each row (B,) which
    one, -1 for those that only fill up."""
    known: dict[tuple[str, int], Mapping[str, Any]] = {}
    for tag in tags:
        if not tag.get("is_padding"):
            known[tag["attempt"]["group"], tag["sample"]] = tag["attempt"]
    places = {key: place for place, key in enumerate(sorted(known))}
    episode = [-1 if tag.get("is_padding") else places[tag["attempt"]["group"], tag["sample"]] for tag in tags]
    return [_attempt(known[key]) for key in places], torch.tensor(episode)


def _attempt(about: Mapping[str, Any]) -> Attempt:
    process = {int(turn): value for turn, value in about["process"].items()}
    return Attempt(**{**about, "turns": tuple(about["turns"]), "process": process})


class _SyncTrainer(_Ours, PPOTrainerSync):
    def on_sample_end(self) -> None:
        # A group that came too late has left requests behind, which no server may hold while it sleeps.
        self.checkpoint_manager.abort_replicas()
        super().on_sample_end()

    def on_step_end(self) -> None:
        PPOTrainerSync.on_step_end(self)
        self.checkpoint_manager.resume_generation_replicas()
        self._after_step()


class _ColocatedTrainer(_Ours, PPOTrainerColocateAsync): ...


class _SeparateTrainer(_Ours, PPOTrainerSeparateAsync): ...


TRAINERS: Mapping[str, type[Any]] = {
    "sync": _SyncTrainer,
    "colocate_async": _ColocatedTrainer,
    "separate_async": _SeparateTrainer,
}
