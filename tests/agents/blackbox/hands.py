"""The small agent of docs/tutorials/plug-in-an-agent.md, read from the page: the tests run what the page shows."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

from ...pages import files

PAGE = Path(__file__).parents[3] / "docs" / "tutorials" / "plug-in-an-agent.md"


def page_source() -> str:
    """The file that the page writes."""
    return files(PAGE.read_text())["hands.py"]


def hands_module(program: str | None = None) -> ModuleType:
    """The page as a module, with the page's program or another one."""
    spec = importlib.util.spec_from_loader("hands_of_the_page", loader=None)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    exec(compile(page_source(), str(PAGE), "exec"), module.__dict__)
    if program is not None:
        module.PROGRAM = program.encode()  # type: ignore[attr-defined]
    return module


def hands(program: str | None = None) -> Any:
    """A new instance of the page's Claw."""
    return hands_module(program).Hands()


def without(program: str, *changes: tuple[str, str]) -> str:
    """``program`` with each text replaced; each must occur in it."""
    for old, new in changes:
        assert old in program, old
        program = program.replace(old, new)
    return program


PROGRAM: str = hands_module().PROGRAM.decode()
"""The page's program, from which the tests derive others."""
