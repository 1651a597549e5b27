"""Task sets that are made by code: our own packs, and those of installed packages."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from types import ModuleType
from typing import Literal, Protocol, runtime_checkable

from clawgym.errors import TaskSetNotFound
from clawgym.records import TaskSet
from clawgym.registry import packs

__all__ = ["SPLITS", "Pack", "Split", "pack"]

Split = Literal["train", "heldout"]
SPLITS: tuple[Split, ...] = ("train", "heldout")


@runtime_checkable
class Pack(Protocol):
    """A task set made by code, registered as ``clawgym.registry.packs`` says.

    A pack may also have ``where``, a few words on where its files come from, and ``make(generator, seed)`` with
    ``generators`` if its tasks are made from integer seeds (:class:`~clawgym.tasks.packs.seeded.SeededPack`).
    """

    @property
    def version(self) -> str:
        """Changes with the tasks."""
        ...

    def load(self, split: Split = "heldout", seeds: Sequence[int] | None = None) -> TaskSet:
        """The tasks of a split; without ``seeds``, the pack's own choice of them."""
        ...


@lru_cache(maxsize=32)
def pack(name: str) -> Pack:
    """The pack called ``name``, or at ``package.module:thing``. Raises :class:`TaskSetNotFound` if there is none."""
    found = packs.get(name)
    if isinstance(found, ModuleType):
        from clawgym.tasks.python import tasks_of

        found = tasks_of(found)
    made = found if isinstance(found, Pack) and not isinstance(found, type) else packs.make(name)
    if not isinstance(made, Pack):
        raise TaskSetNotFound(
            f"pack {name!r} is no pack, but {type(made).__name__}: give it version and load(split, seeds) "
            "(docs/new-task.md)"
        )
    return made
