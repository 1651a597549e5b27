"""The helper process of every owner: starts sandboxes, kills them, and cleans up after the owner's end.

It holds one end of a socket pair, over which requests arrive. When the other end closes, the owner is gone (closed,
crashed, SIGKILL), and every lease is killed and removed. Sandboxes are forked here and not in the owner, which may have
threads, gigabytes of memory or an accelerator's driver. Standard library only.

A sandbox is cloned from a zygote (``zygote.py``), a child of this process, and becomes a child of this process too.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import socket
import struct
import sys
import time
from pathlib import Path
from typing import Any

from clawgym.sandbox import leases
from clawgym.sandbox.chroot import jail
from clawgym.sandbox.linux import syscalls
from clawgym.sandbox.linux.cgroups import Cgroups
from clawgym.sandbox.linux.messages import receive, send
from clawgym.sandbox.linux.zygote import FLAGS

_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # it ends only with the owner's socket
_AGAIN = 0.02  # seconds until a lease with processes left is killed again


class _Running:
    """A sandbox that has not been cleared yet."""

    def __init__(self, uid: int | None, born: int) -> None:
        self.uid = uid
        self.born: int | None = born
        """Pipe from which the pid of process 1 is read; None once that is done."""
        self.first: int | None = None
        """Process 1; None until its pid is known, and after its end."""
        self.guard: int | None = None
        """The second uid of a chroot sandbox. Its processes outlive process 1 and are found by uid."""
        self.sweeper: int | None = None
        """Pid of the process that kills them."""
        self.swept = False


class Supervisor:
    """Serves one owner until its socket closes."""

    def __init__(self, sock: socket.socket, state: Path, owner: str, zygotes: list[socket.socket]) -> None:
        self.zygotes = zygotes
        """The one for most sandboxes; and, if there is one, that with a preloaded interpreter (``plan["warm"]``)."""
        self.sock = sock
        self.state = state
        self.owner = owner
        self.folder = leases.OwnerFolder(state, owner)
        leases.reap(state)
        self.cgroups = Cgroups(owner)
        self.folder.add_cgroups(self.cgroups)
        self.cgroups.try_out()
        if "kill" in self.cgroups.roots:
            fd = os.open(self.cgroups.roots["kill"] / "cgroup.kill", os.O_WRONLY)
            for zygote in self.zygotes:
                socket.send_fds(zygote, [FLAGS.pack(0)], [fd])
            os.close(fd)
        self.uids = leases.UidBlock(state) if os.geteuid() == 0 else None
        if self.uids is not None:
            self.folder.add_uids(self.uids)
        self.running: dict[str, _Running] = {}
        self.maps: dict[int, int] = {}
        """Outer uid -> user namespace that maps root to it, for the lower folders; kept, as uids are reused."""
        self.dying: dict[str, list[int]] = {}
        """Lease -> ids of the requests to answer once it is gone."""
        self.killed: dict[str, float] = {}
        """When each of them was killed last."""
        self.freezing: dict[str, int] = {}
        self.births: dict[int, str] = {}
        """Descriptor -> the lease whose process 1 writes its pid to it."""
        self.unclaimed: set[int] = set()
        """Pids of children that ended before their birth was noted."""
        self.poller = select.poll()
        self._wake, wake = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(wake, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)

    def serve(self) -> None:
        send(self.sock, {"ready": True, "limits": self.cgroups.limits, "freeze": "kill" in self.cgroups.roots})
        self.poller.register(self.sock, select.POLLIN)
        self.poller.register(self._wake, select.POLLIN)
        while True:
            busy = bool(self.dying or self.freezing)
            ready = [fd for fd, _ in self.poller.poll(5 if busy else 1000)]
            for fd in ready:
                if fd in self.births:
                    self.note_birth(fd)
            if self._wake in ready:
                os.read(self._wake, 4096)
            if self.sock.fileno() in ready:
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
            pass  # the owner is gone; the next receive notices it

    def handle(self, message: dict[str, Any], fds: list[int]) -> None:
        op, lease, request = message["op"], message.get("lease", ""), message["request"]
        if op == "spawn":
            self.spawn(lease, message["plan"], fds)
            self.answer(request)
        elif op == "kill":
            self.kill(lease)
            self.dying.setdefault(lease, []).append(request)
            self.killed[lease] = time.monotonic()
        elif op == "freeze":
            frozen = message["frozen"]
            if not self.cgroups.freeze(lease, frozen):
                self.stop(lease, signal.SIGSTOP if frozen else signal.SIGCONT)
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
        named: dict[str, int] = {"born": -1, **dict(zip(("control", "errors", "blob"), fds, strict=False))}
        ours: list[int] = []
        try:
            if plan.get("join"):
                other = self.running.get(plan["join"])
                if other is None or other.first is None:
                    raise OSError(errno.ESRCH, "the sandbox to join has ended", plan["join"])
                named["network"] = os.open(f"/proc/{other.first}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
                ours.append(named["network"])
            procs = self.cgroups.create(lease, memory=limits["memory"], pids=limits["pids"], cpus=limits["cpus"])
            uid = self.uids.take() if self.uids else None
            born, named["born"] = os.pipe()
            ours.append(named["born"])
            os.set_blocking(born, False)
            self.running[lease] = _Running(uid, born)
            self.births[born] = lease
            self.poller.register(born, select.POLLIN)
            plan |= {"uid": uid, "procs": procs}
            flags = syscalls.CLONE_NEWPID
            if plan["kind"] == "chroot":
                flags = 0
                if uid is None:
                    raise OSError(errno.EPERM, "a chroot sandbox needs root", "setuid")
                plan["guard"] = self.running[lease].guard = uid + leases.GUARDS
            elif uid is not None:
                if uid not in self.maps:
                    self.maps[uid] = syscalls.userns_mapping_root_to(uid)
                named["userns"] = self.maps[uid]
            else:
                flags |= syscalls.CLONE_NEWUSER
                plan["me"] = os.getuid(), os.getgid()
            send(
                self.zygotes[bool(plan.get("warm"))],
                {**plan, "fds": list(named)},
                list(named.values()),
                FLAGS.pack(flags),
            )
        finally:
            for fd in ours:
                os.close(fd)

    def note_birth(self, fd: int) -> None:
        """Read the pid of process 1, or that it was never started."""
        try:
            data = os.read(fd, 4)
        except BlockingIOError:
            return
        self.poller.unregister(fd)
        os.close(fd)
        sandbox = self.running.get(self.births.pop(fd))
        if sandbox is None:
            return
        sandbox.born = None
        if len(data) == 4:
            pid = struct.unpack("i", data)[0]
            if pid in self.unclaimed:
                self.unclaimed.discard(pid)
            else:
                sandbox.first = pid

    def stop(self, lease: str, number: int) -> None:
        """Send SIGSTOP or SIGCONT to everything in a sandbox without a cgroup that can freeze."""
        sandbox = self.running.get(lease)
        if sandbox is not None and sandbox.uid is not None and sandbox.guard is not None:
            jail.signal_sandbox(sandbox.uid, sandbox.guard, number)
            return
        for pid in self.members(lease):
            try:
                os.kill(pid, number)
            except OSError:
                pass

    def members(self, lease: str) -> list[int]:
        """Every process of a sandbox, process 1 last."""
        sandbox = self.running.get(lease)
        new = [sandbox.first] if sandbox is not None and sandbox.first is not None else []
        found = list(new)
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
        """Kill a sandbox: with process 1 everything in it ends; in a chroot sandbox the sweeper kills the rest."""
        self.cgroups.freeze(lease, False)
        self.cgroups.kill(lease)
        sandbox = self.running.get(lease)
        if sandbox is None:
            return
        if sandbox.born is not None:
            self.note_birth(sandbox.born)  # process 1 may exist already
        if sandbox.first is not None:
            try:
                os.kill(sandbox.first, signal.SIGKILL)
            except OSError:
                pass
        if (
            sandbox.uid is not None
            and sandbox.guard is not None
            and sandbox.born is None
            and sandbox.sweeper is None
            and not sandbox.swept
        ):
            sandbox.sweeper = jail.sweep(sandbox.uid, sandbox.guard)

    def reap_children(self) -> bool:
        """Collect ended children. Returns whether one still runs."""
        while True:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            known = False
            for sandbox in self.running.values():
                if sandbox.first == pid:
                    known, sandbox.first = True, None
                elif sandbox.sweeper == pid:
                    known, sandbox.sweeper, sandbox.swept = True, None, True
            if not known and self.births:
                self.unclaimed.add(pid)

    def ended(self, lease: str) -> bool:
        """Whether no process is left. The lease itself stays until its owner asks to remove it."""
        sandbox = self.running.get(lease)
        alive = sandbox is not None and (
            (sandbox.first, sandbox.born) != (None, None) or (sandbox.guard is not None and not sandbox.swept)
        )
        return not alive and not self.cgroups.pids(lease)

    def advance(self) -> None:
        now = time.monotonic()
        for lease, requests in list(self.dying.items()):
            if not self.ended(lease):
                if now - self.killed[lease] > _AGAIN:  # a process may have entered the sandbox since
                    self.kill(lease)
                    self.killed[lease] = now
                continue
            events = self.cgroups.events(lease)
            if self.cgroups.remove(lease):
                sandbox = self.running.pop(lease, None)
                if sandbox is not None and sandbox.uid is not None and self.uids is not None:
                    self.uids.give_back(sandbox.uid)
                del self.dying[lease], self.killed[lease]
                for request in requests:
                    self.answer(request, **events)
        for lease, request in list(self.freezing.items()):
            if self.cgroups.is_frozen(lease) or not self.cgroups.pids(lease):
                del self.freezing[lease]
                self.answer(request)

    def clear(self) -> None:
        """Kill and remove everything; called when the owner has gone."""
        for zygote in self.zygotes:
            zygote.close()  # it ends
        for lease in self.running:
            self.kill(lease)
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline and self.reap_children():
            for lease in self.running:
                self.kill(lease)
            time.sleep(0.002)
        leases.clear(self.state, self.owner, self.cgroups)


def main(fd: int, state: str, owner: str, zygotes: list[tuple[int, int]]) -> None:
    """Run the supervisor.

    ``fd`` is its end of the socket pair, ``zygotes`` are results of :func:`clawgym.sandbox.linux.zygote.fork`. The
    lifelines in them stay open as long as this process lives.
    """
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    os.setsid()
    owners = socket.socket(fileno=fd)
    try:
        supervisor = Supervisor(owners, Path(state), owner, [socket.socket(fileno=ours) for ours, _ in zygotes])
    except OSError as error:
        send(owners, {"request": 0, "error": f"{error.strerror} ({error.filename})"})
        sys.exit(1)
    try:
        supervisor.serve()
    finally:
        supervisor.clear()
    sys.exit(0)
