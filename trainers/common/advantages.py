"""The advantages that a training step used, kept for ``clawgym view`` beside the pool of its episodes.

Invariant: this only records. A step that is repeated after a kill replaces its file.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from clawgym.records.run_folder import write_atomic
from clawgym.trainers.common.answers import advantages_file
from clawgym.trainers.common.batch import TrainingBatch

__all__ = ["TurnAdvantages", "trained_by_turn", "forget_advantages", "advantages_by_turn", "write_advantages"]

TurnAdvantages = dict[str, dict[str, list[float]]]
"""Episode id -> turn -> mean, least and most of the advantages of its trained tokens."""


def advantages_by_turn(
    ids: Sequence[str], owner: torch.Tensor, turns: torch.Tensor, advantages: torch.Tensor
) -> TurnAdvantages:
    """Those of S trained tokens by episode and turn.

    Args:
        ids: of each episode.
        owner: (S,) the index in ``ids`` of each token.
        turns: (S,) the turn of each token.
        advantages: (S,) as the step used them.
    """
    values, of = advantages.detach().double().cpu().numpy(), owner.cpu().numpy()
    turn = turns.cpu().numpy()
    order = np.lexsort((turn, of))
    starts = np.flatnonzero(np.diff(of[order], prepend=-1) | np.diff(turn[order], prepend=-1))
    found: TurnAdvantages = {}
    if len(order):
        counts = np.diff(np.append(starts, len(order)))
        means = np.add.reduceat(values[order], starts) / counts
        least, most = np.minimum.reduceat(values[order], starts), np.maximum.reduceat(values[order], starts)
        for n, first in enumerate(order[starts]):
            of_turn = [float(f"{value:.6g}") for value in (means[n], least[n], most[n])]
            found.setdefault(ids[of[first]], {})[str(turn[first])] = of_turn
    return found


def trained_by_turn(batch: TrainingBatch, advantages: torch.Tensor) -> TurnAdvantages:
    """Those of the episodes of a batch that were trained on. ``advantages``: (S,) of each of its trained tokens."""
    parts = [np.asarray(s.turn_of, np.int64) for e in batch.episodes for s in e.sequences]
    turns = torch.from_numpy(np.concatenate([np.empty(0, np.int64), *parts]))
    owner = batch.episode.cpu()
    used = torch.isin(owner, torch.tensor(batch.trained, dtype=owner.dtype))
    ids = [member.episode.id for member in batch.episodes]
    return advantages_by_turn(ids, owner[used], turns[used], advantages.cpu()[used])


def write_advantages(folder: Path, step: int, advantages: TurnAdvantages) -> None:
    """Write the advantages of step ``step`` of a pool's consumer to ``folder``, which has the pool: about 40 bytes a
    turn. Raises :class:`~clawgym.errors.RunFolderError` if it cannot be written."""
    path = advantages_file(folder, step)
    path.parent.mkdir(exist_ok=True)
    _write(path, advantages)


def forget_advantages(folder: Path, episode: str) -> None:
    """Take an episode out of what :func:`write_advantages` wrote to ``folder``. Raises its error."""
    for path in advantages_file(folder, 0).parent.glob("*.json"):
        stored = json.loads(path.read_bytes())
        if stored.pop(episode, None) is not None:
            _write(path, stored)


def _write(path: Path, advantages: TurnAdvantages) -> None:
    write_atomic(path, json.dumps(advantages, separators=(",", ":")).encode())
