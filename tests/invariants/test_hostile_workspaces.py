"""Whatever an agent leaves behind harms nobody but itself: no other episode, not the process, not the next start."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from clawgym.sandbox import Backend, SandboxSpec, leases
from clawgym.sandbox import backend as make_backend

from .hostile_trees import CAUSES, TREES

_PROGRAM = Path(__file__).with_name("hostile_workspaces.py")


async def test_hostile_workspaces_cost_nobody_else_anything(backend: Backend) -> None:
    """Twenty of them, graded in two modes, all at once, where 1,024 files may be open."""
    assert len(TREES) == 20
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(_PROGRAM), backend.name, stdout=asyncio.subprocess.PIPE
    )
    try:
        out, _ = await asyncio.wait_for(process.communicate(), 400)
    except TimeoutError:
        process.kill()
        raise
    told = json.loads(out)
    expected = {
        f"{mode}: {name}": ["failed", causes[name]] if name in causes else ["solved", None]
        for mode, causes in CAUSES.items()
        for name in TREES
    }
    assert told["hostile"] == expected
    assert len(told["honest"]) > 10
    assert [outcome for outcome in told["honest"] if outcome != ["solved", None]] == []
    pauses = told["pauses"]
    assert pauses[int(len(pauses) * 0.99)] < 0.1
    assert not [name for name in told["left"] if name.startswith("snapshot-")]
    assert told["gone"]


@contextlib.contextmanager
def immovable(folder: Path) -> Iterator[None]:
    """A folder of which a file cannot be removed, by nobody."""
    file = folder / "file"
    file.touch()
    if subprocess.run(["chattr", "+i", file], capture_output=True).returncode:
        pytest.skip("this file system, or this user, cannot make a file immutable")
    try:
        yield
    finally:
        for path in (file, *folder.parent.parent.glob(f"*/{folder.name}/file")):
            subprocess.run(["chattr", "-i", path], capture_output=True)


async def test_what_cannot_be_removed_stops_nobody(backend: Backend) -> None:
    """It is set aside and named, and goes as soon as it can."""
    state = leases.state_dir()
    dead = state / "owners" / f"dead-{os.urandom(8).hex()}"
    aside = state / "aside" / dead.name
    dead.mkdir()
    with immovable(dead):
        await start(backend.name)
        assert not dead.exists()
        assert aside in leases.left_over(state)
        await start(backend.name)
    await start(backend.name)
    assert aside not in leases.left_over(state)
    assert not aside.exists()


async def start(name: str) -> None:
    boxes = make_backend(name)
    try:
        box = await boxes.create(SandboxSpec())
        assert (await box.exec(["echo", "works"])).text == "works\n"
        await box.close()
    finally:
        await boxes.aclose()
