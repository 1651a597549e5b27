"""Row 37: archives of a sandbox's files that could harm whoever unpacks them."""

from __future__ import annotations

import asyncio
import posixpath

from clawgym.errors import SandboxError
from clawgym.redteam.escape.context import ProbeContext
from clawgym.redteam.escape.host_files import place, worst
from clawgym.redteam.escape.records import BLOCKED, OPEN, SKIPPED, Answer, host_probe
from clawgym.sandbox import Archive, Sandbox
from clawgym.tars import open_tar

__all__: list[str] = []

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
    """Entries of an archive that could harm whoever unpacks it."""
    faults = ["the host's secret"] if secret in archive.tar else []
    with open_tar(archive.tar) as tar:
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


async def _odd_tree(context: ProbeContext, sandbox: Sandbox, stop: bool) -> Answer:
    done = await context.code(sandbox, _TREE, context.baits.path)
    if done.exit_code:
        return SKIPPED, f"the tree could not be made: {done.text.strip()[-150:]}"
    if stop:
        await sandbox.stop()
    archive = await sandbox.get_archive(place(sandbox, "out"))
    faults = _archive_faults(archive, context.baits.secret)
    if faults:
        return OPEN, f"{len(faults)} in the archive: " + "; ".join(faults[:3])
    with open_tar(archive.tar) as tar:
        count = len(tar.getnames())
    return BLOCKED, f"{count} entries, all plain; {len(archive.dropped)} dropped"


@host_probe("37a", "links out, hard links, setuid bits, devices and odd names in an archive", bare=True)
async def odd_tree(context: ProbeContext) -> Answer:
    async with context.own_sandbox() as sandbox:
        return await _odd_tree(context, sandbox, stop=False)


@host_probe("37b", "the same, taken from a stopped sandbox", bare=True)
async def odd_tree_stopped(context: ProbeContext) -> Answer:
    async with context.own_sandbox() as sandbox:
        return await _odd_tree(context, sandbox, stop=True)


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
async def deep_and_wide(context: ProbeContext) -> Answer:
    async with context.own_sandbox() as sandbox:
        await context.code(sandbox, _DEEP)
        await context.code(sandbox, _WIDE)

        async def bounded(name: str, bound: str, **caps: int) -> Answer:
            try:
                archive = await asyncio.wait_for(sandbox.get_archive(place(sandbox, name), **caps), 30)
            except SandboxError as error:
                return BLOCKED, f"refused: {str(error)[-100:]}"
            except (TimeoutError, RecursionError, OSError) as error:
                return OPEN, f"the host failed: {type(error).__name__}"
            with open_tar(archive.tar) as tar:
                count = len(tar.getnames())
            if count >= 1000:
                return OPEN, f"{count} entries were taken, beyond {bound}"
            return BLOCKED, f"{count} entries, the rest dropped"

        return worst(await bounded("out", "any depth"), await bounded("wide", "the cap of 1000", max_files=1000))


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


@host_probe("37d", "replace tar and python3 in the sandbox by ones that write hostile archives")
async def fake_tar(context: ProbeContext) -> Answer:
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
    async with context.own_sandbox() as sandbox:
        planted = (await context.code(sandbox, plant, _FAKE_TAR)).text.strip()
        archive = await sandbox.get_archive(place(sandbox, "out"))
        faults = _archive_faults(archive, context.baits.secret)
        if faults:
            return OPEN, "; ".join(faults[:3])
        return BLOCKED, f"{planted} programs planted, the archive is honest"
