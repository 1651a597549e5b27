"""Packs: task sets made by code. Some are built in; installed packages may register others."""

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
    """A task set made by code, registered in ``clawgym.registry.packs``.

    >>> from clawgym.registry import packs
    >>> @packs.register("hello")  # doctest: +SKIP
    ... class HelloPack:
    ...     \"\"\"One task.\"\"\"
    ...
    ...     version = "1"
    ...
    ...     def load(self, split="heldout", seeds=None):
    ...         return TaskSet("hello", (make_hello_task(),), self.version)

    A pack may also have ``where``, a few words on where its files come from. If its tasks are made from integer seeds,
    it may have ``generators`` and ``make(generator, seed)`` (:class:`~clawgym.tasks.packs.seeded.SeededPack`).
    """

    @property
    def version(self) -> str:
        """The version of the pack. It must change when a task changes."""
        ...

    def load(self, split: Split = "heldout", seeds: Sequence[int] | None = None) -> TaskSet:
        """Return the tasks of a split. ``seeds`` replaces the pack's default seeds.

        Raises :class:`TaskSetNotFound` for an unknown split, and :class:`TaskError` for seeds that are not in it.
        """
        ...


@lru_cache(maxsize=32)
def pack(name: str) -> Pack:
    """Return the pack called ``name``, or the one at ``package.module:thing``.

    Raises :class:`TaskSetNotFound` if there is none, or if the thing is not a pack.
    """
    found = packs.get(name)
    if isinstance(found, ModuleType):
        from clawgym.tasks.python import tasks_of

        found = tasks_of(found)
    made = found if isinstance(found, Pack) and not isinstance(found, type) else packs.make(name)
    if not isinstance(made, Pack):
        raise TaskSetNotFound(
            f"pack {name!r} is {type(made).__name__}, which is not a pack: a pack has version and load(split, seeds) "
            "(docs/how-to/task-sets.md)"
        )
    return made
