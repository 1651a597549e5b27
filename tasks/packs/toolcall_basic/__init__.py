"""The pack ``toolcall-basic``: tasks for agents with tools, made from integer seeds.

Even seeds are the training split, odd seeds the held-out split. No instruction and no reference chain of calls is in
both. docs/how-to/tool-calls.md describes the families of tasks.

>>> make("math-digits", 1).instruction.partition("?")[0]
'What is the sum of the decimal digits of 79^282'
"""

from __future__ import annotations

from clawgym.registry import packs
from clawgym.tasks.packs.seeded import Generator, SeededPack

from ._build import ToolCallDraft, build
from .bank import BANK
from .calendar import CALENDAR
from .desk import DESK
from .inventory import INVENTORY
from .lookup import LOOKUP
from .mail import MAIL
from .numbers import NUMBERS
from .questions import QUESTIONS

__all__ = ["GENERATORS", "NAME", "VERSION", "load", "make"]

NAME = "toolcall-basic"
VERSION = "4"

GENERATORS: dict[str, Generator[ToolCallDraft]] = {
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

_PACK = SeededPack(NAME, VERSION, GENERATORS, build)
make = _PACK.make
load = _PACK.load


@packs.register("toolcall-basic")
def toolcall_basic() -> SeededPack[ToolCallDraft]:
    """Tasks for agents that call tools, made from integer seeds."""
    return _PACK
