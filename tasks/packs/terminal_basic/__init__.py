"""The pack ``terminal-basic``: tasks for a shell, made from integer seeds.

Even seeds are for training, odd seeds are held out; no instruction text is on both sides, whatever the seed.
``docs/new-task.md`` shows how to add a generator.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Literal

from clawgym.errors import TaskError, TaskSetNotFound
from clawgym.records import Task, TaskSet

from ._build import Generator, build, split_of
from .data import DATA
from .files import FILES
from .programs import PROGRAMS
from .shell import SHELL

__all__ = ["GENERATORS", "NAME", "VERSION", "Generator", "load", "make"]

NAME = "terminal-basic"
VERSION = "1"

GENERATORS: dict[str, Generator] = {**FILES, **DATA, **SHELL, **PROGRAMS}
"""Name -> generator, family by family."""

DEFAULT_SEEDS = {"train": tuple(range(0, 16, 2)), "heldout": (1, 3)}


def make(generator: str, seed: int) -> Task:
    """The instance of a generator for a seed: the same one everywhere.

    >>> make("write-word", 2).instruction
    'Write the word nutmeg to the file shadow.txt.'
    """
    if generator not in GENERATORS:
        near = difflib.get_close_matches(generator, GENERATORS, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(GENERATORS)}"
        raise TaskSetNotFound(f"{NAME} has no generator {generator!r}: {hint}")
    return build(GENERATORS[generator], seed)


def load(split: Literal["train", "heldout"] = "heldout", seeds: Sequence[int] | None = None) -> TaskSet:
    """One task per generator and seed: by default two held-out ones of each generator.

    ``seeds`` must lie on the side of ``split``: even for ``train``, odd for ``heldout``.
    """
    if split not in DEFAULT_SEEDS:
        raise TaskSetNotFound(f"{NAME} has no split {split!r}: choose 'train' or 'heldout'")
    chosen = DEFAULT_SEEDS[split] if seeds is None else tuple(seeds)
    for seed in chosen:
        if split_of(seed) != split:
            parity = "even" if split == "train" else "odd"
            raise TaskError(f"{NAME}: seed {seed} is not in the split {split!r}: its seeds are {parity}")
    tasks = tuple(make(name, seed) for name in GENERATORS for seed in chosen)
    return TaskSet(name=f"{NAME}:{split}", tasks=tasks, version=VERSION)
