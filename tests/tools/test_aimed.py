"""CSS selectors in calls are replaced by the middle of the element."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from clawgym.errors import SandboxDied, SandboxError
from clawgym.records import ToolCall
from clawgym.tools import aimed

PLACES: dict[str, Any] = {
    "#a": (10, 20, 31, 41),
    "#b": (100, 200, 2, 2),
    "#none": SandboxError("there is no #none: look again"),
    "#died": SandboxDied("the sandbox is gone", cause="memory"),
}


class Browser:
    async def bounding_box(self, selector: str) -> tuple[int, int, int, int]:
        found = PLACES[selector]
        if isinstance(found, Exception):
            raise found
        return found


TOOLS: Any = SimpleNamespace(browser=Browser())


async def of(**arguments: Any) -> dict[str, Any]:
    return (await aimed(TOOLS, ToolCall("1", "computer_use", arguments))).arguments


async def test_selectors_become_the_middle_of_the_element() -> None:
    assert await of(action="left_click", coordinate="#a") == {"action": "left_click", "coordinate": [25, 40]}
    assert await of(coordinate="#b", start_coordinate="#a") == {"coordinate": [101, 201], "start_coordinate": [25, 40]}


async def test_selectors_without_an_element_are_unchanged() -> None:
    assert await of(coordinate=[1, 2], text="#a") == {"coordinate": [1, 2], "text": "#a"}
    assert await of(coordinate="#none", start_coordinate="#a") == {"coordinate": "#none", "start_coordinate": [25, 40]}
    call = ToolCall("1", "computer_use", {"coordinate": "#a"})
    assert await aimed(SimpleNamespace(), call) == call  # type: ignore[arg-type]


async def test_dead_sandbox_is_not_a_missing_element() -> None:
    with pytest.raises(SandboxDied):
        await of(coordinate="#died")
