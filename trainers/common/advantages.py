"""The advantages that a training step used, kept in the run folder for ``clawgym view``.

Invariant: this only records. A step that is repeated after a kill replaces its file.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch

from clawgym.records.run_folder import write_atomic
from clawgym.trainers.common.answers import advantages_file
from clawgym.trainers.common.batch import TrainingBatch

__all__ = ["write_advantages"]


def write_advantages(run: Path, step: int, batch: TrainingBatch, advantages: torch.Tensor) -> None:
    """Write the advantages of each turn that step ``step`` of the pool's consumer trained on.

    ``advantages``: (S,) those of each trained token. The file has episode id -> turn -> [mean, least, most] over the
    tokens of the turn, about 40 bytes a turn. Raises :class:`~clawgym.errors.RunFolderError` if it cannot be written.
    """
    values = advantages.detach().double().cpu().numpy()
    owner = batch.episode.cpu().numpy()
    turns = np.concatenate(
        [np.empty(0, np.int64), *(np.asarray(s.turn_of, np.int64) for e in batch.episodes for s in e.sequences)]
    )
    order = np.lexsort((turns, owner))
    starts = np.flatnonzero(np.diff(owner[order], prepend=-1) | np.diff(turns[order], prepend=-1))
    found: dict[str, dict[str, list[float]]] = {}
    if len(order):
        counts = np.diff(np.append(starts, len(order)))
        means = np.add.reduceat(values[order], starts) / counts
        least, most = np.minimum.reduceat(values[order], starts), np.maximum.reduceat(values[order], starts)
        for n, first in enumerate(order[starts]):
            if owner[first] in batch.trained:
                of_turn = [float(f"{value:.6g}") for value in (means[n], least[n], most[n])]
                found.setdefault(batch.episodes[owner[first]].episode.id, {})[str(turns[first])] = of_turn
    path = advantages_file(run, step)
    path.parent.mkdir(exist_ok=True)
    write_atomic(path, json.dumps(found, separators=(",", ":")).encode())
