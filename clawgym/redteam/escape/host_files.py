"""Rows 11, 28: files that others use, and files that a sandbox prepares for the host to read."""

from __future__ import annotations

import asyncio
import contextlib
import os
import posixpath
import secrets
import socket
import tempfile
import time
from collections.abc import Awaitable
from pathlib import Path

from clawgym.errors import SandboxError
from clawgym.records import TaskFile
from clawgym.redteam.escape.context import ProbeContext
from clawgym.redteam.escape.records import BLOCKED, OPEN, SKIPPED, Answer, host_probe
from clawgym.sandbox import Archive, Sandbox
from clawgym.sandbox.linux.listen import sandbox_path_of

__all__ = ["place", "worst"]

_MiB = 2**20
_PORT = 18789


# -- 11: files that others use


async def _written(context: ProbeContext, folders: list[str]) -> Answer:
    """Make a file with a random name; look for it on the host and in another sandbox."""
    name = f".clawgym-{secrets.token_hex(8)}"
    paths = [f"{folder}/{name}" for folder in folders]
    script = 'for f; do ( : > "$f" ) 2>/dev/null && echo "$f"; done; true'
    async with context.own_sandbox() as sandbox:
        try:
            done = await sandbox.exec(["sh", "-c", script, "sh", *paths])
            made = [path for path in paths if path in done.text.splitlines()]
            for path in made:
                if os.path.lexists(path):
                    return OPEN, f"{posixpath.dirname(path)} of the host was written"
            async with context.own_sandbox() as other:
                seen = await other.exec(["sh", "-c", 'for f; do test -e "$f" && echo "$f"; done; true', "sh", *made])
            if seen.text.strip():
                return OPEN, f"another sandbox sees what was written: {posixpath.dirname(seen.text.splitlines()[0])}"
            if made:
                return BLOCKED, f"written in {len(made)} of {len(paths)} folders, into the sandbox's own layer"
            return BLOCKED, "cannot be written"
        finally:
            await sandbox.exec(["rm", "-f", "--", *paths])
            for path in paths:
                with contextlib.suppress(OSError):
                    os.unlink(path)


@host_probe("11a", "write a file to /usr that the host or another sandbox would run")
async def write_usr(context: ProbeContext) -> Answer:
    return await _written(context, ["/usr/bin", "/usr/local/bin", "/usr/lib", "/usr/local/lib"])


@host_probe("11b", "write a file elsewhere that the host or another sandbox would see")
async def write_elsewhere(context: ProbeContext) -> Answer:
    return await _written(
        context, ["", "/etc", "/opt", "/var", "/home", "/srv", "/root", "/tmp", "/var/tmp", "/dev/shm"]
    )


_MOUNTED = "/opt/mounted"
_SPOIL = r"""
import ctypes, os, sys
top = sys.argv[1]
libc = ctypes.CDLL(None)
os.chdir("/")
for flags in (32, 32 | 4096):  # MS_REMOUNT, MS_BIND
    libc.mount(b"none", top.encode(), None, flags, None)
libc.umount2(top.encode(), 2)
def tried(call, *args):
    try:
        call(*args)
    except OSError:
        pass
def through(path):
    fd = os.open(path, os.O_RDONLY)
    for name in (f"/proc/self/fd/{fd}", f"/dev/fd/{fd}"):
        tried(lambda: open(name, "a").write("spoilt"))
    tried(os.fchmod, fd, 0o777)
tried(lambda: open(f"{top}/tool", "a").write("spoilt"))
tried(lambda: open(f"{top}/new", "w").close())
tried(through, f"{top}/tool")
tried(os.link, f"{top}/tool", "/tmp/link")
tried(lambda: open("/tmp/link", "a").write("spoilt"))
tried(os.chmod, f"{top}/tool", 0o777)
tried(os.truncate, f"{top}/tool", 0)
tried(os.rename, f"{top}/tool", f"{top}/old")
tried(os.unlink, f"{top}/tool")
"""


