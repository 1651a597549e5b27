"""The small agent of docs/new-agent.md, taken from the page: what the page shows is what is tested."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

PAGE = Path(__file__).parents[3] / "docs" / "new-agent.md"


def page_source() -> str:
    """The file that the page's blocks are, one after another."""
    return "\n\n".join(re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S))


def hands_module(program: str | None = None) -> ModuleType:
    """The page as a module, with its program or another Python program."""
    spec = importlib.util.spec_from_loader("hands_of_the_page", loader=None)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    exec(compile(page_source(), str(PAGE), "exec"), module.__dict__)
    if program is not None:
        module.PROGRAM = program.encode()  # type: ignore[attr-defined]
    return module


def hands(program: str | None = None) -> Any:
    """A new Claw of the page."""
    return hands_module(program).Hands()


def without(program: str, *changes: tuple[str, str]) -> str:
    """``program`` with each piece of text replaced that must be in it."""
    for old, new in changes:
        assert old in program, old
        program = program.replace(old, new)
    return program


PROGRAM: str = hands_module().PROGRAM.decode()
"""The page's program, to make others of."""
