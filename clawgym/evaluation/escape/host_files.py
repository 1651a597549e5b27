"""11, 28, 37: what a box leaves behind for the host to read, and for other boxes."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import posixpath
import secrets
import tarfile
import time
from collections.abc import Awaitable
from pathlib import Path

from clawgym.errors import SandboxError
from clawgym.evaluation.escape.field import Field
from clawgym.evaluation.escape.records import BLOCKED, OPEN, SKIPPED, Answer, host_probe
from clawgym.records import TaskFile
from clawgym.sandbox import Archive, Sandbox

__all__: list[str] = []

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


def _worst(*answers: Answer) -> Answer:
    return next((answer for answer in answers if answer[0] == OPEN), answers[0])


def _place(box: Sandbox, name: str) -> str:
    return f"{box.spec.workdir.rstrip('/')}/{name}"


@host_probe("28a", "leave a link to a file of the host, to be read by the host", bare=True)
async def link(field: Field) -> Answer:
    async with field.own_box() as box:
        await box.exec(["mkdir", "-p", _place(box, "out")])
        await box.exec(["ln", "-s", field.baits.path, _place(box, "out/link")])
        one = await _gives(field, box.get(_place(box, "out/link")))
        return _worst(one, await _gives(field, box.get_archive(_place(box, "out"))))


@host_probe("28b", "leave a link in place of a folder", bare=True)
async def link_folder(field: Field) -> Answer:
    async with field.own_box() as box:
        await box.exec(["ln", "-s", str(field.baits.folder), _place(box, "link")])
        one = await _gives(field, box.get(_place(box, "link/secret")))
        return _worst(one, await _gives(field, box.get_archive(_place(box, "link"))))


@host_probe("28c", "leave a FIFO, for the host to wait at", bare=True)
async def fifo(field: Field) -> Answer:
    async with field.own_box() as box:
        await box.exec(["mkdir", "-p", _place(box, "out")])
        await box.exec(["mkfifo", _place(box, "out/fifo")])
        try:
            one = await _gives(field, box.get(_place(box, "out/fifo")), 5)
            return _worst(one, await _gives(field, box.get_archive(_place(box, "out"))))
        finally:  # lets go of whoever waits
            with contextlib.suppress(SandboxError):
                await box.exec(["sh", "-c", 'exec 3<>"$1"', "sh", _place(box, "out/fifo")], timeout=5)


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

        one = await over(box.get(_place(box, "out/sparse"), max_bytes=_MiB))
        return _worst(one, await over(box.get_archive(_place(box, "out"), max_bytes=_MiB)))


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
                    answer = await _gives(field, reading(_place(box, path)))
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
        await box.exec(["ln", "-s", str(field.baits.folder), _place(box, "link")])
        with contextlib.suppress(SandboxError):
            await box.put([TaskFile(name, b"x")], _place(box, "link"))
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
        return _worst(*answers)


# -- 37: archives

_TREE = r"""
import os, socket, stat, sys
os.makedirs("out/in", exist_ok=True)
os.chdir("out")
def tried(call, *args):
    try:
        call(*args)
    except OSError:
        pass
def file(name, mode=0o644, text="x"):
    with open(name, "w") as f:
        f.write(text)
    os.chmod(name, mode)
file("plain")
tried(os.link, "plain", "in/second-name")
for target in ("/etc/passwd", "/etc/shadow", "/usr/bin/env", sys.argv[1]):
    tried(os.link, target, "hard-" + target.replace("/", "-"))
for n, target in enumerate(("/etc/passwd", "../../../../etc/passwd", "in/../../out", "..", "/", sys.argv[1], "in")):
    tried(os.symlink, target, f"link{n}")
tried(os.symlink, "link3", "chain")
for n, mode in enumerate((0o4755, 0o2755, 0o1777, 0o6777)):
    file(f"setuid{n}")
    tried(os.chmod, f"setuid{n}", mode)
tried(os.chmod, "in", 0o7777)
tried(os.mkfifo, "fifo")
tried(os.mknod, "char", stat.S_IFCHR | 0o666, os.makedev(1, 5))
tried(os.mknod, "block", stat.S_IFBLK | 0o666, os.makedev(254, 0))
s = socket.socket(socket.AF_UNIX)
tried(s.bind, "sock")
for name in ("-rf", "a\nb", "a\\b", "...", "..x", " ", "x" * 200, "C:", "\u202e", "tab\there", "\x1b[2J"):
    tried(file, name)