@host_probe("11c", "change a folder of the host's that is mounted into the sandbox")
async def change_mounted(context: ProbeContext) -> Answer:
    with tempfile.TemporaryDirectory() as top:
        os.chmod(top, 0o755)
        tool = Path(top, "tool")
        tool.write_text("as it was")
        tool.chmod(0o666)  # writable by everybody: only the mount protects it
        async with context.own_sandbox(mounts={_MOUNTED: Path(top)}) as sandbox:
            if (await sandbox.exec(["cat", f"{_MOUNTED}/tool"])).output != b"as it was":
                return SKIPPED, "no mounted folders here"
            await context.code(sandbox, _SPOIL, _MOUNTED)
            async with context.own_sandbox(mounts={_MOUNTED: Path(top)}) as other:
                for where in (sandbox, other):
                    seen = await where.exec(["sh", "-c", f"cat {_MOUNTED}/tool; ls {_MOUNTED}"])
                    if seen.text != "as it wastool\n":
                        return OPEN, f"a sandbox sees {seen.text[:60]!r} now"
        if os.listdir(top) != ["tool"] or tool.read_text() != "as it was" or tool.stat().st_mode & 0o777 != 0o666:
            return OPEN, "the folder of the host was changed"
    return BLOCKED, "write, remount, unmount, link, chmod, truncate, rename and unlink are refused"


# -- 28: the host reads prepared files


async def _gives(context: ProbeContext, reading: Awaitable[bytes | Archive], seconds: float = 15) -> Answer:
    """Blocked if the read is refused, or returns nothing of the host's."""
    try:
        found = await asyncio.wait_for(reading, seconds)
    except SandboxError as error:
        return BLOCKED, f"refused: {str(error)[:120]}"
    except TimeoutError:
        return OPEN, f"the host waited {seconds:.0f} s and more"
    data = found.tar if isinstance(found, Archive) else found
    if context.baits.secret in data:
        return OPEN, "the host gave its own secret"
    return BLOCKED, f"{len(data)} bytes, nothing of the host's"


def worst(*answers: Answer) -> Answer:
    """The first open answer, else the first answer."""
    return next((answer for answer in answers if answer[0] == OPEN), answers[0])


def place(sandbox: Sandbox, name: str) -> str:
    """A path in the working folder of ``sandbox``."""
    return f"{sandbox.spec.workdir.rstrip('/')}/{name}"


@host_probe("28a", "leave a link to a file of the host, to be read by the host", bare=True)
async def link(context: ProbeContext) -> Answer:
    async with context.own_sandbox() as sandbox:
        await sandbox.exec(["mkdir", "-p", place(sandbox, "out")])
        await sandbox.exec(["ln", "-s", context.baits.path, place(sandbox, "out/link")])
        one = await _gives(context, sandbox.get(place(sandbox, "out/link")))
        return worst(one, await _gives(context, sandbox.get_archive(place(sandbox, "out"))))


@host_probe("28b", "leave a link in place of a folder", bare=True)
async def link_folder(context: ProbeContext) -> Answer:
    async with context.own_sandbox() as sandbox:
        await sandbox.exec(["ln", "-s", str(context.baits.folder), place(sandbox, "link")])
        one = await _gives(context, sandbox.get(place(sandbox, "link/secret")))
        return worst(one, await _gives(context, sandbox.get_archive(place(sandbox, "link"))))


@host_probe("28c", "leave a FIFO, for the host to wait at", bare=True)
async def fifo(context: ProbeContext) -> Answer:
    async with context.own_sandbox() as sandbox:
        await sandbox.exec(["mkdir", "-p", place(sandbox, "out")])
        await sandbox.exec(["mkfifo", place(sandbox, "out/fifo")])
        try:
            one = await _gives(context, sandbox.get(place(sandbox, "out/fifo")), 5)
            return worst(one, await _gives(context, sandbox.get_archive(place(sandbox, "out"))))
        finally:  # release a reader that waits
            with contextlib.suppress(SandboxError):
                await sandbox.exec(["sh", "-c", 'exec 3<>"$1"', "sh", place(sandbox, "out/fifo")], timeout=5)


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
async def sparse(context: ProbeContext) -> Answer:
    async with context.own_sandbox() as sandbox:
        size = (await context.code(sandbox, _SPARSE)).text.strip()
        if not size.isdigit():
            return SKIPPED, "no sparse file could be made"

        async def over(reading: Awaitable[bytes | Archive]) -> Answer:
            try:
                found = await asyncio.wait_for(reading, 30)
            except SandboxError:
                return BLOCKED, f"{size} MiB could be made; refused over the cap"
            return OPEN, f"{len(found.tar if isinstance(found, Archive) else found)} bytes were taken, over the cap"

        one = await over(sandbox.get(place(sandbox, "out/sparse"), max_bytes=_MiB))
        return worst(one, await over(sandbox.get_archive(place(sandbox, "out"), max_bytes=_MiB)))


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
async def race(context: ProbeContext) -> Answer:
    async with context.own_sandbox() as sandbox:
        running = asyncio.create_task(context.code(sandbox, _RACE, str(context.baits.folder)))
        reads = 0
        try:
            end = time.monotonic() + 3
            while time.monotonic() < end:
                for reading, path in ((sandbox.get, "d/secret"), (sandbox.get_archive, "d")):
                    answer = await _gives(context, reading(place(sandbox, path)))
                    if answer[0] == OPEN:
                        return OPEN, f"{answer[1]}, at read {reads}"
                    reads += 1
        finally:
            await running
        return BLOCKED, f"{reads} reads, the secret never"


