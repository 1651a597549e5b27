"""The owner's side of the supervisor: start it, send it requests, stop it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import subprocess
import sys
import weakref
from functools import cache
from pathlib import Path
from typing import Any

from clawgym.errors import InfraError, SandboxError, SandboxUnavailable
from clawgym.records import packages_of
from clawgym.sandbox import leases
from clawgym.sandbox.linux.messages import receive, send
from clawgym.sandbox.linux.warm import MODULES
from clawgym.sandbox.protocol import SandboxSpec

__all__ = ["Supervised"]

# The supervisor does not import the package itself: stub packages are enough to find the few modules.
# It unblocks signals that the starting thread has blocked (Ray's workers do), or they would be blocked in sandboxes.
_BOOT = """
import signal, sys, types
signal.pthread_sigmask(signal.SIG_SETMASK, ())
for name, path in (("clawgym", sys.argv[1]), ("clawgym.sandbox", sys.argv[1] + "/sandbox")):
    module = types.ModuleType(name); module.__path__ = [path]; sys.modules[name] = module
from clawgym.sandbox.linux import seccomp, syscalls, zygote
syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)
filters = {"namespace": seccomp.program(), "chroot": seccomp.program(shared=True)}
filters["one user"] = seccomp.program(one_user=True)
zygotes = [zygote.fork(filters)]
if sys.argv[3]:
    zygotes.append(zygote.fork(filters, preloaded=True))
from clawgym.sandbox.linux.supervisor import main
main(int(sys.argv[2]), sys.argv[4], sys.argv[5], zygotes)
"""
_SUITS = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
sys.exit(sys.version_info < (3, 11))
"""
"""Succeeds with a Python that can run the supervisor: some distributions leave out parts of the standard library."""
_NEEDED = (*MODULES, "array", "ctypes", "fcntl", "resource", "select", "signal", "socket", "struct", "termios")

_OPEN: weakref.WeakSet[Supervised] = weakref.WeakSet()


def _forget_all() -> None:
    for supervised in list(_OPEN):
        supervised.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)


@cache
def _image_python() -> str | None:
    """This machine's ``python3`` that sandboxes of the default image see, if the supervisor can run with it.

    Process 1 of a sandbox is a fork of the supervisor. If both have the same interpreter, process 1 can run the
    sandbox's short Python programs in forks of itself.
    """
    for path in ("/usr/bin/python3", "/usr/local/bin/python3"):  # the second is shown if the first does not exist
        if os.path.exists(path):
            words = [path, "-I", "-S", "-c", _SUITS, *_NEEDED]
            done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, check=False)
            return path if done.returncode == 0 else None
    return None


_SETTINGS = frozenset({"PATH", "LANG", "LC_ALL", "LC_CTYPE"})
"""What decides which ``python3`` starts, and its encoding."""


class Supervised:
    """One supervisor process and the connection to it."""

    def __init__(self) -> None:
        self.owner = secrets.token_hex(8)
        self.state = leases.state_dir()
        self.limits: list[str] = []
        self.can_freeze = False
        self.interprets = False
        """Whether sandboxes of the default image can have a preloaded interpreter."""
        self._requests: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._count = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def warm(self, spec: SandboxSpec) -> bool:
        """Whether a new sandbox with files of nobody else gets a preloaded interpreter."""
        default = packages_of(spec.image) is not None and _SETTINGS.isdisjoint(spec.env)
        return self.interprets and spec.warm_python and not spec.pristine_tools and default

    def forget(self) -> None:
        """In a forked child: close the copy of the connection, so that its end still means the end of the owner."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._process = None

    async def start(self) -> None:
        """Start the process. Raises :class:`SandboxUnavailable` if that fails."""
        try:
            self.state.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SandboxUnavailable(
                f"{self.state}: cannot be made ({error.strerror}): "
                "give this user a writable cache folder (XDG_CACHE_HOME)"
            ) from error
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        package = str(Path(__file__).resolve().parents[2])
        python = await asyncio.to_thread(_image_python)
        self.interprets = python is not None
        words = [package, str(theirs.fileno()), "warm" if python else "", str(self.state), self.owner]
        with theirs:
            # A clean environment: process 1 of every sandbox is a copy of this process.
            self._process = subprocess.Popen(
                [python or sys.executable, "-I", "-S", "-B", "-c", _BOOT, *words],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"},
            )
        ours.setblocking(False)
        self._socket = ours
        _OPEN.add(self)
        self._loop = loop = asyncio.get_running_loop()
        ready: asyncio.Future[dict[str, Any]] = loop.create_future()
        self._requests[0] = ready
        loop.add_reader(ours.fileno(), self._read)
        try:
            answer = await asyncio.wait_for(ready, 20)
        except (TimeoutError, InfraError) as error:
            await self.stop()
            why = str(error).rpartition(": ")[0] or "no answer within 20 s"
            raise SandboxUnavailable(
                f"the sandbox supervisor did not start ({why}): see that {self.state} has room and can be written, "
                "and run `clawgym doctor`"
            ) from error
        self.limits, self.can_freeze = list(answer["limits"]), bool(answer["freeze"])

    def _read(self) -> None:
        assert self._socket is not None
        while True:
            try:
                message, fds = receive(self._socket)
            except BlockingIOError:
                return
            except OSError:
                message, fds = None, []
            for fd in fds:
                os.close(fd)
            if message is None:
                asyncio.get_running_loop().remove_reader(self._socket.fileno())
                for future in self._requests.values():
                    if not future.done():
                        future.set_exception(InfraError("the sandbox supervisor has ended: start the run again"))
                self._requests.clear()
                return
            future = self._requests.pop(message.get("request", 0), None)
            if future is not None and not future.done():
                if message.get("error"):
                    future.set_exception(InfraError(f"the supervisor failed: {message['error']}: run `clawgym doctor`"))
                else:
                    future.set_result(message)

    async def ask(self, op: str, lease: str = "", **fields: Any) -> dict[str, Any]:
        """Send a request and wait for its answer. Raises :class:`InfraError` if the supervisor failed or has ended."""
        return await (await self.post(op, lease, **fields))

    async def post(
        self, op: str, lease: str = "", fds: list[int] | None = None, **fields: Any
    ) -> asyncio.Future[dict[str, Any]]:
        """Send a request; the answer arrives as a future. Raises :class:`InfraError`."""
        if self._socket is None:
            raise InfraError("the sandbox supervisor is not running: create a new backend")
        if asyncio.get_running_loop() is not self._loop:
            raise SandboxError("this backend belongs to another event loop: create a new one here")
        self._count += 1
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._requests[self._count] = future
        message = {"op": op, "lease": lease, "request": self._count, **fields}
        for _ in range(2000):
            try:
                send(self._socket, message, fds)
                break
            except BlockingIOError:  # the queue is short: 128 sandboxes may be started at once
                await asyncio.sleep(0.005)
            except OSError as error:
                raise InfraError("the sandbox supervisor has ended: start the run again") from error
        return future

    async def stop(self) -> None:
        """Close the connection and wait until the supervisor has cleaned up. Idempotent."""
        if self._socket is not None:
            with contextlib.suppress(ValueError, OSError):
                asyncio.get_running_loop().remove_reader(self._socket.fileno())
            self._socket.close()
            self._socket = None
        if self._process is not None:
            process, self._process = self._process, None
            await asyncio.to_thread(process.wait)
