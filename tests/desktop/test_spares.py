"""Desktops started in advance: none is awaited twice, shared or leaked."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import gymnasium as gym
import numpy as np
import pytest

import clawgym  # noqa: F401  # registers the ids
from clawgym.desktop import FILES_DIR, desktop_files, parse
from clawgym.desktop.browser import browser_files
from clawgym.desktop.spares import SpareDesktops, start_desktop
from clawgym.records import Desktop, Limits, Task, TaskSet, VerifierSpec
from clawgym.sandbox import Backend, SandboxSpec

from .conftest import LIMITS

pytestmark = pytest.mark.usefixtures("programs")

PLAIN = SandboxSpec(limits=LIMITS, readonly={FILES_DIR: desktop_files()})
WEB = SandboxSpec(limits=LIMITS, readonly={FILES_DIR: desktop_files(), **browser_files()})


@contextlib.asynccontextmanager
async def spares_of(backend: Backend, most: int = 2) -> AsyncIterator[SpareDesktops]:
    before = set(backend.sandboxes)  # type: ignore[attr-defined]
    spares = SpareDesktops(backend, 640, 480, most)
    yield spares
    await spares.aclose()
    assert set(backend.sandboxes) == before  # type: ignore[attr-defined]


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not true():  # noqa: ASYNC110  # what is asked for changes beside us
            await asyncio.sleep(0.01)


async def test_next_desktop_is_ready(backend: Backend) -> None:
    async with spares_of(backend) as spares:
        first = await spares.create(PLAIN)
        mine = spares.claim(first)
        assert mine is not None
        await until(lambda: bool(spares._spares))
        ready, _ = spares._spares[0]
        other = await spares.create(WEB)
        assert other.id != ready.id, "a desktop without a browser was given for one with"
        second = await spares.create(PLAIN)
        assert second.id == ready.id
        theirs = await start_desktop(second, spares, 640, 480, 30)
        assert spares.claim(second) is None, "two have the same desktop"
        await mine.desktop.act(parse({"action": "mouse_move", "coordinate": [600, 400]}, 640, 480))
        assert (await theirs.desktop.screen.position()) != (600, 400)
        for each in (mine, theirs):
            await each.aclose()
        for sandbox in (first, second):
            await sandbox.close()


async def test_other_sandboxes_come_from_the_wrapped_backend(backend: Backend) -> None:
    async with spares_of(backend) as spares:
        sandbox = await spares.create(SandboxSpec())
        assert spares.claim(sandbox) is None
        assert not spares._ordered
        await sandbox.close()


async def test_number_of_spares_is_bounded(backend: Backend) -> None:
    async with spares_of(backend, 1) as spares:
        before = len(backend.sandboxes)  # type: ignore[attr-defined]
        made = [await spares.create(spec) for spec in (PLAIN, WEB, PLAIN)]
        await until(lambda: spares._task is not None and spares._task.done())
        assert len(spares._spares) == 1
        assert len(backend.sandboxes) == before + len(made) + 1  # type: ignore[attr-defined]


def test_an_environment_whose_spares_are_gone() -> None:
    task = Task(
        "editor",
        "Look.",
        VerifierSpec("reward_sh", ()),
        desktop=Desktop(width=640, height=480, programs=(("xfwrite",),)),
        limits=Limits(memory_mb=1024, pids=256, setup_seconds=60),
    )
    env = gym.make("ClawGym/gui-v0", tasks=TaskSet("t", (task,)), width=640, height=480)
    first, _ = env.reset(seed=1)
    inner = env.unwrapped
    spares = inner._factory._backend  # type: ignore[attr-defined]
    run = inner._runtime.run  # type: ignore[attr-defined]
    run(until(lambda: bool(spares._spares)))
    run(spares._spares[0][0].stop())
    second, info = env.reset(seed=1)
    assert "error" not in info
    assert np.abs(first["screenshot"].astype(int) - second["screenshot"]).mean() < 1  # a caret may blink
    env.close()
