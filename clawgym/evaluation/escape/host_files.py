"""11, 28: files that others use, and what a box leaves behind for the host to read."""

from __future__ import annotations

import asyncio
import contextlib
import os
import posixpath
import secrets
import time
from collections.abc import Awaitable
from pathlib import Path

from clawgym.errors import SandboxError
from clawgym.evaluation.escape.field import Field
from clawgym.evaluation.escape.records import BLOCKED, OPEN, SKIPPED, Answer, host_probe
from clawgym.records import TaskFile
from clawgym.sandbox import Archive, Sandbox

__all__ = ["place", "worst"]

_MiB = 2**20


# -- 11: files that others use


async def _written(field: Field, folders: list[str]) -> Answer:
    """Make a file of a name that nobody has; look for it on the host and in another box."""
    name = f".clawgym-{secrets.token_hex(8)}"
    paths = [f"{folder}/{name}" for folder in folders]
    script = 'for f; do ( : > "$f" ) 2>/dev/null && echo "$f"; done; true'
    async with field.own_box() as box:
        try:
            done = await box.exec(["sh", "-c", script, "sh", *paths])
            made = [path for path in paths if path in done.text.splitlines()]
            for path in made:
                if os.path.lexists(path):
                    return OPEN, f"{posixpath.dirname(path)} of the host was written"
            async with field.own_box() as other:
                seen = await other.exec(["sh", "-c", 'for f; do test -e "$f" && echo "$f"; done; true', "sh", *made])
            if seen.text.strip():
                return OPEN, f"another box sees what was written: {posixpath.dirname(seen.text.splitlines()[0])}"
            if made:
                return BLOCKED, f"written in {len(made)} of {len(paths)} folders, into the box's own layer"
            return BLOCKED, "cannot be written"
        finally:
            await box.exec(["rm", "-f", "--", *paths])
            for path in paths:
                with contextlib.suppress(OSError):
                    os.unlink(path)


@host_probe("11a", "write a file to /usr that the host or another box would run")
async def write_usr(field: Field) -> Answer:
    return await _written(field, ["/usr/bin", "/usr/local/bin", "/usr/lib", "/usr/local/lib"])


@host_probe("11b", "write a file elsewhere that the host or another box would see")
async def write_elsewhere(field: Field) -> Answer:
    return await _written(field, ["", "/etc", "/opt", "/var", "/home", "/srv", "/root", "/tmp", "/var/tmp", "/dev/shm"])


# -- 28: reading what was left


async def _gives(field: Field, reading: Awaitable[bytes | Archive], seconds: float = 15) -> Answer:
    """Whether a read that must be refused, or at least give nothing of the host's, is."""
    try:
        found = await asyncio.wait_for(reading, seconds)
    except SandboxError as error:
        return BLOCKED, f"refused: {str(error)[:120]}"
    except TimeoutError:
        return OPEN, f"the host waited {seconds:.0f} s and more"
    data = found.tar if isinstance(found, Archive) else found
    if field.baits.secret in data:
        return OPEN, "the host gave its own secret"
    return BLOCKED, f"{len(data)} bytes, nothing of the host's"


def worst(*answers: Answer) -> Answer:
    """The first that is open, else the first."""
    return next((answer for answer in answers if answer[0] == OPEN), answers[0])


def place(box: Sandbox, name: str) -> str:
    """A path in the working folder of ``box``."""
    return f"{box.spec.workdir.rstrip('/')}/{name}"


@host_probe("28a", "leave a link to a file of the host, to be read by the host", bare=True)
async def link(field: Field) -> Answer:
    async with field.own_box() as box:
        await box.exec(["mkdir", "-p", place(box, "out")])
        await box.exec(["ln", "-s", field.baits.path, place(box, "out/link")])
        one = await _gives(field, box.get(place(box, "out/link")))
        return worst(one, await _gives(field, box.get_archive(place(box, "out"))))


@host_probe("28b", "leave a link in place of a folder", bare=True)
async def link_folder(field: Field) -> Answer:
    async with field.own_box() as box:
        await box.exec(["ln", "-s", str(field.baits.folder), place(box, "link")])
        one = await _gives(field, box.get(place(box, "link/secret")))
        return worst(one, await _gives(field, box.get_archive(place(box, "link"))))


