"""What a policy imitates: demonstrations, and while it is reinforced also what it has solved itself.

Invariant: which rows a batch has depends on the run's seed, the batch's number and what was solved before it.
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

__all__ = ["Imitated"]


class Imitated:
    """Rows to imitate, in batches of ``sft.batch``."""

    def __init__(self, rows: list[MaskedSequence], config: TrainConfig, renderer: Renderer) -> None:
        self._rows = rows
        self._seed, self._size = config.seed, config.sft.batch
        self._shuffle = WordShuffle(renderer, WORDS) if config.sft.shuffle_words else None
        self._solved: dict[str, MaskedSequence] = {}

    def remember(self, batch: TrainingBatch) -> dict[str, str]:
        """Imitate from now on what earned everything in a batch too, the last episode of each task (self-imitation,
        arXiv 1806.05635, of the episodes alone whose return is the greatest that there is). Returns their ids by task,
        for :meth:`recall`."""
        kept: dict[str, str] = {}
        for member, score in zip(batch.episodes, batch.scores, strict=True):
            if score >= 1.0 and (row := _only_row(member.sequences)) is not None:
                self.keep(member.episode.task_id, row)
                kept[member.episode.task_id] = member.episode.id
        return kept

    def recall(self, solved: Mapping[str, str], pool: Pool) -> None:
        """What :meth:`remember` has returned before a run was interrupted."""
        for task, episode in solved.items():
            if (row := _only_row(sequences_of(pool.turns(episode)))) is not None:
                self.keep(task, row)

    def keep(self, task: str, row: MaskedSequence) -> None:
        """Imitate ``row``, in place of what was kept of ``task`` before."""
        self._solved[task] = row

    @property
    def solved(self) -> int:
        """Tasks of which an episode is imitated."""
        return len(self._solved)

    def batch(self, number: int) -> list[MaskedSequence]:
        """The ``number``-th batch: epoch after epoch of the demonstrations, each in an order of its own; once something
        was solved, drawn evenly from all there is."""
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


def _only_row(samples: Sequence[TrainingSequence]) -> MaskedSequence | None:
    """What can be imitated: one row, without pictures. One that is several would count more than once."""
    return MaskedSequence(samples[0].ids, samples[0].mask) if len(samples) == 1 and not samples[0].images else None
