"""Rows 33, 34, 38: processes that outlive a sandbox, files that change while the host reads, attacks on process 1."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import struct
import time
from pathlib import Path

from clawgym.errors import ClawGymError, SandboxDied, SandboxError
from clawgym.redteam.escape.context import ProbeContext
from clawgym.redteam.escape.records import BLOCKED, OPEN, SKIPPED, Answer, host_probe
from clawgym.sandbox import Sandbox

__all__ = ["alive", "owner_mib"]


def alive(mark: str) -> list[int]:
    """Pids of this machine whose command line contains ``mark``."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and mark.encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
    return found


def owner_mib() -> float:
    """Resident memory of this process, in MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return 0.0


# -- 33: after stop() and close()


async def _outlives(context: ProbeContext, name: str) -> Answer:
    mark = f"clawgym-daemon-{secrets.token_hex(8)}"
    async with context.own_sandbox() as sandbox:
        beat = f"{sandbox.spec.workdir.rstrip('/')}/.escape/beat"
        answer = await context.inside(name, sandbox, mark=mark, seconds=6)
        if answer[0] != OPEN:
            return answer
        deadline = time.monotonic() + 5
        running = 0
        while time.monotonic() < deadline and not running:
            await asyncio.sleep(0.1)
            with contextlib.suppress(SandboxError):
                running = len(await sandbox.get(beat))
        if not running:
            return BLOCKED, "it ended with the command that started it"
        await sandbox.stop()
        first = len(await sandbox.get(beat))
        await asyncio.sleep(0.5)
        second = len(await sandbox.get(beat))
    left = alive(mark)
    if second != first:
        return OPEN, f"it wrote on after stop(): {second - first} times in half a second"
    if left:
        return OPEN, f"{len(left)} processes left after close()"
    return BLOCKED, f"{running} signs of life before stop(), none after, no process left"


@host_probe("33a", "leave a daemon that outlives the sandbox")
async def daemon(context: ProbeContext) -> Answer:
    return await _outlives(context, "33a")


@host_probe("33b", "leave one that forks and exits without pause, to be missed by a kill")
async def hopper(context: ProbeContext) -> Answer:
    return await _outlives(context, "33b")


# -- 34: while the host reads

_WRITER = """
import os, time
end = time.monotonic() + 20
n = 0
while time.monotonic() < end:
    n += 1
    for name in ("a", "z"):
        fd = os.open(name, os.O_WRONLY | os.O_CREAT, 0o644)
        os.pwrite(fd, b"%012d" % n, 0)
        os.close(fd)
"""


async def _start_writer(context: ProbeContext, sandbox: Sandbox) -> asyncio.Task[object]:
    task = asyncio.create_task(context.code(sandbox, _WRITER))
    for _ in range(100):
        await asyncio.sleep(0.05)
        with contextlib.suppress(SandboxError):
            if await sandbox.get(f"{sandbox.spec.workdir.rstrip('/')}/z"):
                break
    return task


@host_probe("34a", "go on writing results after the sandbox was stopped for grading")
async def writes_on(context: ProbeContext) -> Answer:
    async with context.own_sandbox() as sandbox:
        place = sandbox.spec.workdir.rstrip("/")
        task = await _start_writer(context, sandbox)
        await sandbox.stop()
        first = await sandbox.get(f"{place}/a")
        await asyncio.sleep(0.3)
        second = await sandbox.get(f"{place}/a")
        with contextlib.suppress(ClawGymError, asyncio.CancelledError):
            task.cancel()
            await task
    if first != second:
        return OPEN, f"the file changed after stop(): {first.decode()} to {second.decode()}"
    return BLOCKED, f"the file stands still at {int(first)}"


@host_probe("34b", "write while a snapshot is taken, so that its files do not belong together")
async def writes_during_snapshot(context: ProbeContext) -> Answer:
    async with context.own_sandbox() as sandbox:
        fill = "open('m', 'wb').write(b'x' * (48 << 20))"
        await context.code(sandbox, fill)  # copied between the files a and z
        task = await _start_writer(context, sandbox)
        try:
            snapshot = await sandbox.snapshot()
        except SandboxError as error:
            return SKIPPED, f"no snapshot: {error}"
        finally:
            with contextlib.suppress(ClawGymError, asyncio.CancelledError):
                task.cancel()
                await task
        try:
            copy = await context.backend.fork(snapshot)
            try:
                place = copy.spec.workdir.rstrip("/")
                first, last = int(await copy.get(f"{place}/a")), int(await copy.get(f"{place}/z"))
            finally:
                await copy.close()
        finally:
            await context.backend.drop(snapshot)
    if first - last not in (0, 1):
        return OPEN, f"the files are of two moments: {first} and {last}"
    return BLOCKED, f"both files are of one moment ({first}, {last})"


# -- 38: process 1 of the sandbox


async def _survives(context: ProbeContext, name: str, **more: object) -> Answer:
    """Attack process 1 from inside. The host must answer in time and not grow; other sandboxes must keep working."""
    before, start = owner_mib(), time.monotonic()
    async with context.own_sandbox() as sandbox:
        answer = await asyncio.wait_for(context.inside(name, sandbox, **more), 60)
        if answer[0] == SKIPPED:
            return answer
        try:
            done = await asyncio.wait_for(sandbox.exec(["echo", "hello"], timeout=2), 30)
            after = "the sandbox works on" if done.output == b"hello\n" else "the sandbox answers nonsense"
        except SandboxDied as error:
            after = f"the sandbox died ({error.cause})"
        except SandboxError as error:
            after = f"refused: {str(error)[:60]}"
    waited, grown = time.monotonic() - start, owner_mib() - before
    if grown > 64:
        return OPEN, f"the owner grew by {grown:.0f} MiB"
    if not await context.still_works():
        return OPEN, "another sandbox no longer works"
    return BLOCKED, f"{answer[1]}: {after}, {waited:.1f} s; other sandboxes work"


@host_probe("38a", "kill the sandbox's own agent")
async def kill_agent(context: ProbeContext) -> Answer:
    return await _survives(context, "38a")


@host_probe("38b", "forge what the sandbox's own agent says to the host")
async def forge(context: ProbeContext) -> Answer:
    # A frame with the longest possible length, no payload, and an unknown op.
    return await _survives(context, "38b", frame=struct.pack(">IBI", 0xFFFFFFFF, 0x7E, 1).hex())


@host_probe("38d", "stop the sandbox's own agent (SIGSTOP)")
async def stop_agent(context: ProbeContext) -> Answer:
    return await _survives(context, "38d")
