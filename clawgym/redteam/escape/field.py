"""Where a probe works: the backend under attack, a box to spoil, the baits, and a way to run code in the box."""

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
from clawgym.redteam.escape.inside.kit import PROBES
from clawgym.redteam.escape.records import BLOCKED, SKIPPED, Answer
from clawgym.sandbox import Backend, Sandbox, SandboxSpec

__all__ = ["SMALL", "Field", "module_of"]

SMALL = Limits(memory_mb=96, pids=48, cpus=0.5, disk_mb=16, file_mb=8)
"""For the bombs: a box so small that a little more than its limits is nothing to the host."""
_SLOW = dataclasses.replace(SMALL, cpus=0.2)
"""So slow that even a busy machine has more to give: that it does not give it is the limit's doing."""
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
    """The module of :mod:`inside` that holds a probe."""
    return PROBES[name][0].__module__.rpartition(".")[2]


@cache
def _files() -> tuple[TaskFile, ...]:
    folder = resources.files("clawgym.redteam.escape.inside")
    names = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".py"))
    return tuple(TaskFile(f"inside/{name}", folder.joinpath(name).read_bytes()) for name in names)


class Field:
    """One backend under attack. Boxes that die are replaced."""

    def __init__(self, backend: Backend, baits: Baits) -> None:
        self.backend = backend
        self.baits = baits
        self._box: Sandbox | None = None
        self._armed: set[str] = set()
        """Boxes that have the probes."""

    async def box(self) -> Sandbox:
        """The box that probes share which leave it as it is."""
        if self._box is None:
            self._box = await self.backend.create(SandboxSpec())
        return self._box

    async def drop_box(self) -> None:
        """Let the next probe have a fresh one."""
        box, self._box = self._box, None
        if box is not None:
            with contextlib.suppress(ClawGymError):
                await box.close()

    @contextlib.asynccontextmanager
    async def own_box(self, limits: Limits | None = None, **spec: Any) -> AsyncIterator[Sandbox]:
        """A box for one probe alone."""
        box = await self.backend.create(SandboxSpec(limits=limits or Limits(), **spec))
        try:
            yield box
        finally:
            with contextlib.suppress(ClawGymError):
                await box.close()

    async def inside(self, name: str, box: Sandbox | None = None, **more: Any) -> Answer:
        """Run a probe of :mod:`inside` in ``box``. A box that dies of it has stopped it."""
        if box is None and module_of(name) == "limits":
            async with self.own_box(_SLOW if name == "31a" else SMALL) as small:
                return await self.inside(name, small, **_OVER | {"limit": _OVER["limit"].get(name[:-1])}, **more)
        shared = box is None
        box = box or await self.box()
        place = f"{box.spec.workdir.rstrip('/')}/.escape"
        bait = json.dumps(self.baits.known | more).encode()
        try:
            if box.id not in self._armed:
                await box.put(_files(), place)
                self._armed.add(box.id)
            argv = ["python3", "-I", "-S", "-B", "-c", _RUN, place, module_of(name), name]
            done = await box.exec(argv, cwd=place, stdin=bait, timeout=30, stdout_only=True)
        except SandboxDied as error:
            if shared:
                await self.drop_box()
            return BLOCKED, f"the box died ({error.cause})"
        try:
            verdict, evidence = json.loads(done.output.strip().rpartition(b"\n")[2])
            return str(verdict), str(evidence)[:300]
        except ValueError:
            if done.exit_code > 128 or done.timed_out:
                what = "timed out" if done.timed_out else f"killed by signal {done.exit_code - 128}"
                return BLOCKED, f"the probe was {what}" if not done.timed_out else what
            words = (done.stderr or done.output).decode("utf-8", "backslashreplace").strip().splitlines()
            return SKIPPED, f"the probe could not run: {(words or ['no message'])[-1][:200]}"

    async def code(self, box: Sandbox, source: str, *words: str, timeout: float = 30.0) -> Any:
        """Run a few lines of Python in ``box``, in its working folder."""
        argv = ["python3", "-I", "-S", "-B", "-c", source, *words]
        return await box.exec(argv, cwd=box.spec.workdir, timeout=timeout)

    async def still_works(self) -> bool:
        """Whether another box answers: what one box does must not be felt in the next."""
        async with self.own_box() as other:
            done = await asyncio.wait_for(other.exec(["echo", "still here"], timeout=20), 40)
            return done.output == b"still here\n"
