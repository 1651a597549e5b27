"""Find out what a backend isolates on this host, by running checks in a real sandbox."""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import sys

from clawgym.errors import SandboxError, SandboxUnavailable
from clawgym.sandbox.protocol import Isolation, Sandbox

__all__ = ["Probed", "by_cgroup", "missing", "probe", "questions"]


class Probed:
    """Mixin of a backend: holds the :class:`Isolation` that its probe found."""

    _isolation: Isolation | None = None

    @property
    def isolation(self) -> Isolation:
        """What :meth:`probe` found. Raises :class:`SandboxError` before that."""
        if self._isolation is None:
            raise SandboxError("not probed yet: await backend.probe() first")
        return self._isolation


# Each line is a check that runs in the sandbox. All of them are harmless where isolation fails.
_QUESTIONS = r"""
import ctypes, errno, json, os, socket, sys
def refused(call):
    try:
        call()
    except OSError as error:
        return True
    return False
def text(path):
    try:
        return open(path).read()
    except OSError:
        return ""
libc = ctypes.CDLL(None, use_errno=True)
sets = ctypes.create_string_buffer(24)  # effective, permitted and inheritable, twice
held = libc.capget(b"\x22\x05\x08\x20\0\0\0\0", sets) or any(sets.raw[:4] + sets.raw[12:16])
bounding = any(libc.prctl(23, n, 0, 0, 0) == 1 for n in range(64))
proc = os.path.exists("/proc/self/status")
links = [l.split(":")[0].strip() for l in text("/proc/net/dev").splitlines()[2:]]
no_internet = refused(lambda: socket.socket().close()) and refused(lambda: socket.socket(10, 2).close())
pids = [p for p in os.listdir("/proc") if p.isdigit()] if proc else []
def create(path):
    open(path, "w").close(); os.unlink(path)
def talk():
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname(), 5).close()
print(json.dumps({
    "network": no_internet or (proc and links in ([], ["lo"])),
    "abstract_sockets": refused(lambda: socket.socket(1).connect("\0" + sys.argv[1])),
    "pid": proc and (text("/proc/1/cmdline").find("import errno") > 0 or len(pids) < 10),
    "no_new_privs": libc.prctl(39, 0, 0, 0, 0) == 1,
    "no_capabilities": not held and not bounding,
    "seccomp": libc.prctl(21, 0, 0, 0, 0) == 2,
    "no_vsock": refused(lambda: socket.socket(40, socket.SOCK_STREAM).close()),
    "no_nested_userns": libc.unshare(0x10000000) != 0,
    "host_settings_readonly": not os.access("/proc/sys/kernel/core_pattern", os.W_OK),
    "private_root": not refused(lambda: create("/usr/bin/.clawgym-probe")),
    "host_files_hidden": not os.listdir("/home") and not os.path.exists("/var/lib/dpkg/info/libc6:amd64.md5sums"),
    "proc": proc,
    "terminals": not refused(lambda: list(map(os.close, os.openpty()))),
    "loopback": not refused(talk),
    "hostname": socket.gethostname() == "box",
}))
"""


async def questions(sandbox: Sandbox) -> dict[str, bool]:
    """Run the checks in ``sandbox``. Returns feature -> whether it holds."""
    name = f"clawgym-probe-{secrets.token_hex(8)}"
    argv = [*sandbox.tool("python3"), "-I", "-S", "-c", _QUESTIONS, name]
    with contextlib.ExitStack() as stack:
        if sys.platform == "linux":
            server = stack.enter_context(socket.socket(socket.AF_UNIX))
            server.bind(f"\0{name}")
            server.listen()
        answer = await sandbox.exec(argv, timeout=20, stdout_only=True)
    try:
        return json.loads(answer.output)
    except ValueError:
        raise SandboxUnavailable(
            f"sandboxes here cannot run python3 ({answer.stderr.decode(errors='replace').strip()[-300:]}): "
            "install python3 in /usr"
        ) from None


def by_cgroup(features: dict[str, bool], controllers: list[str]) -> list[str]:
    """Set ``features`` by the cgroup ``controllers`` in force. Returns a note for each resource without one."""
    instead = {
        "memory": "limited for each process (rlimit), not for the sandbox as a whole",
        "pids": "limited by RLIMIT_NPROC",
        "cpu": "not limited",
    }
    for name in instead:
        features[f"{name}_limit"] = name in controllers
    return [f"{name}: {how}" for name, how in instead.items() if name not in controllers]


def missing(features: dict[str, bool]) -> list[str]:
    """A note for each ``no_...`` feature that does not hold."""
    return [f"not isolated here: {name}" for name, holds in features.items() if not holds and name.startswith("no_")]


async def probe(sandbox: Sandbox, limits: list[str], own_uid: bool) -> Isolation:
    """Probe a sandbox of the namespace backend.

    Args:
        sandbox: a running sandbox.
        limits: the cgroup controllers in force.
        own_uid: whether each sandbox has an outer uid of its own.
    """
    features = await questions(sandbox)
    features["own_outer_uid"] = own_uid
    features["disk_limit"] = True
    notes = by_cgroup(features, limits)
    if not own_uid:
        notes.append("sandboxes share this user's uid outside: run as root for one outer uid a sandbox")
    notes += missing(features)
    return Isolation("namespace", "namespace-root" if own_uid else "namespace-user", features, tuple(notes))
