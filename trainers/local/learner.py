"""One training step: update the weights on a batch of the pool, and return metrics.

Invariants: token weights are computed over the whole mini-batch before the first forward pass, so the result does not
depend on the micro-batches. The order of computation is determined by the batch and the seed. Weights change only if
the gradient is finite. A policy that exceeds a guard raises an error before it can be saved or sampled from.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from clawgym.errors import TrainingError
from clawgym.registry import advantages as registry
from clawgym.trainers import algorithms
from clawgym.trainers.batching import MaskedSequence, MicroBatch, Packed, micro_batches, pack
from clawgym.trainers.common.batch import TrainingBatch
from clawgym.trainers.common.imitation import ImitationData
from clawgym.trainers.common.policy import Policy, base_of, hidden_states, logprobs_of, reverse_kl_of, token_logprobs
from clawgym.trainers.config import TrainConfig
from clawgym.trainers.credit import distilled_advantages
from clawgym.trainers.local.critic import ValueHead
from clawgym.trainers.protocols import logged_metrics, loss_of
from clawgym.trainers.traits import traits_of

__all__ = ["Learner"]


class Learner:
    """Trains a policy: owns its optimizer."""

    def __init__(self, policy: Policy, config: TrainConfig, *, lr: float | None = None, warmup: int = 0) -> None:
        self.policy = policy
        self._config = config
        self._loss = loss_of(config.algorithm)
        self.lr = config.optimizer.lr if lr is None else lr
        self._warmup = warmup or config.optimizer.warmup
        self._trained = [p for p in policy.module.parameters() if p.requires_grad]
        self.parameters = [p if p.dtype == torch.float32 else p.detach().float() for p in self._trained]
        """The optimizer's parameters: the weights, or float32 copies of weights in lower precision. Updates of 1e-6 are
        smaller than the spacing of bfloat16 numbers."""
        about = config.optimizer
        self.optimizer = torch.optim.AdamW(
            self.parameters,
            lr=self.lr,
            betas=about.betas,
            eps=about.eps,
            weight_decay=about.weight_decay,
            foreach=False,  # on a GPU, foreach needs 4 bytes per weight more
        )
        self._precision = partial(torch.autocast, "cpu", torch.bfloat16, enabled=config.compute.kernels == "bfloat16")
        self.updates = 0
        """Optimizer steps taken."""
        self.critic: ValueHead | None = None
        """For an advantage that uses values."""
        if traits_of(config.algorithm.advantage).uses_values:
            self.critic = ValueHead(_width(policy), config.critic, policy.device)

    def train_step(
        self, batch: TrainingBatch, *, seed: int, done: float = 0.0, imitation: ImitationData | None = None
    ) -> dict[str, float]:
        """Update the policy on a batch and return metrics.

        Args:
            batch: the batch.
            seed: determines the mini-batches.
            done: the share of the budget that is used up, in [0, 1], for ``optimizer.decay``.
            imitation: the data for ``algorithm.imitation``.

        Raises:
            TrainingError: for a NaN or infinite gradient, before it changes the weights; and if the policy exceeds a
                guard after the last update. In that case its weights have changed: discard them.
        """
        config, about = self._config, self._config.algorithm
        started = time.perf_counter()
        rng = random.Random(seed)
        old, states = self._old(batch)
        importance = None
        if about.old == "recompute":
            importance = algorithms.importance_weights(
                old,
                batch.rollout_logp,
                cap=about.importance_cap,
                rows=batch.row if about.importance.endswith("sequence") else None,
                masked=about.importance.startswith("masked"),
            )
        metrics = _Metrics()
        if states is not None:
            batch = self._valued(batch, states, metrics)
        advantages, teachers = self._advantages(batch, old)
        batch = replace(batch, advantages=advantages)
        metrics.set("opd/tokens_taught_frac", teachers)
        if importance is not None and about.importance.startswith("masked"):
            metrics.add("training/importance_masked_frac", (importance == 0).float().mean(), len(old))
        if about.old == "recompute":
            metrics.add("training/rollout_probs_diff", _apart(old, batch.rollout_logp), len(old))
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
                self._set_lr(lr * min(1.0, (self.updates + 1) / max(1, self._warmup)))
                self._forget_gradient()
                if imitation is not None:
                    self._imitate(imitation.batch(self.updates), about.imitation, metrics)
                self._update(batch, part, old, importance, metrics, unchanged=self.updates == first)
        self._guard(batch, old, rng, metrics)
        seconds = time.perf_counter() - started
        metrics.set("timing/update", seconds)
        metrics.set("perf/update_tokens_per_second", about.epochs * batch.computed_tokens / seconds)
        return metrics.all()

    def _guard(self, batch: TrainingBatch, old: torch.Tensor, rng: random.Random, metrics: _Metrics) -> None:
        """Check the guards after the updates of a step, on one micro-batch of randomly drawn rows."""
        guards = self._config.guards
        micro = next(iter(self._micro(rng.sample(list(batch.rows), len(batch.rows)))), None)
        if micro is None or not len(micro.places):
            return
        with torch.no_grad(), self._precision():
            logp, entropy = token_logprobs(self.policy.module, micro, temperature=batch.temperature)
        # The tokens are samples of the old policy: KL(old || new). k1, because one outlier would dominate k3.
        moved, left = float(algorithms.kl(old[micro.places], logp, "k1").mean()), float(entropy.mean())
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

    def imitate(self, paths: Sequence[MaskedSequence], *, step: int, steps: int) -> dict[str, float]:
        """One step of supervised training: mean cross-entropy over the trained tokens."""
        about = self._config.sft
        decay = 1 - 0.9 * step / max(1, steps) if about.decay else 1.0
        self._set_lr(about.lr * min(1.0, (step + 1) / max(1, about.warmup)) * decay)
        metrics, started = _Metrics(), time.perf_counter()
        self._forget_gradient()
        self._imitate(paths, 1.0, metrics)
        metrics.set("sft/grad_norm", self._step())
        metrics.set("sft/lr", self.optimizer.param_groups[0]["lr"])
        metrics.set("timing/update", time.perf_counter() - started)
        return metrics.all()

    def _imitate(self, paths: Sequence[MaskedSequence], weight: float, metrics: _Metrics) -> None:
        """Add the gradient of ``weight`` times the mean cross-entropy over the trained tokens of ``paths``."""
        count = sum(sum(path.mask) for path in paths)
        for micro in self._micro(self._rows(paths)):
            with self._precision():
                logp, _ = token_logprobs(self.policy.module, micro)
            loss = -logp.sum() / count
            (weight * loss).backward()
            metrics.add("sft/loss", loss.detach() * count / max(1, len(logp)), len(logp))

    def _old(self, batch: TrainingBatch) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(S,) the log-probs of the old policy in the ratio; and with a critic the (N, H) hidden states of the old
        policy before each turn."""
        recompute, module, turns = self._config.algorithm.old == "recompute", self.policy.module, batch.turns
        if not recompute and turns is None:
            return batch.rollout_logp, None
        old, states = torch.zeros_like(batch.rollout_logp) if recompute else batch.rollout_logp, None
        if turns is not None:
            states = torch.zeros(len(turns.first), _width(self.policy), device=old.device)
        with torch.no_grad(), self._precision():
            for micro in self._micro(batch.rows):
                hidden = hidden_states(module, micro)
                if recompute:
                    old[micro.places] = logprobs_of(module, hidden, micro.targets, temperature=batch.temperature)[0]
                if turns is not None and states is not None:
                    of = turns.turn[micro.places]
                    starts = turns.first[of] == micro.places
                    states[of[starts]] = hidden[starts].float()
        return old, states

    def _valued(self, batch: TrainingBatch, states: torch.Tensor, metrics: _Metrics) -> TrainingBatch:
        """The batch with advantages from the critic's values, on which the critic is then trained."""
        turns, critic, about = batch.turns, self.critic, self._config.algorithm
        if turns is None or critic is None or not len(states):
            return batch
        values = critic.values(states).detach()
        gain, returns = registry.make(about.advantage, turns.rewards, values, turns.episode, **about.advantage_options)
        for name, value in critic.train_step(states, returns, turns.episode).items():
            metrics.set(name, value)
        advantages = gain[turns.turn]
        metrics.set("actor/advantage_abs_mean", float(advantages.abs().mean()))
        return replace(batch, advantages=advantages)

    def _computed(self, batch: TrainingBatch, part: torch.Tensor) -> Iterator[tuple[MicroBatch, torch.Tensor]]:
        """Micro-batches of the training sequences with tokens in ``part`` that have a gradient, and (S'',) the index in
        the batch of each of their trained tokens."""
        about = self._config.algorithm
        if not (about.kl or about.entropy):
            used = batch.advantages != 0
            if self._config.distillation.teaches_topk:
                used |= batch.teacher_logp.isfinite()
            part = part[used[part]]
        used = sorted(set(batch.row[part].tolist()))
        if len(used) == len(batch.sequences):
            yield from ((micro, micro.places) for micro in self._micro(batch.rows))
            return
        places = batch.places_of(used)
        for micro in self._micro(self._rows([batch.sequences[n] for n in used])):
            yield micro, places[micro.places]

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

    def _update(
        self,
        batch: TrainingBatch,
        part: torch.Tensor,
        old: torch.Tensor,
        importance: torch.Tensor | None,
        metrics: _Metrics,
        *,
        unchanged: bool,
    ) -> None:
        """One step of the optimiser on the tokens ``part`` (S',) of a batch, and on the gradient that is there;
        ``unchanged``: the policy is still that of before the step."""
        about = self._config.algorithm
        weights = torch.zeros_like(old)
        weights[part] = algorithms.token_weights(
            batch.episode[part], about.aggregation, rows=batch.row[part], norm=self._config.loss_length
        )
        for micro, at in self._computed(batch, part):
            module, temperature = self.policy.module, batch.temperature
            with self._precision():
                hidden = hidden_states(module, micro)
                logp, entropy = logprobs_of(
                    module, hidden, micro.targets, temperature=temperature, learn_entropy=about.entropy > 0
                )
            factors = None if importance is None else importance[at]
            loss, said = self._loss(logp, old[at], batch.advantages[at], weights[at], factors, batch.row[at])
            metrics.sum("actor/pg_loss", loss.detach())
            count = len(at)
            if unchanged and about.old == "rollout":  # free here; otherwise it would need another forward pass
                metrics.add("training/rollout_probs_diff", _apart(logp.detach(), batch.rollout_logp[at]), count)
            if about.kl:
                with torch.no_grad(), self._precision(), self.policy.first() as reference:
                    first, _ = token_logprobs(reference, micro, temperature=temperature)
                loss = loss + about.kl * (weights[at] * algorithms.kl(logp, first, about.kl_estimator)).sum()
                metrics.add("actor/ref_kl", algorithms.kl(logp.detach(), first, "k3").mean(), count)
            if about.entropy:
                loss = loss - about.entropy * (weights[at] * entropy).sum()
            if batch.teacher_ids is not None and batch.teacher_top_logp is not None:
                taught = batch.teacher_logp[at].isfinite()
                ids, teacher = batch.teacher_ids[at][taught], batch.teacher_top_logp[at][taught]
                with self._precision():
                    apart = reverse_kl_of(module, hidden[taught], ids, teacher, temperature=temperature)
                loss = loss + self._config.distillation.w_opd * (weights[at][taught] * apart).sum()
                metrics.add("opd/reverse_kl", apart.detach().mean(), len(apart))
            loss.backward()
            metrics.add("actor/entropy", entropy.detach().mean() if count else torch.tensor(0.0), count)
            for name, value in logged_metrics(said).items():
                if name == "ratio_max":
                    metrics.most("actor/ratio_max", value)
                else:
                    metrics.add(f"actor/{name}", value, count)
        metrics.most("actor/grad_norm", torch.tensor(self._step()))
        metrics.set("actor/lr", self.optimizer.param_groups[0]["lr"])

    def _step(self) -> float:
        """Apply the gradient. Returns its norm before clipping."""
        for _, copy, weight in self.copies():
            if weight.grad is not None:
                copy.grad, weight.grad = weight.grad.float(), None
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, self._config.optimizer.grad_clip))
        if not math.isfinite(norm):
            self._forget_gradient()
            raise TrainingError(
                "the gradient is NaN or infinite; the weights were not changed: resume from the last checkpoint with a "
                "lower optimizer.lr, or with model.dtype=float32"
            )
        self.optimizer.step()
        with torch.no_grad():
            for _, copy, weight in self.copies():
                weight.copy_(copy)
        self._forget_gradient()  # frees its memory until the next update
        self.updates += 1
        return norm

    def copies(self) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Index in ``parameters``, float32 copy and weight, for each weight in lower precision."""
        for number, (copy, weight) in enumerate(zip(self.parameters, self._trained, strict=True)):
            if copy is not weight:
                yield number, copy, weight

    def _forget_gradient(self) -> None:
        for each in (*self.parameters, *self._trained):
            each.grad = None

    def _set_lr(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def _rows(self, paths: Sequence[MaskedSequence]) -> list[Packed]:
        return pack(paths, row_tokens=self._config.compute.row_tokens)

    def _micro(self, rows: Sequence[Packed]) -> Iterator[MicroBatch]:
        for micro in micro_batches(rows, tokens=self._config.compute.micro_tokens):
            yield self.policy.ready(micro)


def _width(policy: Policy) -> int:
    """The width of its hidden states."""
    return base_of(policy.module).config.get_text_config().hidden_size


def _apart(logp: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Mean absolute difference of token probabilities; 0 without tokens."""
    return (logp.exp() - other.exp()).abs().mean() if len(logp) else torch.tensor(0.0)


class _Metrics:
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

    def all(self) -> dict[str, Any]:
        return {**self._plain, **{name: self.mean(name) for name in self._sums}}