tried(file, b"\xff\xfe\x80")
"""


def _archive_faults(archive: Archive, secret: bytes) -> list[str]:
    """What in an archive could harm whoever unpacks it."""
    faults = ["the host's secret"] if secret in archive.tar else []
    with tarfile.open(fileobj=io.BytesIO(archive.tar)) as tar:
        for member in tar:
            name = member.name
            if name.startswith("/") or ".." in name.split("/"):
                faults.append(f"the name {name!r}")
            if not (member.isreg() or member.isdir() or member.issym()):
                faults.append(f"{name!r} of type {member.type!r}")
            if member.mode & 0o7000:
                faults.append(f"{name!r} with mode {member.mode:o}")
            if member.issym():
                end = posixpath.normpath(posixpath.join("top", posixpath.dirname(name), member.linkname))
                if member.linkname.startswith("/") or not (end == "top" or end.startswith("top/")):
                    faults.append(f"the link {name!r} to {member.linkname!r}")
    return faults


async def _odd_tree(field: Field, box: Sandbox, stop: bool) -> Answer:
    done = await field.code(box, _TREE, field.baits.path)
    if done.exit_code:
        return SKIPPED, f"the tree could not be made: {done.text.strip()[-150:]}"
    if stop:
        await box.stop()
    archive = await box.get_archive(_place(box, "out"))
    faults = _archive_faults(archive, field.baits.secret)
    if faults:
        return OPEN, f"{len(faults)} in the archive: " + "; ".join(faults[:3])
    with tarfile.open(fileobj=io.BytesIO(archive.tar)) as tar:
        count = len(tar.getnames())
    return BLOCKED, f"{count} entries, all plain; {len(archive.dropped)} dropped"


@host_probe("37a", "links out, hard links, setuid bits, devices and odd names in an archive", bare=True)
async def odd_tree(field: Field) -> Answer:
    async with field.own_box() as box:
        return await _odd_tree(field, box, stop=False)


@host_probe("37b", "the same, taken from a stopped box", bare=True)
async def odd_tree_stopped(field: Field) -> Answer:
    async with field.own_box() as box:
        return await _odd_tree(field, box, stop=True)


_DEEP = """
import os
os.makedirs("out", exist_ok=True)
os.chdir("out")
for _ in range(1500):
    os.mkdir("d")
    os.chdir("d")
"""
_WIDE = """
import os
os.makedirs("wide", exist_ok=True)
for n in range(3000):
    os.close(os.open(f"wide/{n}", os.O_CREAT | os.O_WRONLY))
"""


@host_probe("37c", "a tree too deep to walk, a folder too wide to list", bare=True)
async def deep_and_wide(field: Field) -> Answer:
    async with field.own_box() as box:
        await field.code(box, _DEEP)
        await field.code(box, _WIDE)

        async def bounded(name: str, bound: str, **caps: int) -> Answer:
            try:
                archive = await asyncio.wait_for(box.get_archive(_place(box, name), **caps), 30)
            except SandboxError as error:
                return BLOCKED, f"refused: {str(error)[-100:]}"
            except (TimeoutError, RecursionError, OSError) as error:
                return OPEN, f"the host failed: {type(error).__name__}"
            with tarfile.open(fileobj=io.BytesIO(archive.tar)) as tar:
                count = len(tar.getnames())
            if count >= 1000:
                return OPEN, f"{count} entries were taken, beyond {bound}"
            return BLOCKED, f"{count} entries, the rest dropped"

        return _worst(await bounded("out", "any depth"), await bounded("wide", "the cap of 1000", max_files=1000))


_FAKE_TAR = r"""#!/bin/sh
# a tar of one entry, ../../escaped
exec /usr/bin/python3 -I -S -c '
import io, sys, tarfile
out = tarfile.open(fileobj=sys.stdout.buffer, mode="w|")
for name in ("../../escaped", "/escaped"):
    entry = tarfile.TarInfo(name); entry.size = 1; entry.mode = 0o4777
    out.addfile(entry, io.BytesIO(b"x"))
out.close()'
"""


@host_probe("37d", "replace tar and python3 in the box by ones that write hostile archives")
async def fake_tar(field: Field) -> Answer:
    plant = (
        "import os, sys\n"
        "n = 0\n"
        "for d in ('/usr/local/bin', '/usr/local/sbin', '/root/bin', '/root/.local/bin'):\n"
        "    for name in ('tar', 'python3'):\n"
        "        try:\n"
        "            os.makedirs(d, exist_ok=True)\n"
        "            open(d + '/' + name, 'w').write(sys.argv[1]); os.chmod(d + '/' + name, 0o755); n += 1\n"
        "        except OSError: pass\n"
        "os.makedirs('out', exist_ok=True); open('out/file', 'w').write('x'); print(n)\n"
    )
    async with field.own_box() as box:
        planted = (await field.code(box, plant, _FAKE_TAR)).text.strip()
        archive = await box.get_archive(_place(box, "out"))
        faults = _archive_faults(archive, field.baits.secret)
        if faults:
            return OPEN, "; ".join(faults[:3])
        return BLOCKED, f"{planted} programs planted, the archive is honest"
