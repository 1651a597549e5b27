"""What others may write for training: a loss, a trainer.

The third kind, a tracker, is in :mod:`clawgym.trainers.common.tracking`; an advantage is a function of rewards and
groups, like those of :mod:`clawgym.trainers.algorithms`. docs/registry.md says how each gets a name.
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

__all__ = ["Loss", "Trainer", "loss_of", "train"]


class Loss(Protocol):
    """The loss of the policy. Options are keyword-only parameters, set by ``algorithm.loss_options``; one that is
    called ``clip_low``, ``clip_high`` or ``dual_clip`` is also set by the setting of ``algorithm`` of that name.

    >>> def reinforce(logp, old_logp, advantages, weights, importance=None, *, scale: float = 1.0):
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
        /,
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """The loss of some trained tokens, and figures about it.

        Args:
            logp: log-probs of the tokens by the policy, (S,); the gradient flows through them alone.
            old_logp: by the policy before the step, (S,).
            advantages: (S,).
            weights: what each token counts for, (S,); 0 for a token that is not trained. Losses of micro-batches are
                added, so sum over tokens with these weights and take no mean.
            importance: truncated importance weights between engine and trainer, (S,), to multiply the loss of each
                token by. None where they are 1, or part of ``weights`` (in the trainer ``verl``).

        Returns:
            A scalar, and scalars by name, without gradient: ``actor/NAME`` is their mean over tokens. Tensors may also
            be of shape (B, T), with weight 0 at padding.
        """
        ...


class Trainer(Protocol):
    """Trains a policy as a configuration says. Options are keyword-only parameters, set by ``trainer_options``."""

    async def __call__(
        self,
        config: TrainConfig,
        out: Path,
        method: str = "rl",
        view: View | None = None,
        stop: asyncio.Event | None = None,
    ) -> Progress:
        """Train into the run folder ``out``, or resume the run that is there.

        Args:
            config: the whole configuration, checked.
            out: the run folder; make it (:class:`~clawgym.trainers.common.run.Run` does).
            method: what ``clawgym train METHOD`` names: ``rl``, ``sft``, or one that only this trainer knows.
            view: whom to tell what happens; None for the terminal.
            stop: end early, with a checkpoint, once it is set.

        Raises:
            TrainingError: for a method that it does not have, and where training went wrong or cannot begin.
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


def loss_of(about: Algorithm) -> partial[tuple[Tensor, Mapping[str, Tensor]]]:
    """The loss that ``about`` names, with its options. Raises :class:`~clawgym.errors.TrainingError` for a name that is
    not known and for options that do not fit."""
    thing = losses.get(about.loss)
    takes = {option.name for option in losses.options(about.loss)}
    given: dict[str, Any] = {name: getattr(about, name) for name in ("clip_low", "clip_high", "dual_clip")}
    given = {name: value for name, value in given.items() if name in takes} | about.loss_options
    return partial(thing, **losses.validated(about.loss, thing, given))
