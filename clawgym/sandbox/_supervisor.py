"""The helper process beside every owner: starts boxes, kills them, and outlives the owner just long enough to clean up.

It holds one end of a socket pair. Requests come over it; its end means that the owner is gone (closed,
crashed, SIGKILL), and then every lease is killed and removed. Boxes are forked here and not in the owner,
which may have threads, gigabytes of memory or an accelerator's driver. Standard library only.

A box starts in two steps. The child forked here joins its cgroups, gets a private mount namespace with a
size-limited tmpfs for everything the box will write (as root: with the lower folders bound there,
ownership mapped to the box's outer uid), gives up root, and only then becomes bubblewrap, which builds the rest.
"""

from __future__ import annotations

import errno
import os
import resource
import select
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from clawgym.sandbox import _linux, leases
from clawgym.sandbox._cgroups import Cgroups
from clawgym.sandbox._messages import receive, send

_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # the end of the owner's socket is the only end


def _become_box(
    plan: dict[str, Any], uid: int | None, userns: int | None, procs: list[str], fds: list[int], join: int | None
) -> None:
    """In the forked child: everything up to exec. Raises OSError; never returns otherwise."""
    control, errors, report, seccomp = fds
    os.setsid()
    for number in _IGNORED:
        signal.signal(number, signal.SIG_DFL)
    for path in procs:
        with open(path, "w") as file:
            file.write("0")
    if join is not None:
        network = os.open(f"/proc/{join}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        _linux.setns(network, _linux.CLONE_NEWNET)
    layer = plan["mountpoint"]
    size = f"size={plan['layer_bytes']},nr_inodes={plan['layer_inodes']},mode=755"
    flags = _linux.MS_NOSUID | _linux.MS_NODEV
    if uid is not None:
        _linux.unshare(_linux.CLONE_NEWNS)
        _linux.make_mounts_private()
        _linux.mount("tmpfs", layer, "tmpfs", flags, f"{size},uid={uid},gid={uid}")
        for name, source in plan["lowers"].items():
            os.makedirs(f"{layer}/{name}")
            _linux.bind_idmapped(source, f"{layer}/{name}", userns)
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        # Without this /proc/self belongs to root, and bubblewrap cannot write its uid map.
        _linux.prctl(_linux.PR_SET_DUMPABLE, 1)
    else:
        me, group = os.getuid(), os.getgid()
        _linux.unshare(_linux.CLONE_NEWUSER | _linux.CLONE_NEWNS)
        for name, text in (("setgroups", "deny"), ("uid_map", f"{me} {me} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
        _linux.make_mounts_private()
        _linux.mount("tmpfs", layer, "tmpfs", flags, size)
    for name in plan["mkdirs"]:
        os.makedirs(f"{layer}/{name}", exist_ok=True)
    layer_fd = os.open(layer, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    with socket.socket(fileno=os.dup(report)) as answer:
        send(answer, {"ok": True}, [layer_fd])
        # The owner now puts read-only files into the layer, and says go.
        if answer.recv(16) != b"go":
            os._exit(1)
    for name, value in plan["rlimits"].items():
        resource.setrlimit(getattr(resource, name), (value, value))
    for target, source in ((0, control), (1, control), (2, errors)):
        os.dup2(source, target)
    argv = [a.replace("{layer}", layer).replace("{seccomp}", str(seccomp)) for a in plan["argv"]]
    _linux.close_on_exec_from(3)
    os.set_inheritable(seccomp, True)
    os.execve(argv[0], argv, {"PATH": "/usr/bin:/bin"})


class Supervisor:
    """Serves one owner until its socket ends."""

    def __init__(self, sock: socket.socket, state: Path, owner: str) -> None:
        self.sock = sock
        self.state = state
        self.owner = owner
        self.folder = leases.OwnerFolder(state, owner)
        leases.reap(state)
        self.cgroups = Cgroups(owner)
        self.folder.add_cgroups(self.cgroups)
        self.cgroups.try_out()
        self.uids = leases.UidBlock(state) if os.geteuid() == 0 else None
        self.running: dict[str, tuple[int | None, int | None]] = {}
        """Lease -> (pid of bubblewrap, None once reaped; outer uid)."""
        self.maps: dict[int, int] = {}
        """Outer uid -> user namespace that maps root to it, for the lower folders."""
        self.dying: dict[str, list[int]] = {}
        """Lease -> requests to answer once it is gone."""
        self.freezing: dict[str, int] = {}

    def serve(self) -> None:
        send(self.sock, {"ready": True, "limits": self.cgroups.limits, "freeze": "kill" in self.cgroups.roots})
        poller = select.poll()
        poller.register(self.sock, select.POLLIN)
        while True:
            busy = bool(self.dying or self.freezing)
            if poller.poll(2 if busy else 1000):
                try:
                    message, fds = receive(self.sock)
                except OSError:
                    message, fds = None, []
                if message is None:
                    return
                try:
                    self.handle(message, fds)
                except OSError as error:
                    self.answer(message["request"], error=f"{error.strerror} ({error.filename})")
                finally:
                    for fd in fds:
                        os.close(fd)
            self.reap_children()
            self.advance()

    def answer(self, request: int, **fields: Any) -> None:
        try:
            send(self.sock, {"request": request, **fields})
        except OSError:
            pass  # the owner is gone; the next receive says so

    def handle(self, message: dict[str, Any], fds: list[int]) -> None:
        op, lease, request = message["op"], message.get("lease", ""), message["request"]
        if op == "spawn":
            self.spawn(lease, message["plan"], fds)
            self.answer(request)
        elif op == "kill":
            self.kill(lease)
            self.dying.setdefault(lease, []).append(request)
        elif op == "freeze":
            frozen = message["frozen"]
            if not self.cgroups.freeze(lease, frozen):
                for pid in self.members(lease):
                    os.kill(pid, signal.SIGSTOP if frozen else signal.SIGCONT)
                self.answer(request)
            elif frozen:
                self.freezing[lease] = request
            else:
                self.answer(request)
        elif op == "docker":
            self.folder.add_docker(message["engine"])
            self.answer(request)

    def spawn(self, lease: str, plan: dict[str, Any], fds: list[int]) -> None:
        limits = plan["limits"]
        others = self.members(plan["join"]) if plan.get("join") else []
        if plan.get("join") and not others:
            raise OSError(errno.ESRCH, "the box to join has ended", plan["join"])
        procs = self.cgroups.create(lease, memory=limits["memory"], pids=limits["pids"], cpus=limits["cpus"])
        uid = self.uids.take() if self.uids else None
        self.running[lease] = (None, uid)
        if uid is not None and uid not in self.maps:  # kept: uids come back, and a map is a process of its own to make
            self.maps[uid] = _linux.userns_mapping_root_to(uid)
        userns = self.maps[uid] if uid is not None else None
        join = others[0] if others else None
        pid = os.fork()
        if pid == 0:
            try:
                self.sock.close()
                _become_box(plan, uid, userns, procs, fds, join)
            except BaseException as error:
                name = getattr(error, "filename", None) or ""
                text = f"{getattr(error, 'strerror', None) or error} {name}".strip()
                try:
                    with socket.socket(fileno=os.dup(fds[2])) as report:
                        send(report, {"ok": False, "error": text})
                except OSError:
                    pass
            finally:
                os._exit(1)
        self.running[lease] = (pid, uid)

    def members(self, lease: str) -> list[int]:
        """Every process of a box, bubblewrap last."""
        first = self.running.get(lease, (None, None))[0]
        if first is None:
            return []
        found, new = [first], [first]
        while new:
            pid = new.pop()
            try:
                children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            except OSError:
                continue
            new += [int(c) for c in children]
            found += [int(c) for c in children]
        return found[::-1]

    def kill(self, lease: str) -> None:
        self.cgroups.freeze(lease, False)
        self.cgroups.kill(lease)
        for pid in self.members(lease):
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass

    def reap_children(self) -> bool:
        """Whether some child still runs."""
        while True:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            for lease, (running, uid) in list(self.running.items()):
                if running == pid:
                    # What is left inside dies with its process 1; the lease stays until its owner asks for it.
                    self.running[lease] = (None, uid)

    def advance(self) -> None:
        for lease, requests in list(self.dying.items()):
            if self.running.get(lease, (None, None))[0] is not None or self.cgroups.pids(lease):
                self.kill(lease)
                continue
            events = self.cgroups.events(lease)
            if self.cgroups.remove(lease):
                _, uid = self.running.pop(lease, (None, None))
                if uid is not None and self.uids is not None:
                    self.uids.give_back(uid)
                del self.dying[lease]
                for request in requests:
                    self.answer(request, **events)
        for lease, request in list(self.freezing.items()):
            if self.cgroups.is_frozen(lease) or not self.cgroups.pids(lease):
                del self.freezing[lease]
                self.answer(request)

    def clear(self) -> None:
        """Kill and remove everything; called when the owner has gone."""
        for lease in self.running:
            self.kill(lease)
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline and self.reap_children():
            for lease in self.running:
                self.kill(lease)
            time.sleep(0.002)
        leases.clear(self.state, self.owner, self.cgroups)


def main(fd: int, state: str, owner: str) -> None:
    """Entry of the process; ``fd`` is its end of the socket pair."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    os.setsid()
    # What a dying bubblewrap leaves comes here to be reaped: the host's process 1 may be one that reaps nothing.
    _linux.prctl(_linux.PR_SET_CHILD_SUBREAPER, 1)
    supervisor = Supervisor(socket.socket(fileno=fd), Path(state), owner)
    try:
        supervisor.serve()
    finally:
        supervisor.clear()
    sys.exit(0)
