"""The advantages that a training step used, kept for ``clawgym view`` beside the pool of its episodes.

Invariant: this only records. A step that is repeated after a kill replaces its file.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from clawgym.records.run_folder import write_atomic
from clawgym.trainers.common.answers import advantages_file

if TYPE_CHECKING:
    import torch

    from clawgym.trainers.common.batch import TrainingBatch

__all__ = ["TurnAdvantages", "advantages_by_turn", "forget_advantages", "trained_by_turn", "write_advantages"]

TurnAdvantages = dict[str, dict[str, list[float]]]
"""Episode id -> turn -> mean, least and most of the advantages of its trained tokens."""


def advantages_by_turn(
    ids: Sequence[str], owner: NDArray[np.int64], turns: NDArray[np.int64], advantages: NDArray[np.float64]
) -> TurnAdvantages:
    """Those of S trained tokens by episode and turn.

    Args:
        ids: of each episode.
        owner: (S,) the index in ``ids`` of each token.
        turns: (S,) the turn of each token.
        advantages: (S,) as the step used them.
    """
    order = np.lexsort((turns, owner))
    starts = np.flatnonzero(np.diff(owner[order], prepend=-1) | np.diff(turns[order], prepend=-1))
    found: TurnAdvantages = {}
    if len(order):
        counts = np.diff(np.append(starts, len(order)))
        values = advantages[order]
        means = np.add.reduceat(values, starts) / counts
        least, most = np.minimum.reduceat(values, starts), np.maximum.reduceat(values, starts)
        for n, first in enumerate(order[starts]):
            of_turn = [float(f"{value:.6g}") for value in (means[n], least[n], most[n])]
            found.setdefault(ids[int(owner[first])], {})[str(turns[first])] = of_turn
    return found


def trained_by_turn(batch: TrainingBatch, advantages: torch.Tensor) -> TurnAdvantages:
    """Those of the episodes of a batch that were trained on. ``advantages``: (S,) of each of its trained tokens."""
    parts = [np.asarray(s.turn_of, np.int64) for e in batch.episodes for s in e.sequences]
    turns, owner = np.concatenate([np.empty(0, np.int64), *parts]), batch.episode.cpu().numpy()
    used = np.isin(owner, batch.trained)
    ids = [member.episode.id for member in batch.episodes]
    return advantages_by_turn(ids, owner[used], turns[used], advantages.detach().double().cpu().numpy()[used])


def write_advantages(folder: Path, step: int, advantages: TurnAdvantages) -> None:
    """Write the advantages of step ``step`` of a pool's consumer to ``folder``, which has the pool: about 40 bytes a
    turn. Raises :class:`~clawgym.errors.RunFolderError` if it cannot be written."""
    path = advantages_file(folder, step)
    path.parent.mkdir(exist_ok=True)
    _write(path, advantages)


def forget_advantages(folder: Path, episode: str) -> None:
    """Take an episode out of what :func:`write_advantages` wrote to ``folder``. Raises
    :class:`~clawgym.errors.RunFolderError` if a file cannot be written."""
    for path in advantages_file(folder, 0).parent.glob("*.json"):
        stored = json.loads(path.read_bytes())
        if stored.pop(episode, None) is not None:
            _write(path, stored)


def _write(path: Path, advantages: TurnAdvantages) -> None:
    write_atomic(path, json.dumps(advantages, separators=(",", ":")).encode())
