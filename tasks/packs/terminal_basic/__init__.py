"""The pack ``terminal-basic``: tasks for a shell, made from integer seeds.

Even seeds are the training split, odd seeds the held-out split. No instruction is in both. docs/how-to/task-sets.md
shows how to add a generator.

>>> make("write-word", 2).instruction
'Write the word nutmeg to the file shadow.txt.'
"""

from __future__ import annotations

from clawgym.registry import packs
from clawgym.tasks.packs.seeded import Generator, SeededPack

from ._build import TerminalDraft, build
from .data import DATA
from .files import FILES
from .programs import PROGRAMS
from .shell import SHELL

__all__ = ["GENERATORS", "NAME", "VERSION", "TerminalDraft", "build", "load", "make"]

NAME = "terminal-basic"
VERSION = "3"

GENERATORS: dict[str, Generator[TerminalDraft]] = {**FILES, **DATA, **SHELL, **PROGRAMS}
"""Name -> generator, family by family."""

_PACK = SeededPack(NAME, VERSION, GENERATORS, build)
make = _PACK.make
load = _PACK.load


@packs.register("terminal-basic")
def terminal_basic() -> SeededPack[TerminalDraft]:
    """Tasks for a shell, made from integer seeds."""
    return _PACK
