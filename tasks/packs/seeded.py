"""Packs whose tasks are made from integer seeds: named generators, two splits, and a list of plain words.

Invariants: a draft depends only on ``random.Random(f"{generator}:{seed}")``. Even seeds are the training split and odd
seeds the held-out split. A text that must differ between the splits (the instruction at least) is never in both.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, TypeVar

from clawgym.errors import TaskError, TaskSetNotFound
from clawgym.records import Task, TaskSet
from clawgym.registry import did_you_mean

__all__ = ["FIRST", "WORDS", "Generator", "SeededPack", "Split", "csv_text", "draft_of", "generator", "split_of"]


class Instructed(Protocol):
    """A draft of a task. Each pack has its own class."""

    @property
    def instruction(self) -> str:
        """The instruction of the task."""
        ...


D = TypeVar("D", bound=Instructed)
Split = Literal["train", "heldout"]

_WORDS = """
acorn amber anvil apple arrow badge barn basil beach birch blaze bloom brick brook brush cabin cable camel candle
canoe cedar chalk cherry chess cider clay cliff clock cloud clover coast cobalt comet coral cotton crane creek crown
daisy delta diamond dolphin drum eagle elbow ember fable falcon feather fern field flint flute forest fossil frost
garden ginger glacier globe grape gravel guitar hammer harbor hazel heron hill honey ivory jacket jasmine jungle
kettle kiwi ladder lagoon lantern lemon lilac lily linen lotus magnet mango maple marble meadow melon mint mirror moss
nectar needle nickel nutmeg oasis ocean olive onion orbit otter oyster paddle panda parrot pebble pepper piano pilot
planet plum pocket poplar prairie puzzle quartz quilt rabbit raven reef ribbon river robin saddle saffron salmon satin
shadow silver spruce squid summit sunset
"""
WORDS = tuple(_WORDS.split())
"""Plain words. None is a substring of another, so that a substring search finds whole words only."""

FIRST = (
    *("Ada", "Bea", "Carl", "Dora", "Emil", "Fay", "Gus", "Hana", "Ivo", "Jana", "Kai", "Lena", "Mio", "Nora", "Olga"),
    *("Pia", "Quinn", "Rosa", "Sven", "Tara", "Ugo", "Vera", "Wim", "Xenia", "Yara", "Zeno"),
)
"""First names."""

_SEEDS: dict[Split, Sequence[int]] = {"train": range(0, 16, 2), "heldout": (1, 3)}


@dataclass(frozen=True)
class Generator(Generic[D]):
    """A named function that drafts one task for each seed."""

    name: str
    family: str
    """The kind of work, which several generators share; the category of the tasks."""
    level: int
    """Difficulty, from 1 (easiest)."""
    draft: Callable[[random.Random], D]

    def task_id(self, seed: int) -> str:
        """Return the id of the task for ``seed``, such as ``write-word-h0001``; ``t`` or ``h`` is the split."""
        return f"{self.name}-{split_of(seed)[0]}{seed:04d}"

    def metadata(self, seed: int) -> dict[str, Any]:
        """Return the metadata of the task for ``seed``."""
        return {
            "category": self.family,
            "family": self.family,
            "generator": self.name,
            "level": self.level,
            "seed": seed,
        }


def generator(
    name: str, *, family: str, level: int, into: dict[str, Generator[D]]
) -> Callable[[Callable[[random.Random], D]], Callable[[random.Random], D]]:
    """Register the decorated function in ``into`` under ``name``."""

    def register(draft: Callable[[random.Random], D]) -> Callable[[random.Random], D]:
        into[name] = Generator(name, family, level, draft)
        return draft

    return register


def split_of(seed: int) -> Split:
    """Return the split of a seed: ``train`` for an even seed, ``heldout`` for an odd one."""
    return "heldout" if seed % 2 else "train"


def draft_of(made_by: Generator[D], seed: int, *apart: Callable[[D], str]) -> D:
    """Draw drafts until the instruction, and each text of ``apart``, has a hash of the same parity as the seed.

    So none of these texts occurs in both splits. Raises :class:`TaskError` for a negative seed, and if 1,000 draws
    fail.
    """
    if seed < 0:
        raise TaskError(
            f"{made_by.name}: seed {seed} is negative: give 0, 2, 4, ... (training) or 1, 3, 5, ... (held-out split)"
        )
    rng = random.Random(f"{made_by.name}:{seed}")
    for _ in range(1000):
        draft = made_by.draft(rng)
        texts = [draft.instruction, *(text(draft) for text in apart)]
        if all(hashlib.sha256(text.encode()).digest()[0] % 2 == seed % 2 for text in texts):
            return draft
    raise TaskError(f"{made_by.name}: its instructions do not vary: put something drawn from the seed into the text")


@dataclass(frozen=True)
class SeededPack(Generic[D]):
    """A pack whose tasks are made from integer seeds (:class:`~clawgym.tasks.packs.Pack`)."""

    name: str
    version: str
    generators: Mapping[str, Generator[D]]
    """Generators by name, in the order of :meth:`load`."""
    build: Callable[[Generator[D], int], Task]
    """Makes the task of a generator for a seed."""

    def make(self, generator: str, seed: int) -> Task:
        """Return the task of a generator for a seed, the same on every machine.

        Raises :class:`TaskSetNotFound` for an unknown generator, and :class:`TaskError` for a negative seed.
        """
        if generator not in self.generators:
            hint = did_you_mean(generator, self.generators) or f" Choose one of {', '.join(self.generators)}"
            raise TaskSetNotFound(f"{self.name} has no generator {generator!r}.{hint}")
        return self.build(self.generators[generator], seed)

    def load(self, split: Split = "heldout", seeds: Sequence[int] | None = None) -> TaskSet:
        """Return one task per generator and seed. The default is two seeds for ``heldout`` and eight for ``train``.

        Raises :class:`TaskSetNotFound` for an unknown split, and :class:`TaskError` for a seed that is not in it: even
        seeds are in ``train``, odd ones in ``heldout``.
        """
        if split not in _SEEDS:
            raise TaskSetNotFound(f"{self.name} has no split {split!r}: choose 'train' or 'heldout'")
        chosen = _SEEDS[split] if seeds is None else tuple(seeds)
        for seed in chosen:
            if split_of(seed) != split:
                parity = "even" if split == "train" else "odd"
                raise TaskError(
                    f"{self.name}: seed {seed} is not in the split {split!r}: choose seeds that are {parity}"
                )
        tasks = tuple(self.make(name, seed) for name in self.generators for seed in chosen)
        return TaskSet(name=f"{self.name}:{split}", tasks=tasks, version=self.version)


def csv_text(rows: list[list[Any]], delimiter: str = ",", end: str = "\n") -> str:
    """Return ``rows`` as CSV text. Cells are quoted only where needed, and each row ends with ``end``."""

    def cell(value: Any) -> str:
        text = "" if value is None else str(value)
        return '"' + text.replace('"', '""') + '"' if set(text) & {delimiter, '"', "\n", "\r"} else text

    return "".join(delimiter.join(cell(value) for value in row) + end for row in rows)
