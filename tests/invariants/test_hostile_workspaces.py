"""Whatever an agent leaves behind harms nobody but itself: no other episode, not the process, not the next start."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from clawgym.sandbox import Backend, SandboxSpec, leases
from clawgym.sandbox import backend as make_backend

from ..conftest import usable
from ..sandbox.test_ordinary_user import as_user, home, python_of
from .hostile_trees import CAUSES, TREES

__all__ = ["home"]

_PROGRAM = Path(__file__).with_name("hostile_workspaces.py")
WHOLE = bool(os.environ.get("CLAWGYM_WHOLE"))
AT_ONCE = {"namespace": 40, "ordinary user": 8, "docker": 8, "chroot": 8}
"""Hostile episodes: a sandbox of the last two takes a second of a processor to make, and set-up has a time limit."""

OWN_FAULT = {"docker": {"fork: sparse": "layer"}}
"""What a backend cannot keep: Docker fills the holes of files. It fails, and costs who left it the score."""


@pytest.mark.alone
@pytest.mark.timeout(420)
@pytest.mark.parametrize(
    "name",
    [
        "namespace",
        pytest.param("docker", marks=pytest.mark.docker),
        pytest.param("chroot", marks=pytest.mark.skipif(not WHOLE, reason="with CLAWGYM_WHOLE=1: it takes minutes")),
    ],
)
async def test_hostile_workspaces_cost_nobody_else_anything(name: str, request: pytest.FixtureRequest) -> None:
    """Twenty of them, graded in two modes, where 1,024 files may be open."""
    if name == "docker":
        request.getfixturevalue("docker_engine")
    async with usable(name):
        pass
    argv = [sys.executable, str(_PROGRAM), name, str(AT_ONCE[name])]
    process = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE)
    try:
        out, _ = await asyncio.wait_for(process.communicate(), 400)
    except TimeoutError:
        process.kill()
        raise
    check(out, OWN_FAULT.get(name, {}))


@pytest.mark.alone
@pytest.mark.timeout(420)
@pytest.mark.skipif(os.geteuid() != 0, reason="already an ordinary user: the test above shows it")
def test_nor_as_an_ordinary_user(home: Path) -> None:
    repository = Path(__file__).parents[2]
    package = home / "installed" / "clawgym"  # as an installation has it: the top-level folders are parts of it
    package.mkdir(parents=True)
    for part in (repository / "clawgym").iterdir():
        (package / part.name).symlink_to(part)
    argv = [python_of(home), str(_PROGRAM), "namespace", str(AT_ONCE["ordinary user"])]
    done = as_user(argv, home, 400, stderr=subprocess.PIPE, first=package.parent)
    assert done.returncode == 0, done.stderr[-2000:]
    check(done.stdout)


def check(out: bytes | str, own: Mapping[str, str] = MappingProxyType({})) -> None:
    """What the program tells is what has to become of each tree, of honest work and of the state folder."""
    assert len(TREES) == 20
    told = json.loads(out)
    expected = {
        f"{mode}: {name}": ["failed", causes[name]] if name in causes else ["solved", None]
        for mode, causes in CAUSES.items()
        for name in TREES
    }
    expected |= {name: ["failed", cause] for name, cause in own.items()}
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
    sandboxes = make_backend(name)
    try:
        sandbox = await sandboxes.create(SandboxSpec())
        assert (await sandbox.exec(["echo", "works"])).text == "works\n"
        await sandbox.close()
    finally:
        await sandboxes.aclose()
