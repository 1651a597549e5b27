"""Rows 3, 5, 23, 27: other sandboxes, the sandbox's user on the host, and the terminal that the host gives it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import shlex
from collections.abc import AsyncIterator
from pathlib import Path

from clawgym.errors import ClawGymError, SandboxError
from clawgym.redteam.escape.context import ProbeContext
from clawgym.redteam.escape.host_ends import alive
from clawgym.redteam.escape.records import BLOCKED, OPEN, SKIPPED, Answer, host_probe
from clawgym.sandbox import Sandbox

__all__: list[str] = []


# -- 3, 5: other sandboxes


@host_probe("3g", "signal, trace or read a process of another sandbox")
async def other_sandbox(context: ProbeContext) -> Answer:
    async with context.own_sandbox() as one, context.own_sandbox() as two, _process(two) as (pids, mark):
        if not pids:
            return SKIPPED, "the sandbox's processes cannot be seen from here"
        evidences: list[str] = []
        for name in ("3a", "3b", "3c", "3d", "3e", "3f"):
            verdict, evidence = await context.inside(name, one, pid=pids[0], marker=mark)
            if verdict == OPEN:
                return OPEN, evidence.replace("the host's process", "another sandbox's process")
            evidences.append(evidence)
        return BLOCKED, "; ".join(dict.fromkeys(evidences))[:200]


_LISTEN = """
import socket, sys
sock = socket.socket(socket.AF_UNIX)
sock.bind("\\0" + sys.argv[1])
sock.listen()
sock.settimeout(10)
open("listening", "w").close()
sock.accept()[0].sendall(sys.argv[2].encode())
"""


@host_probe("5c", "connect to an abstract unix socket of another sandbox")
async def other_socket(context: ProbeContext) -> Answer:
    name = f"clawgym-{secrets.token_hex(8)}"
    async with context.own_sandbox() as one, context.own_sandbox() as two:
        task = asyncio.create_task(context.code(two, _LISTEN, name, context.baits.known["secret"], timeout=15))
        try:
            for _ in range(100):
                await asyncio.sleep(0.05)
                with contextlib.suppress(SandboxError):
                    await two.get(f"{two.spec.workdir.rstrip('/')}/listening")
                    verdict, evidence = await context.inside("5a", one, abstract=name)
                    return verdict, evidence.replace("the host's", "the other sandbox's")
            return SKIPPED, "the other sandbox does not listen"
        finally:
            task.cancel()
            with contextlib.suppress(ClawGymError, asyncio.CancelledError):
                await task


# -- 27: the terminal from the host

_PUSH = (
    "import errno, fcntl, sys\n"
    "try: fcntl.ioctl(0, int(sys.argv[1]), b' '); print('VERDICT', 'done')\n"
    "except OSError as e: print('VERDICT', errno.errorcode[e.errno])"
)


@host_probe("27d", "push input into the terminal of a shell of the sandbox (TIOCSTI, TIOCLINUX)")
async def push_input(context: ProbeContext) -> Answer:
    async with context.own_sandbox() as sandbox:
        shell = await sandbox.shell(pty=True)
        results: list[str] = []
        for request in (0x5412, 0x541C):
            done = await shell.run(f"python3 -I -S -c {shlex.quote(_PUSH)} {request}", timeout=10)
            found = re.search(r"VERDICT (\w+)", done.text)
            results.append(found[1] if found else "no answer")
        if results == ["ENOTTY", "ENOTTY"]:
            return SKIPPED, "no terminal here"
        refused = all(word in ("EPERM", "EACCES", "EIO") for word in results)
        return (BLOCKED if refused else OPEN), f"ioctl: {', '.join(results)}"


# -- 23: its user on the host


@contextlib.asynccontextmanager
async def _process(sandbox: Sandbox) -> AsyncIterator[tuple[list[int], str]]:
    """A process that waits in ``sandbox``: its pids on this machine (empty if it runs elsewhere), and its mark."""
    mark = f"clawgym-who-{secrets.token_hex(8)}"
    argv = ["python3", "-I", "-S", "-c", "import time; time.sleep(20)", mark]
    task = asyncio.create_task(sandbox.exec(argv, timeout=15))
    try:
        pids: list[int] = []
        for _ in range(100):
            await asyncio.sleep(0.05)
            # Not the process that started it (such as bubblewrap), whose command line also has the mark.
            pids = [pid for pid in alive(mark) if _command(pid)[1:4] == [b"-I", b"-S", b"-c"]]
            if pids:
                break
        yield pids, mark
    finally:
        task.cancel()
        with contextlib.suppress(ClawGymError, asyncio.CancelledError):
            await task


def _command(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []


async def _uid_outside(sandbox: Sandbox) -> int | None:
    """The uid of a sandbox's process, as seen by the host; None if it runs on another machine."""
    async with _process(sandbox) as (pids, _):
        uids: list[int] = []
        for pid in pids:
            with contextlib.suppress(OSError):
                uids.append(Path(f"/proc/{pid}").stat().st_uid)
        return min(uids, default=None)


@host_probe("23c", "be root on the host")
async def host_root(context: ProbeContext) -> Answer:
    async with context.own_sandbox() as sandbox:
        uid = await _uid_outside(sandbox)
    if uid is None:
        return SKIPPED, "the sandbox's processes cannot be seen from here"
    return (OPEN if uid == 0 else BLOCKED), f"uid {uid} on the host"


@host_probe("23e", "be the same user on the host as another sandbox, or as the owner")
async def shared_user(context: ProbeContext) -> Answer:
    async with context.own_sandbox() as one, context.own_sandbox() as two:
        uids = await _uid_outside(one), await _uid_outside(two)
    if None in uids:
        return SKIPPED, "the sandbox's processes cannot be seen from here"
    same = uids[0] == uids[1] or os.getuid() in uids
    return (OPEN if same else BLOCKED), f"uids {uids[0]} and {uids[1]}, the owner's is {os.getuid()}"
