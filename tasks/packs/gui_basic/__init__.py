"""The pack ``gui-basic``: work at web pages and in native programs by mouse and keyboard, made from integer seeds.

Even seeds are the training split, odd seeds the held-out split. No instruction and no reference chain of actions is in
both. Some tasks are infeasible (see their generators); each has a feasible twin with a similar instruction.
"""

from __future__ import annotations

from typing import Any

from clawgym.registry import packs
from clawgym.tasks.packs.seeded import Generator, SeededPack

from ._build import build
from .board import BOARD
from .files import FILES
from .forms import FORMS
from .mail import MAIL
from .notes import NOTES
from .settings import SETTINGS
from .shop import SHOP
from .table import TABLE

__all__ = ["GENERATORS", "NAME", "VERSION", "load", "make"]

NAME = "gui-basic"
VERSION = "2"

GENERATORS: dict[str, Generator[Any]] = {
    **FORMS,
    **TABLE,
    **SETTINGS,
    **SHOP,
    **MAIL,
    **BOARD,
    **FILES,
    **NOTES,
}
"""Name -> generator, family by family."""

_PACK = SeededPack(NAME, VERSION, GENERATORS, build)
make = _PACK.make
load = _PACK.load


@packs.register("gui-basic")
def gui_basic() -> SeededPack[Any]:
    """Tasks for web pages and desktop programs, made from integer seeds."""
    return _PACK
