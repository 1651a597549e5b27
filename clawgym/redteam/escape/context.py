"""The context of a probe: the backend under attack, sandboxes, the baits, and how to run code in a sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import AsyncIterator
from functools import cache
from importlib import resources
from typing import Any

from clawgym.errors import ClawGymError, SandboxDied
from clawgym.records import Limits, TaskFile
from clawgym.redteam.escape.baits import Baits
from clawgym.redteam.escape.inside.kit import BLOCKED, PROBES, SKIPPED
from clawgym.sandbox import Backend, Sandbox, SandboxSpec

__all__ = ["SMALL", "Answer", "ProbeContext", "module_of"]

Answer = tuple[str, str]
"""Verdict and one line of evidence."""

SMALL = Limits(memory_mb=96, pids=48, cpus=0.5, disk_mb=16, file_mb=8)
"""Limits for the resource bombs: so small that exceeding them a little does not affect the host."""
_SLOW = dataclasses.replace(SMALL, cpus=0.2)
"""So little CPU that even a busy machine could give more: if a probe gets no more, the limit is the cause."""
_OVER = {
    "mib": SMALL.memory_mb + SMALL.disk_mb + 48,
    "processes": SMALL.pids + 40,
    "disk_mib": SMALL.disk_mb + 8,
    "files": 21_000,
    "file_mib": SMALL.file_mb,
    "limit": {"29": SMALL.memory_mb + SMALL.disk_mb, "30": SMALL.pids, "31": _SLOW.cpus, "32": SMALL.disk_mb},
}
_RUN = "import sys; sys.path.insert(0, sys.argv.pop(1)); from inside.kit import main; main()"


def module_of(name: str) -> str:
    """The module in ``inside/`` that has a probe."""
    return PROBES[name][0].__module__.rpartition(".")[2]


@cache
def _files() -> tuple[TaskFile, ...]:
    folder = resources.files("clawgym.redteam.escape.inside")
    names = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".py"))
    return tuple(TaskFile(f"inside/{name}", folder.joinpath(name).read_bytes()) for name in names)


class ProbeContext:
    """One backend under attack. A sandbox that dies is replaced."""

    def __init__(self, backend: Backend, baits: Baits) -> None:
        self.backend = backend
        self.baits = baits
        self._sandbox: Sandbox | None = None
        self._armed: set[str] = set()
        """Ids of the sandboxes that the probes were copied to."""

    async def sandbox(self) -> Sandbox:
        """The sandbox shared by probes that do not change it."""
        if self._sandbox is None:
            self._sandbox = await self.backend.create(SandboxSpec())
        return self._sandbox

    async def drop_sandbox(self) -> None:
        """Close the shared sandbox; the next probe gets a new one."""
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            with contextlib.suppress(ClawGymError):
                await sandbox.close()

    @contextlib.asynccontextmanager
    async def own_sandbox(self, limits: Limits | None = None, **spec: Any) -> AsyncIterator[Sandbox]:
        """A sandbox for one probe only."""
        sandbox = await self.backend.create(SandboxSpec(limits=limits or Limits(), **spec))
        try:
            yield sandbox
        finally:
            with contextlib.suppress(ClawGymError):
                await sandbox.close()

    async def inside(self, name: str, sandbox: Sandbox | None = None, **more: Any) -> Answer:
        """Run a probe of ``inside/`` in ``sandbox``. It counts as blocked if the sandbox dies of it."""
        if sandbox is None and module_of(name) == "limits":
            async with self.own_sandbox(_SLOW if name == "31a" else SMALL) as small:
                return await self.inside(name, small, **_OVER | {"limit": _OVER["limit"].get(name[:-1])}, **more)
        shared = sandbox is None
        sandbox = sandbox or await self.sandbox()
        place = f"{sandbox.spec.workdir.rstrip('/')}/.escape"
        bait = json.dumps(self.baits.known | more).encode()
        try:
            if sandbox.id not in self._armed:
                await sandbox.put(_files(), place)
                self._armed.add(sandbox.id)
            argv = ["python3", "-I", "-S", "-B", "-c", _RUN, place, module_of(name), name]
            done = await sandbox.exec(argv, cwd=place, stdin=bait, timeout=30, stdout_only=True)
        except SandboxDied as error:
            if shared:
                await self.drop_sandbox()
            return BLOCKED, f"the sandbox died ({error.cause})"
        try:
            verdict, evidence = json.loads(done.output.strip().rpartition(b"\n")[2])
            return str(verdict), str(evidence)[:300]
        except ValueError:
            if done.exit_code > 128 or done.timed_out:
                what = "timed out" if done.timed_out else f"killed by signal {done.exit_code - 128}"
                return BLOCKED, f"the probe was {what}" if not done.timed_out else what
            words = (done.stderr or done.output).decode("utf-8", "backslashreplace").strip().splitlines()
            return SKIPPED, f"the probe could not run: {(words or ['no message'])[-1][:200]}"

    async def code(self, sandbox: Sandbox, source: str, *words: str, timeout: float = 30.0) -> Any:
        """Run the Python program ``source`` in the working folder of ``sandbox``."""
        argv = ["python3", "-I", "-S", "-B", "-c", source, *words]
        return await sandbox.exec(argv, cwd=sandbox.spec.workdir, timeout=timeout)

    async def still_works(self) -> bool:
        """Whether another sandbox still answers: an attack in one must not affect the others."""
        async with self.own_sandbox() as other:
            done = await asyncio.wait_for(other.exec(["echo", "still here"], timeout=20), 40)
            return done.output == b"still here\n"
