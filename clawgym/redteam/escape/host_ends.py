"""33, 34, 38: what outlives a box, what moves while the host reads it, and a box that turns on its own agent."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import struct
import time
from pathlib import Path

from clawgym.errors import ClawGymError, SandboxDied, SandboxError
from clawgym.redteam.escape.field import Field
from clawgym.redteam.escape.records import BLOCKED, OPEN, SKIPPED, Answer, host_probe
from clawgym.sandbox import Sandbox

__all__ = ["alive", "owner_mib"]


def alive(mark: str) -> list[int]:
    """The processes of this machine whose command line holds ``mark``."""
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


# -- 33: after the end


async def _outlives(field: Field, name: str) -> Answer:
    mark = f"clawgym-daemon-{secrets.token_hex(8)}"
    async with field.own_box() as box:
        beat = f"{box.spec.workdir.rstrip('/')}/.escape/beat"
        answer = await field.inside(name, box, mark=mark, seconds=6)
        if answer[0] != OPEN:
            return answer
        deadline = time.monotonic() + 5
        running = 0
        while time.monotonic() < deadline and not running:
            await asyncio.sleep(0.1)
            with contextlib.suppress(SandboxError):
                running = len(await box.get(beat))
        if not running:
            return BLOCKED, "it ended with the command that started it"
        await box.stop()
        first = len(await box.get(beat))
        await asyncio.sleep(0.5)
        second = len(await box.get(beat))
    left = alive(mark)
    if second != first:
        return OPEN, f"it wrote on after stop(): {second - first} times in half a second"
    if left:
        return OPEN, f"{len(left)} processes left after close()"
    return BLOCKED, f"{running} signs of life before stop(), none after, no process left"


@host_probe("33a", "leave a daemon that outlives the box")
async def daemon(field: Field) -> Answer:
    return await _outlives(field, "33a")


@host_probe("33b", "leave one that forks and exits without pause, to be missed by a kill")
async def hopper(field: Field) -> Answer:
    return await _outlives(field, "33b")


# -- 34: while the host looks

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


async def _start_writer(field: Field, box: Sandbox) -> asyncio.Task[object]:
    task = asyncio.create_task(field.code(box, _WRITER))
    for _ in range(100):
        await asyncio.sleep(0.05)
        with contextlib.suppress(SandboxError):
            if await box.get(f"{box.spec.workdir.rstrip('/')}/z"):
                break
    return task


@host_probe("34a", "go on writing results after the box was stopped for grading")
async def writes_on(field: Field) -> Answer:
    async with field.own_box() as box:
        place = box.spec.workdir.rstrip("/")
        task = await _start_writer(field, box)
        await box.stop()
        first = await box.get(f"{place}/a")
        await asyncio.sleep(0.3)
        second = await box.get(f"{place}/a")
        with contextlib.suppress(ClawGymError, asyncio.CancelledError):
            task.cancel()
            await task
    if first != second:
        return OPEN, f"the file changed after stop(): {first.decode()} to {second.decode()}"
    return BLOCKED, f"the file stands still at {int(first)}"


@host_probe("34b", "write while a snapshot is taken, so that its files do not belong together")
async def writes_during_snapshot(field: Field) -> Answer:
    async with field.own_box() as box:
        fill = "open('m', 'wb').write(b'x' * (48 << 20))"
        await field.code(box, fill)  # what is copied between a and z
        task = await _start_writer(field, box)
        try:
            snapshot = await box.snapshot()
        except SandboxError as error:
            return SKIPPED, f"no snapshot: {error}"
        finally:
            with contextlib.suppress(ClawGymError, asyncio.CancelledError):
                task.cancel()
                await task
        try:
            copy = await field.backend.fork(snapshot)
            try:
                place = copy.spec.workdir.rstrip("/")
                first, last = int(await copy.get(f"{place}/a")), int(await copy.get(f"{place}/z"))
            finally:
                await copy.close()
        finally:
            await field.backend.drop(snapshot)
    if first - last not in (0, 1):
        return OPEN, f"the files are of two moments: {first} and {last}"
    return BLOCKED, f"both files are of one moment ({first}, {last})"


# -- 38: its own agent


async def _survives(field: Field, name: str, **more: object) -> Answer:
    """Let the box turn on its agent; the host must answer in time, keep its memory, and other boxes their life."""
    before, start = owner_mib(), time.monotonic()
    async with field.own_box() as box:
        answer = await asyncio.wait_for(field.inside(name, box, **more), 60)
        if answer[0] == SKIPPED:
            return answer
        try:
            done = await asyncio.wait_for(box.exec(["echo", "hello"], timeout=2), 30)
            after = "the box works on" if done.output == b"hello\n" else "the box answers nonsense"
        except SandboxDied as error:
            after = f"the box died ({error.cause})"
        except SandboxError as error:
            after = f"refused: {str(error)[:60]}"
    waited, grown = time.monotonic() - start, owner_mib() - before
    if grown > 64:
        return OPEN, f"the owner grew by {grown:.0f} MiB"
    if not await field.still_works():
        return OPEN, "another box no longer works"
    return BLOCKED, f"{answer[1]}: {after}, {waited:.1f} s; other boxes work"


@host_probe("38a", "kill the box's own agent")
async def kill_agent(field: Field) -> Answer:
    return await _survives(field, "38a")


@host_probe("38b", "forge what the box's own agent says to the host")
async def forge(field: Field) -> Answer:
    # As long as a header can say, then nothing; and no known kind.
    return await _survives(field, "38b", frame=struct.pack(">IBI", 0xFFFFFFFF, 0x7E, 1).hex())


@host_probe("38d", "stop the box's own agent (SIGSTOP)")
async def stop_agent(field: Field) -> Answer:
    return await _survives(field, "38d")
