"""The learner of one process: log-probs and updates by a model in this process.

Invariants: the result does not depend on the micro-batches. Weights change only if the gradient is finite.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from clawgym.registry import advantages as registry
from clawgym.trainers import algorithms
from clawgym.trainers.batching import MaskedSequence, MicroBatch, Packed, micro_batches, pack
from clawgym.trainers.common.batch import TrainingBatch
from clawgym.trainers.common.checkpoints import optimizer_tensors, restore_optimizer
from clawgym.trainers.common.policy import Policy, base_of, hidden_states, logprobs_of, reverse_kl_of, token_logprobs
from clawgym.trainers.common.step import BatchLearner, Imitated, MiniBatch, StepMetrics, mean_difference, not_finite
from clawgym.trainers.config import TrainConfig
from clawgym.trainers.local.critic import ValueHead
from clawgym.trainers.protocols import loss_of
from clawgym.trainers.traits import traits_of

__all__ = ["Learner"]


class Learner(BatchLearner):
    """Trains a policy: owns its optimizer."""

    def __init__(self, policy: Policy, config: TrainConfig, *, lr: float | None = None, warmup: int = 0) -> None:
        super().__init__(config, lr=lr, warmup=warmup)
        self.policy = policy
        self._loss = loss_of(config.algorithm)
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
        self.critic: ValueHead | None = None
        """For an advantage that uses values."""
        if traits_of(config.algorithm.advantage).uses_values:
            self.critic = ValueHead(_width(policy), config.critic, policy.device)

    def imitate(self, paths: Sequence[MaskedSequence], *, step: int, steps: int) -> dict[str, float]:
        """One step of supervised training: mean cross-entropy over the trained tokens."""
        about = self._config.sft
        decay = 1 - 0.9 * step / max(1, steps) if about.decay else 1.0
        self._set_lr(about.lr * min(1.0, (step + 1) / max(1, about.warmup)) * decay)
        metrics, started = StepMetrics(), time.perf_counter()
        self._forget_gradient()
        self._imitate(paths, 1.0, metrics)
        metrics.set("sft/grad_norm", self._step())
        self.updates += 1
        metrics.set("sft/lr", self.optimizer.param_groups[0]["lr"])
        metrics.set("timing/update", time.perf_counter() - started)
        return metrics.all()

    def _imitate(self, paths: Sequence[MaskedSequence], weight: float, metrics: StepMetrics) -> None:
        """Add the gradient of ``weight`` times the mean cross-entropy over the trained tokens of ``paths``."""
        count = sum(sum(path.mask) for path in paths)
        for micro in self._micro(self._rows(paths)):
            with self._precision():
                logp, _ = token_logprobs(self.policy.module, micro)
            loss = -logp.sum() / count
            (weight * loss).backward()
            metrics.add("sft/loss", loss.detach() * count / max(1, len(logp)), len(logp))

    def _prepared(self, batch: TrainingBatch, metrics: StepMetrics) -> tuple[TrainingBatch, torch.Tensor]:
        old, states = self._old(batch)
        return batch if states is None else self._valued(batch, states, metrics), old

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

    def _valued(self, batch: TrainingBatch, states: torch.Tensor, metrics: StepMetrics) -> TrainingBatch:
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
        used = self._rows_with_gradient(batch, part)
        if len(used) == len(batch.sequences):
            yield from ((micro, micro.places) for micro in self._micro(batch.rows))
            return
        places = batch.places_of(used)
        for micro in self._micro(self._rows([batch.sequences[n] for n in used])):
            yield micro, places[micro.places]

    def _update(self, mini: MiniBatch, metrics: StepMetrics, *, lr: float, imitation: Imitated | None = None) -> float:
        about, batch, old, weights = self._config.algorithm, mini.batch, mini.old, mini.weights
        self._set_lr(lr)
        self._forget_gradient()
        if imitation is not None:
            self._imitate(imitation(self.updates), about.imitation, metrics)
        for micro, at in self._computed(batch, mini.part):
            module, temperature = self.policy.module, batch.temperature
            with self._precision():
                hidden = hidden_states(module, micro)
                logp, entropy = logprobs_of(
                    module, hidden, micro.targets, temperature=temperature, learn_entropy=about.entropy > 0
                )
            factors = None if mini.importance is None else mini.importance[at]
            loss, said = self._loss(logp, old[at], batch.advantages[at], weights[at], factors, batch.row[at])
            metrics.sum("actor/pg_loss", loss.detach())
            count = len(at)
            if mini.unchanged and about.old == "rollout":  # free here; otherwise it would need another forward pass
                metrics.add(
                    "training/rollout_probs_diff", mean_difference(logp.detach(), batch.rollout_logp[at]), count
                )
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
            metrics.add_logged(said, count)
        return self._step()

    def _sample(self, batch: TrainingBatch, rng: random.Random) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Those of one micro-batch of randomly drawn rows."""
        micro = next(self._micro(rng.sample(list(batch.rows), len(batch.rows))), None)
        if micro is None:
            none = batch.rollout_logp[:0]
            return batch.row[:0], none, none
        with torch.no_grad(), self._precision():
            logp, entropy = token_logprobs(self.policy.module, micro, temperature=batch.temperature)
        return micro.places, logp, entropy

    def _step(self) -> float:
        """Apply the gradient. Returns its norm before clipping."""
        for _, copy, weight in self.copies():
            if weight.grad is not None:
                copy.grad, weight.grad = weight.grad.float(), None
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, self._config.optimizer.grad_clip))
        if not math.isfinite(norm):
            self._forget_gradient()
            raise not_finite()
        self.optimizer.step()
        with torch.no_grad():
            for _, copy, weight in self.copies():
                weight.copy_(copy)
        self._forget_gradient()  # frees its memory until the next update
        return norm

    def copies(self) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Index in ``parameters``, float32 copy and weight, for each weight in lower precision."""
        for number, (copy, weight) in enumerate(zip(self.parameters, self._trained, strict=True)):
            if copy is not weight:
                yield number, copy, weight

    def optimizer_state(self) -> dict[str, torch.Tensor]:
        """For a checkpoint."""
        return optimizer_tensors(self)

    def restore_optimizer(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore :meth:`optimizer_state`. Raises :class:`ValueError` if it does not fit."""
        restore_optimizer(self, state)

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
