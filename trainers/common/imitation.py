"""Data for imitation: demonstrations and, during RL, episodes that the policy solved itself.

Invariant: a batch is determined by the run's seed, the batch's number and the tasks solved before it.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from clawgym.gateway.render import Renderer
from clawgym.pool import Pool
from clawgym.pool.sequences import sequences_of
from clawgym.records import TrainingSequence
from clawgym.tasks.packs.seeded import WORDS
from clawgym.trainers.batching import MaskedSequence
from clawgym.trainers.common.batch import TrainingBatch
from clawgym.trainers.common.supervised import WordShuffle
from clawgym.trainers.config import TrainConfig

__all__ = ["ImitationData"]


class ImitationData:
    """Training sequences to imitate, in batches of ``sft.batch``."""

    def __init__(self, rows: list[MaskedSequence], config: TrainConfig, renderer: Renderer) -> None:
        self._rows = rows
        self._seed, self._size = config.seed, config.sft.batch
        self._shuffle = WordShuffle(renderer, WORDS) if config.sft.shuffle_words else None
        self._solved: dict[str, MaskedSequence] = {}

    def add_solved(self, batch: TrainingBatch) -> dict[str, str]:
        """Add the episodes of a batch with the full reward; the last one of each task is kept.

        This is self-imitation (arXiv 1806.05635), restricted to episodes with the greatest possible return. Returns
        task -> episode id, for :meth:`restore_solved`."""
        kept: dict[str, str] = {}
        for member, score in zip(batch.episodes, batch.scores, strict=True):
            if score >= 1.0 and (row := _only_sequence(member.sequences)) is not None:
                self.keep(member.episode.task_id, row)
                kept[member.episode.task_id] = member.episode.id
        return kept

    def restore_solved(self, solved: Mapping[str, str], pool: Pool) -> None:
        """Add the episodes that :meth:`add_solved` returned before the run was interrupted."""
        for task, episode in solved.items():
            if (row := _only_sequence(sequences_of(pool.turns(episode)))) is not None:
                self.keep(task, row)

    def keep(self, task: str, row: MaskedSequence) -> None:
        """Keep ``row`` as the solved episode of ``task``, in place of an earlier one."""
        self._solved[task] = row

    @property
    def solved(self) -> int:
        """The number of tasks with a solved episode."""
        return len(self._solved)

    def batch(self, number: int) -> list[MaskedSequence]:
        """The ``number``-th batch. Without solved episodes: shuffled epochs of the demonstrations. Otherwise: drawn
        uniformly from demonstrations and solved episodes."""
        rng = random.Random(f"{self._seed}:sft:{number}")
        if self._solved:
            everything = [*self._rows, *(self._solved[task] for task in sorted(self._solved))]
            chosen = [rng.choice(everything) for _ in range(self._size)]
        else:
            chosen = self._in_order(number * self._size)
        return chosen if self._shuffle is None else [self._shuffle(row, rng) for row in chosen]

    def _in_order(self, first: int) -> list[MaskedSequence]:
        epoch, place = divmod(first, len(self._rows))
        rows: list[MaskedSequence] = []
        while len(rows) < place + self._size:
            order = list(self._rows)
            random.Random(f"{self._seed}:{epoch}").shuffle(order)
            rows += order
            epoch += 1
        return rows[place : place + self._size]


def _only_sequence(samples: Sequence[TrainingSequence]) -> MaskedSequence | None:
    """The training sequence of an episode that has exactly one, without images; otherwise None. An episode with several
    would be weighted more than once."""
    return MaskedSequence(samples[0].ids, samples[0].mask) if len(samples) == 1 and not samples[0].images else None
