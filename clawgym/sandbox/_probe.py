"""Finds out, in a real box, what is isolated here; run once for each backend and host."""

from __future__ import annotations

import json

from clawgym.sandbox.protocol import Isolation, Sandbox

__all__ = ["probe", "questions"]

# Every line is a question that the box itself answers; each is harmless where isolation fails.
_QUESTIONS = r"""
import ctypes, errno, json, os, socket
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
status = dict(l.split(":\t", 1) for l in text("/proc/self/status").splitlines() if ":\t" in l)
links = [l.split(":")[0].strip() for l in text("/proc/net/dev").splitlines()[2:]]
libc = ctypes.CDLL(None, use_errno=True)
pids = [p for p in os.listdir("/proc") if p.isdigit()]
def create(path):
    open(path, "w").close(); os.unlink(path)
print(json.dumps({
    "network": links in ([], ["lo"]),
    "pid": text("/proc/1/cmdline").find("import errno") > 0 or len(pids) < 10,
    "no_new_privs": status.get("NoNewPrivs", "").strip() == "1",
    "no_capabilities": int(status.get("CapEff", "1"), 16) == 0 and int(status.get("CapBnd", "1"), 16) == 0,
    "seccomp": status.get("Seccomp", "").strip() == "2",
    "no_vsock": refused(lambda: socket.socket(40, socket.SOCK_STREAM).close()),
    "no_nested_userns": libc.unshare(0x10000000) != 0,
    "host_settings_readonly": not os.access("/proc/sys/kernel/core_pattern", os.W_OK),
    "private_root": not refused(lambda: create("/usr/bin/.clawgym-probe")),
    "host_files_hidden": not os.listdir("/home") and not os.path.exists("/var/lib/dpkg/info/libc6:amd64.md5sums"),
}))
"""


async def questions(box: Sandbox) -> dict[str, bool]:
    """Ask the questions in ``box``: feature -> holds."""
    answer = await box.exec([*box.tool("python3"), "-I", "-S", "-c", _QUESTIONS], timeout=20, stdout_only=True)
    return json.loads(answer.output)


async def probe(box: Sandbox, limits: list[str], own_uid: bool) -> Isolation:
    """A namespace box. ``limits`` are the cgroup controllers in force."""
    features = await questions(box)
    features["own_outer_uid"] = own_uid
    for name, controller in (("memory_limit", "memory"), ("pids_limit", "pids"), ("cpu_limit", "cpu")):
        features[name] = controller in limits
    features["disk_limit"] = True
    notes: list[str] = []
    if not features["memory_limit"]:
        notes.append("memory: limited for each process (rlimit), not for the box as a whole")
    if not features["pids_limit"]:
        notes.append("pids: limited by RLIMIT_NPROC")
    if not features["cpu_limit"]:
        notes.append("cpu: not limited")
    if not own_uid:
        notes.append("boxes share this user's uid outside: run as root for one outer uid a box")
    notes += [f"not isolated here: {name}" for name, holds in features.items() if not holds and name.startswith("no_")]
    return Isolation("namespace", "namespace-root" if own_uid else "namespace-user", features, tuple(notes))
