"""The part of a training step that is the same for every trainer: mini-batches, old log-probs, learning rates, guards.

Invariants: token weights are computed over the whole mini-batch before the first forward pass. The order of computation
is determined by the batch and the seed. A policy that exceeds a guard raises an error before it can be saved or sampled
from.
"""

from __future__ import annotations

import math
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from clawgym.errors import TrainingError
from clawgym.trainers import algorithms
from clawgym.trainers.batching import MaskedSequence
from clawgym.trainers.common.batch import TrainingBatch
from clawgym.trainers.config import TrainConfig
from clawgym.trainers.credit import distilled_advantages
from clawgym.trainers.protocols import logged_metrics

__all__ = ["BatchLearner", "Imitated", "MiniBatch", "StepMetrics", "mean_difference", "not_finite"]

Imitated = Callable[[int], Sequence[MaskedSequence]]
"""Number of the update -> the sequences to imitate in it, at least one."""


class StepMetrics:
    """Metrics of a step, averaged over its tokens."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, float]] = {}
        self._plain: dict[str, float] = {}

    def add(self, name: str, value: torch.Tensor, count: int) -> None:
        total, n = self._sums.get(name, (0.0, 0.0))
        self._sums[name] = (total + (float(value) * count if count else 0.0), n + count)

    def sum(self, name: str, value: torch.Tensor) -> None:
        self._plain[name] = self._plain.get(name, 0.0) + float(value)

    def most(self, name: str, value: torch.Tensor) -> None:
        self._plain[name] = max(self._plain.get(name, -math.inf), float(value))

    def set(self, name: str, value: float) -> None:
        self._plain[name] = value

    def mean(self, name: str) -> float:
        total, n = self._sums.get(name, (0.0, 0.0))
        return total / n if n else 0.0

    def add_logged(self, said: Mapping[str, torch.Tensor], count: int) -> None:
        """The metrics that a loss over ``count`` tokens gave (:func:`~clawgym.trainers.protocols.logged_metrics`)."""
        for name, value in logged_metrics(said).items():
            if name == "ratio_max":
                self.most("actor/ratio_max", value)
            else:
                self.add(f"actor/{name}", value, count)

    def all(self) -> dict[str, Any]:
        return {**self._plain, **{name: self.mean(name) for name in self._sums}}


@dataclass(frozen=True)
class MiniBatch:
    """The tokens of one update."""

    batch: TrainingBatch
    """The whole batch."""
    part: torch.Tensor
    """(S',) the indices of the trained tokens of this update."""
    weights: torch.Tensor
    """(S,) token weights; 0 outside of ``part``."""
    old: torch.Tensor
    """(S,) log-probs of the old policy."""
    importance: torch.Tensor | None
    """(S,) importance weights; None with ``algorithm.old: rollout``."""
    unchanged: bool
    """Whether the policy is still that of before the step."""


class BatchLearner(ABC):
    """Trains a policy on batches. Subclasses compute log-probs and updates."""

    def __init__(self, config: TrainConfig, *, lr: float | None = None, warmup: int = 0) -> None:
        self._config = config
        self.lr = config.optimizer.lr if lr is None else lr
        self._warmup = warmup or config.optimizer.warmup
        self.updates = 0
        """Optimizer steps taken."""
        self.advantages = torch.empty(0)
        """(S,) of each trained token of the last batch, as its updates used them."""

    def train_step(
        self, batch: TrainingBatch, *, seed: int, done: float = 0.0, imitation: Imitated | None = None
    ) -> dict[str, float]:
        """Update the policy on a batch and return metrics.

        Args:
            batch: the batch.
            seed: determines the mini-batches.
            done: the share of the budget that is used up, in [0, 1], for ``optimizer.decay``.
            imitation: number of the update -> the sequences for ``algorithm.imitation``.

        Raises:
            TrainingError: for a NaN or infinite gradient, before it changes the weights; and if the policy exceeds a
                guard after the last update. In that case its weights have changed: discard them.
        """
        config, about = self._config, self._config.algorithm
        started = time.perf_counter()
        rng = random.Random(seed)
        metrics = StepMetrics()
        batch, old = self._prepared(batch, metrics)
        importance = None
        if about.old == "recompute":
            importance = algorithms.importance_weights(
                old,
                batch.rollout_logp,
                cap=about.importance_cap,
                rows=batch.row if about.importance.endswith("sequence") else None,
                masked=about.importance.startswith("masked"),
            )
        advantages, teachers = self._advantages(batch, old)
        batch = replace(batch, advantages=advantages)
        self.advantages = advantages
        metrics.set("opd/tokens_taught_frac", teachers)
        if importance is not None and about.importance.startswith("masked"):
            metrics.add("training/importance_masked_frac", (importance == 0).float().mean(), len(old))
        if about.old == "recompute":
            metrics.add("training/rollout_probs_diff", mean_difference(old, batch.rollout_logp), len(old))
        lr = self.lr * (1 - 0.9 * done) if config.optimizer.decay else self.lr
        members = list(batch.trained)
        first = self.updates
        metrics.set("actor/grad_norm", 0.0)
        metrics.set("actor/lr", lr)
        for _ in range(about.epochs):
            rng.shuffle(members)
            share = max(1, math.ceil(len(members) / about.minibatches))
            chunks = [members[start : start + share] for start in range(0, len(members), share)]
            if imitation is not None:  # as many updates, however many groups are trained on
                chunks += [[]] * (about.minibatches - len(chunks))
            for chunk in chunks:
                part = batch.of_episodes(chunk)
                weights = torch.zeros_like(old)
                weights[part] = algorithms.token_weights(
                    batch.episode[part], about.aggregation, rows=batch.row[part], norm=config.loss_length
                )
                rate = lr * min(1.0, (self.updates + 1) / max(1, self._warmup))
                mini = MiniBatch(batch, part, weights, old, importance, unchanged=self.updates == first)
                norm = self._update(mini, metrics, lr=rate, imitation=imitation)
                self.updates += 1
                metrics.most("actor/grad_norm", torch.tensor(norm))
                metrics.set("actor/lr", rate)
        self._guard(batch, old, rng, metrics)
        seconds = time.perf_counter() - started
        metrics.set("timing/update", seconds)
        metrics.set("perf/update_tokens_per_second", about.epochs * batch.computed_tokens / seconds)
        return metrics.all()

    def _guard(self, batch: TrainingBatch, old: torch.Tensor, rng: random.Random, metrics: StepMetrics) -> None:
        """Check the guards after the updates of a step, on some of its tokens."""
        guards = self._config.guards
        places, logp, entropy = self._sample(batch, rng)
        if not len(places):
            return
        # The tokens are samples of the old policy: KL(old || new). k1, because one outlier would dominate k3.
        moved, left = float(algorithms.kl(old[places], logp, "k1").mean()), float(entropy.mean())
        metrics.set("actor/step_kl", moved)
        if not moved <= guards.max_kl:
            raise TrainingError(
                f"the KL of one step is {moved:.3g} nats per token (guards.max_kl is {guards.max_kl:g}): resume from "
                "the last checkpoint with a lower optimizer.lr"
            )
        if not left >= guards.min_entropy:
            raise TrainingError(
                f"the entropy of the policy fell to {left:.2g} nats per token (guards.min_entropy is "
                f"{guards.min_entropy:g}): resume from the last checkpoint with a lower optimizer.lr"
            )

    @abstractmethod
    def _prepared(self, batch: TrainingBatch, metrics: StepMetrics) -> tuple[TrainingBatch, torch.Tensor]:
        """The batch, with advantages from the values of a critic if there is one; and (S,) the log-probs of the old
        policy in the ratio."""

    @abstractmethod
    def _update(self, mini: MiniBatch, metrics: StepMetrics, *, lr: float, imitation: Imitated | None = None) -> float:
        """One step of the optimizer on a mini-batch, and on the sequences to imitate. Returns the norm of the gradient.

        Raises :class:`~clawgym.errors.TrainingError` (:func:`not_finite`) instead if that is NaN or infinite."""

    @abstractmethod
    def _sample(self, batch: TrainingBatch, rng: random.Random) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Some trained tokens of the batch: their indices, and their log-probs and entropies under the policy now."""

    @staticmethod
    def _drawn(batch: TrainingBatch, rng: random.Random, tokens: int) -> list[int]:
        """The indices of random training sequences with at most ``tokens`` ids together, but one at least; empty if
        nothing is trained."""
        drawn, rows = list[int](), sorted(set(batch.row.tolist()))
        for n in rng.sample(rows, len(rows)):
            tokens -= len(batch.sequences[n].ids)
            if tokens < 0 and drawn:
                break
            drawn.append(n)
        return sorted(drawn)

    def _rows_with_gradient(self, batch: TrainingBatch, part: torch.Tensor) -> list[int]:
        """The indices of the training sequences with tokens in ``part`` that have a gradient."""
        about = self._config.algorithm
        if not (about.kl or about.entropy):
            used = batch.advantages != 0
            if self._config.distillation.teaches_topk:
                used |= batch.teacher_logp.isfinite()
            part = part[used[part]]
        return sorted(set(batch.row[part].tolist()))

    def _advantages(self, batch: TrainingBatch, old: torch.Tensor) -> tuple[torch.Tensor, float]:
        """(S,) advantages with the weight ``w_rl`` and the distillation term, if it is one of the advantages; and the
        fraction of tokens with a teacher."""
        about = self._config.distillation
        if not about.hints:
            return batch.advantages, 0.0
        if about.loss == "topk":
            both = about.w_rl * batch.advantages
        else:
            both = distilled_advantages(batch.advantages, old, batch.teacher_logp, about)
        return both, float(batch.teacher_logp.isfinite().float().mean()) if len(both) else 0.0


def not_finite() -> TrainingError:
    """The error for a NaN or infinite gradient."""
    return TrainingError(
        "the gradient is NaN or infinite; the weights were not changed: resume from the last checkpoint with a "
        "lower optimizer.lr, or with model.dtype=float32"
    )


def mean_difference(logp: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Mean absolute difference of token probabilities; 0 without tokens."""
    return (logp.exp() - other.exp()).abs().mean() if len(logp) else torch.tensor(0.0)