@host_probe("28c", "leave a FIFO, for the host to wait at", bare=True)
async def fifo(field: Field) -> Answer:
    async with field.own_box() as box:
        await box.exec(["mkdir", "-p", place(box, "out")])
        await box.exec(["mkfifo", place(box, "out/fifo")])
        try:
            one = await _gives(field, box.get(place(box, "out/fifo")), 5)
            return worst(one, await _gives(field, box.get_archive(place(box, "out"))))
        finally:  # lets go of whoever waits
            with contextlib.suppress(SandboxError):
                await box.exec(["sh", "-c", 'exec 3<>"$1"', "sh", place(box, "out/fifo")], timeout=5)


_SPARSE = """
import os, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
os.makedirs("out", exist_ok=True)
fd = os.open("out/sparse", os.O_RDWR | os.O_CREAT)
for size in (1 << 40, 200 << 20, 32 << 20):
    try:
        os.ftruncate(fd, size)
        print(size >> 20)
        break
    except OSError:
        pass
"""


@host_probe("28d", "leave a sparse file of a terabyte (or as large as it may be)", bare=True)
async def sparse(field: Field) -> Answer:
    async with field.own_box() as box:
        size = (await field.code(box, _SPARSE)).text.strip()
        if not size.isdigit():
            return SKIPPED, "no sparse file could be made"

        async def over(reading: Awaitable[bytes | Archive]) -> Answer:
            try:
                found = await asyncio.wait_for(reading, 30)
            except SandboxError:
                return BLOCKED, f"{size} MiB could be made; refused over the cap"
            return OPEN, f"{len(found.tar if isinstance(found, Archive) else found)} bytes were taken, over the cap"

        one = await over(box.get(place(box, "out/sparse"), max_bytes=_MiB))
        return worst(one, await over(box.get_archive(place(box, "out"), max_bytes=_MiB)))


_RACE = """
import os, sys, time
os.makedirs("d", exist_ok=True)
open("d/secret", "w").write("decoy")
os.symlink(sys.argv[1], "l")
end = time.monotonic() + 4
while time.monotonic() < end:
    os.rename("d", "x"); os.rename("l", "d")
    os.rename("d", "l"); os.rename("x", "d")
"""


@host_probe("28e", "swap a folder for a link while the host reads through it", bare=True)
async def race(field: Field) -> Answer:
    async with field.own_box() as box:
        running = asyncio.create_task(field.code(box, _RACE, str(field.baits.folder)))
        reads = 0
        try:
            end = time.monotonic() + 3
            while time.monotonic() < end:
                for reading, path in ((box.get, "d/secret"), (box.get_archive, "d")):
                    answer = await _gives(field, reading(place(box, path)))
                    if answer[0] == OPEN:
                        return OPEN, f"{answer[1]}, at read {reads}"
                    reads += 1
        finally:
            await running
        return BLOCKED, f"{reads} reads, the secret never"


@host_probe("28f", "have the host write through a link", bare=True)
async def put_through_link(field: Field) -> Answer:
    name = f"written-{secrets.token_hex(4)}"
    async with field.own_box() as box:
        await box.exec(["ln", "-s", str(field.baits.folder), place(box, "link")])
        with contextlib.suppress(SandboxError):
            await box.put([TaskFile(name, b"x")], place(box, "link"))
        target = Path(field.baits.folder) / name
        if target.exists():
            target.unlink()
            return OPEN, "the host wrote to its own folder"
        return BLOCKED, "what was put stayed in the box"


@host_probe("28g", "have the host read an endless device, or its own /proc", bare=True)
async def endless(field: Field) -> Answer:
    async with field.own_box() as box:
        answers: list[Answer] = []
        for path in ("/dev/zero", "/proc/self/environ", "/proc/1/environ"):
            try:
                data = await asyncio.wait_for(box.get(path, max_bytes=4 * _MiB), 20)
            except SandboxError as error:
                answers.append((BLOCKED, f"refused: {str(error)[:120]}"))
                continue
            hosts = path == "/dev/zero" or field.baits.secret in data
            answers.append((OPEN if hosts else BLOCKED, f"{path} gave {len(data)} bytes"))
        return worst(*answers)
