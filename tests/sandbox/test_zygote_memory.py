"""Sandboxes are cloned from one process, whose memory they begin with: nothing of another sandbox may be in it."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from clawgym.sandbox import SandboxSpec
from clawgym.sandbox.namespace.backend import NamespaceBackend

from ..conftest import usable


def _memory(pid: int) -> bytes:
    """What a process has in its writable memory."""
    found = bytearray()
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as mem:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) rw", line):
                start, end = (int(number, 16) for number in match.groups())
                mem.seek(start)
                found += mem.read(end - start)
    return bytes(found)


def _processes(pid: int) -> list[int]:
    """``pid`` and all its descendants."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(one for child in children for one in _processes(int(child)))]


@pytest.mark.skipif(os.geteuid() != 0, reason="reads the memory of other processes: run it as root")
async def test_no_settings_of_another_sandbox_in_memory() -> None:
    async with usable("namespace") as backend:
        assert isinstance(backend, NamespaceBackend)
        supervisor = backend.supervised._process.pid  # type: ignore[union-attr]
        secret = "s3cr3t" * 10
        first = await backend.create(SandboxSpec(env={"A": "x" * 20_000, "Z": secret}))
        known = set(_processes(supervisor))
        second = await backend.create(SandboxSpec(env={"OWN": "mine" * 10}))
        (process,) = set(_processes(supervisor)) - known
        memory = _memory(process)
        assert b"mine" * 10 in memory
        assert secret.encode() not in memory
        await first.close()
        await second.close()
