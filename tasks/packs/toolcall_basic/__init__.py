"""The pack ``toolcall-basic``: tasks for agents with tools, made from integer seeds.

Even seeds are for training, odd seeds are held out; neither an instruction nor a reference chain of calls is on both
sides, whatever the seed. ``docs/toolcall.md`` describes the families.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Literal

from clawgym.errors import TaskError, TaskSetNotFound
from clawgym.records import Task, TaskSet

from ._build import Generator, build, split_of
from .bank import BANK
from .calendar import CALENDAR
from .desk import DESK
from .inventory import INVENTORY
from .lookup import LOOKUP
from .mail import MAIL
from .numbers import NUMBERS
from .questions import QUESTIONS

__all__ = ["GENERATORS", "NAME", "VERSION", "Generator", "load", "make"]

NAME = "toolcall-basic"
VERSION = "1"

GENERATORS: dict[str, Generator] = {
    **NUMBERS,
    **QUESTIONS,
    **CALENDAR,
    **MAIL,
    **INVENTORY,
    **BANK,
    **DESK,
    **LOOKUP,
}
"""Name -> generator, family by family."""

DEFAULT_SEEDS = {"train": tuple(range(0, 16, 2)), "heldout": (1, 3)}


def make(generator: str, seed: int) -> Task:
    """The instance of a generator for a seed: the same one everywhere.

    >>> make("math-digits", 1).instruction.partition("?")[0]
    'What is the sum of the decimal digits of 79^282'
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
