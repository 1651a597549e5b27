"""Our own tasks. A pack is a module with ``NAME``, ``VERSION`` and ``load(split, seeds) -> TaskSet``."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Literal, Protocol, cast

from clawgym.records import TaskSet

__all__ = ["PACKS", "SPLITS", "Pack", "Split", "pack"]

Split = Literal["train", "heldout"]
SPLITS: tuple[Split, ...] = ("train", "heldout")

PACKS: dict[str, str] = {
    "gui-basic": "clawgym.tasks.packs.gui_basic",
    "swe-basic": "clawgym.tasks.packs.swe_basic",
    "terminal-basic": "clawgym.tasks.packs.terminal_basic",
    "toolcall-basic": "clawgym.tasks.packs.toolcall_basic",
}
"""Pack name -> module, imported only when the pack is used."""


class Pack(Protocol):
    """What a pack module offers."""

    NAME: str
    VERSION: str

    def load(self, split: Split = "heldout", seeds: Sequence[int] | None = None) -> TaskSet:
        """The pack's tasks; without ``seeds``, the pack's own choice."""
        ...


def pack(name: str) -> Pack:
    """The pack module of this name. Raises :class:`KeyError` if there is none."""
    return cast(Pack, importlib.import_module(PACKS[name]))