@host_probe("28f", "have the host write through a link", bare=True)
async def put_through_link(context: ProbeContext) -> Answer:
    name = f"written-{secrets.token_hex(4)}"
    async with context.own_sandbox() as sandbox:
        await sandbox.exec(["ln", "-s", str(context.baits.folder), place(sandbox, "link")])
        with contextlib.suppress(SandboxError):
            await sandbox.put([TaskFile(name, b"x")], place(sandbox, "link"))
        target = Path(context.baits.folder) / name
        if target.exists():
            target.unlink()
            return OPEN, "the host wrote to its own folder"
        return BLOCKED, "what was put stayed in the sandbox"


@host_probe("28g", "have the host read an endless device, or its own /proc", bare=True)
async def endless(context: ProbeContext) -> Answer:
    async with context.own_sandbox() as sandbox:
        answers: list[Answer] = []
        for path in ("/dev/zero", "/proc/self/environ", "/proc/1/environ"):
            try:
                data = await asyncio.wait_for(sandbox.get(path, max_bytes=4 * _MiB), 20)
            except SandboxError as error:
                answers.append((BLOCKED, f"refused: {str(error)[:120]}"))
                continue
            hosts = path == "/dev/zero" or context.baits.secret in data
            answers.append((OPEN if hosts else BLOCKED, f"{path} gave {len(data)} bytes"))
        return worst(*answers)


_SERVE = """
import socket, sys, time
s = socket.socket(socket.AF_UNIX)
s.bind(sys.argv[1])
s.listen()
try:
    t = socket.create_server(("127.0.0.1", int(sys.argv[2])))
except OSError:
    pass
time.sleep(20)
"""


async def _reaches_a_server(context: ProbeContext) -> bool:
    """Whether connections into a sandbox work at all."""
    async with context.own_sandbox() as sandbox:
        serving = asyncio.ensure_future(context.code(sandbox, _SERVE, sandbox_path_of(_PORT), str(_PORT)))
        try:
            for _ in range(100):
                with contextlib.suppress(SandboxError):
                    (await sandbox.connect(_PORT)).close()
                    return True
                if serving.done():
                    return False
                await asyncio.sleep(0.1)
            return False
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)


@host_probe("28h", "lead a connection of the host's to a socket outside the sandbox")
async def lead_out(context: ProbeContext) -> Answer:
    if not await _reaches_a_server(context):
        return SKIPPED, "no connections into sandboxes here"
    here = sandbox_path_of(_PORT)
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as theirs:
        os.chmod(folder, 0o755)
        path = f"{folder}/socket"
        theirs.bind(path)
        theirs.listen()
        theirs.setblocking(False)
        os.chmod(path, 0o666)
        for aim in (path, "/.." * 20 + path, f"/proc/1/root{path}"):
            async with context.own_sandbox() as sandbox:
                await sandbox.exec(["sh", "-c", f"ln -s {aim} {here} && ln -s {aim} /dev/listen-{_PORT}"])
                try:
                    (await asyncio.wait_for(sandbox.connect(_PORT), 15)).close()
                except SandboxError:
                    pass
                except TimeoutError:
                    return OPEN, "the host waited 15 s and more"
            with contextlib.suppress(BlockingIOError):
                theirs.accept()[0].close()
                return OPEN, f"a link to {aim[-40:]} was followed"
    return BLOCKED, "no link is followed"
