"""Real desktops: actions have their effect, and screenshots are exact."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from clawgym.desktop import RunningDesktop, parse
from clawgym.desktop._x11 import Rectangle
from clawgym.errors import InfraError, SandboxDied, SandboxError, SandboxUnavailable
from clawgym.records import Desktop, Task
from clawgym.sandbox import Backend

from .conftest import running

pytestmark = pytest.mark.usefixtures("programs")

EDITOR = Desktop(programs=(("xfwrite", "note.txt"),))


async def do(desktop: RunningDesktop, **arguments: Any) -> np.ndarray:
    await desktop.act(parse(arguments, desktop.screen.width, desktop.screen.height))
    return await desktop.picture()


async def same(desktop: RunningDesktop) -> bool:
    """Whether what is known of the screen is what is there; a caret may blink in between."""
    known = await desktop.picture()
    desktop.screen._touch(Rectangle(0, 0, desktop.screen.width, desktop.screen.height))
    return bool((known == await desktop.picture()).all())


async def test_a_text_is_typed_and_saved(backend: Backend) -> None:
    async with running(Desktop(programs=(("sh", "-c", ": > note.txt; exec xfwrite note.txt"),)), backend) as desktop:
        first = await desktop.picture()
        assert first.shape == (768, 1024, 3)
        assert first.dtype == np.uint8
        text = "Grüße, 100 % ~{}|\\ and “quotes” → 漢字"
        await do(desktop, action="left_click", coordinate=[400, 300])
        seen = await do(desktop, action="type", text=text)
        assert (seen != first).any()
        assert any([await same(desktop) for _ in range(5)])
        await do(desktop, action="key", keys=["ctrl", "s"])
        saved = await desktop.sandbox.get(f"{desktop.sandbox.spec.workdir}/note.txt")
        assert saved.decode().rstrip("\n") == text


async def test_only_what_changed_is_fetched_and_nothing_is_missed(backend: Backend) -> None:
    async with running(EDITOR, backend) as desktop:
        for action in (
            {"action": "key", "keys": ["enter"]},
            {"action": "left_click", "coordinate": [30, 30]},
            {"action": "key", "keys": ["esc"]},
            {"action": "left_click_drag", "start_coordinate": [400, 8], "coordinate": [500, 120]},
            {"action": "scroll", "coordinate": [500, 300], "amount": 3},
            {"action": "wait", "seconds": 0.3},
        ):
            await do(desktop, **action)
            assert any([await same(desktop) for _ in range(5)]), action


async def test_the_pointer_is_seen_where_it_is(backend: Backend) -> None:
    async with running(Desktop(width=640, height=480), backend) as desktop:
        without = await desktop.picture(pointer=False)
        for x, y in [(100, 100), (639, 479), (0, 0)]:
            seen = await do(desktop, action="mouse_move", coordinate=[x, y])
            rows, columns = np.nonzero((seen != without).any(axis=2))
            assert len(rows)
            assert abs(rows.min() - y) < 16
            assert abs(columns.min() - x) < 16
        with pytest.raises(SandboxError, match="outside"):
            desktop.screen.move(640, 0)


async def test_a_desktop_that_is_killed(backend: Backend) -> None:
    async with running(EDITOR, backend) as desktop:
        await desktop.sandbox.exec(["sh", "-c", "kill -9 $(pidof Xvfb)"])
        with pytest.raises(SandboxDied, match="begin the episode again"):
            await do(desktop, action="left_click", coordinate=[1, 1])


async def test_programs_that_are_missing_or_open_no_window(backend: Backend) -> None:
    with pytest.raises(SandboxUnavailable, match="no-such-editor"):
        async with running(Desktop(programs=(("no-such-editor",),)), backend):
            pass
    async with running(Desktop(), backend) as desktop:
        with pytest.raises(InfraError, match="opened its window"):
            await desktop.run([("sleep", "60")], 3)


def test_tasks_without_a_desktop_are_refused() -> None:
    for wrong in ({"width": 10}, {"page": "/x"}):
        with pytest.raises(Exception, match="desktop"):
            Desktop(**wrong)  # type: ignore[arg-type]
    assert Task.__dataclass_fields__["desktop"].default is None
