"""Extension points of training: an advantage (of episodes, or of turns with a critic), a loss, a trainer.

Another one, the tracker, is in :mod:`clawgym.trainers.common.tracking`. docs/reference/registry.md says how to
register them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from clawgym.registry import losses, trainers

if TYPE_CHECKING:
    from torch import Tensor

    from clawgym.trainers.common.checkpoints import Progress
    from clawgym.trainers.common.tracking import View
    from clawgym.trainers.config import Algorithm, TrainConfig

__all__ = ["Advantage", "Loss", "Trainer", "ValueAdvantage", "logged_metrics", "loss_of", "train"]


class Advantage(Protocol):
    """Computes the advantages of episodes from their rewards.

    Options are keyword-only parameters, set by ``algorithm.advantage_options``. The decorator
    :func:`clawgym.trainers.traits.traits` changes how the trainer adds process rewards.

    >>> from clawgym.registry import advantages
    >>> @advantages.register("half")
    ... def half(rewards, groups, *, baseline: float = 0.5):
    ...     \"\"\"The reward above a constant baseline.\"\"\"
    ...     return rewards - baseline
    """

    def __call__(self, rewards: Tensor, groups: Tensor, /) -> Tensor:
        """The advantage of each episode, (E,).

        Args:
            rewards: (E,) float, the outcome of each episode in [-1, 1], less penalties.
            groups: (E,) int; episodes of the same task have the same number.
        """
        ...


class ValueAdvantage(Protocol):
    """Computes the advantages of turns from their rewards and the values of a critic.

    An advantage of this kind has the decorator ``traits(uses_values=True)``. The trainer then trains the critic that
    ``critic`` configures. Options are as for :class:`Advantage`.

    >>> from clawgym.registry import advantages
    >>> from clawgym.trainers.traits import traits
    >>> @advantages.register("monte-carlo")
    ... @traits(uses_values=True)
    ... def monte_carlo(rewards, values, episodes, *, scale: float = 1.0):
    ...     \"\"\"The sum of all rewards of the episode, less the value.\"\"\"
    ...     same = episodes[:, None] == episodes[None, :]
    ...     returns = (same * rewards).sum(1)
    ...     return scale * (returns - values), returns
    """

    def __call__(self, rewards: Tensor, values: Tensor, episodes: Tensor, /) -> tuple[Tensor, Tensor]:
        """The advantage of each turn, and what the critic is trained to predict for it; (N,) each.

        Args:
            rewards: (N,) float. The reward of a turn is its process reward times ``reward.coefficient`` and the
                calibrated weight; that of the last turn of an episode also has the outcome in [-1, 1], less penalties.
            values: (N,) float, the critic's value of the state before each turn.
            episodes: (N,) int, the episode of each turn. The turns of an episode are together, in order.
        """
        ...


class Loss(Protocol):
    """The loss of the policy.

    Options are keyword-only parameters, set by ``algorithm.loss_options``. An option named ``clip_low``, ``clip_high``
    or ``dual_clip`` is also set by the setting of that name in ``algorithm``.

    >>> def reinforce(logp, old_logp, advantages, weights, importance=None, sequences=None, *, scale: float = 1.0):
    ...     \"\"\"REINFORCE, without a clip.\"\"\"
    ...     if importance is not None:
    ...         weights = weights * importance
    ...     return -scale * (weights * advantages * logp).sum(), {}
    """

    def __call__(
        self,
        logp: Tensor,
        old_logp: Tensor,
        advantages: Tensor,
        weights: Tensor,
        importance: Tensor | None = None,
        sequences: Tensor | None = None,
        /,
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """The loss of some trained tokens, and metrics.

        Tensors have shape (S,), or (B, T) with weight 0 at padding. A loss is called for each micro-batch. It always
        has all trained tokens of a training sequence: no sequence is split between micro-batches.

        Args:
            logp: log-probs of the tokens under the policy; the only input with a gradient.
            old_logp: log-probs under the policy before the step.
            advantages: the advantage of each token.
            weights: the weight of each token; 0 for a token that is not trained on. Losses of micro-batches are
                added, so take the sum over tokens with these weights, not a mean.
            importance: importance weights between engine and trainer
                (:func:`~clawgym.trainers.algorithms.importance_weights`). Multiply the loss of each token by them; 0
                rejects a token. None if they are 1.
            sequences: (S,) int64, the label of the training sequence of each token. None for (B, T) tensors: each row
                is one sequence.

        Returns:
            A scalar loss, and scalar metrics by name, without gradient. A metric is logged as ``actor/NAME``, averaged
            over tokens (with the trainer ``verl``: over micro-batches). :func:`logged_metrics` says which are kept.
        """
        ...


class Trainer(Protocol):
    """Trains a policy. Options are keyword-only parameters, set by ``trainer_options``.

    >>> from clawgym.registry import trainers
    >>> @trainers.register("idle")
    ... async def idle(config, out, method="rl", view=None, stop=None, *, steps: int = 1):
    ...     \"\"\"Trains nothing.\"\"\"
    ...     out.mkdir(parents=True, exist_ok=True)
    ...     return Progress(step=steps)
    """

    async def __call__(
        self,
        config: TrainConfig,
        out: Path,
        method: str = "rl",
        view: View | None = None,
        stop: asyncio.Event | None = None,
    ) -> Progress:
        """Train into the run folder ``out``, or resume the run in it.

        Args:
            config: the whole configuration, validated.
            out: the run folder. The trainer creates it (:class:`~clawgym.trainers.common.run.Run` does this).
            method: the METHOD of ``clawgym train METHOD``: ``rl``, ``sft``, or one that only this trainer has.
            view: shows progress; None for lines on the terminal.
            stop: once it is set, write a checkpoint and return.

        Raises:
            TrainingError: for an unknown method, and if training fails or cannot start.
        """
        ...


async def train(
    config: TrainConfig, out: Path, method: str = "rl", *, view: View | None = None, stop: asyncio.Event | None = None
) -> Progress:
    """Train into the run folder ``out`` with the trainer that ``config`` names, or resume the run that is there.

    Arguments and errors are those of :class:`Trainer`.

    >>> await train(load_config("tiny-cpu"), Path("runs/tiny"))  # doctest: +SKIP
    """
    return await trainers.make(config.trainer, config, out, method, view, stop, **config.trainer_options)


_MAX_METRICS, _MAX_NAME = 32, 64


def logged_metrics(said: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The metrics of a loss that are logged: the first 32 whose names have at most 64 characters.

    Without ``tokens``, the number of tokens that the others are means over."""
    names = [name for name in said if name != "tokens" and len(name) <= _MAX_NAME]
    return {name: said[name] for name in names[:_MAX_METRICS]}


def loss_of(about: Algorithm) -> partial[tuple[Tensor, Mapping[str, Tensor]]]:
    """The loss named by ``about.loss``, with its options. Raises :class:`~clawgym.errors.TrainingError` for an unknown
    name and for invalid options."""
    function = losses.get(about.loss)
    takes = {option.name for option in losses.options(about.loss)}
    given: dict[str, Any] = {name: getattr(about, name) for name in ("clip_low", "clip_high", "dual_clip")}
    given = {name: value for name, value in given.items() if name in takes} | about.loss_options
    return partial(function, **losses.validated(about.loss, function, given))
