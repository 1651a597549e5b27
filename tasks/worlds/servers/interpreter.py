"""The tool ``code_interpreter``: a persistent Python session, in a process of its own below this server.

Invariants: the server answers every call, whatever the code does; a call never takes much longer than its limit; when
the session is lost, the answer says so. What the code may reach is bounded by the box around it, and by nothing here.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from typing import Annotated, Any

from .clawgym_tools import Server

__all__ = ["Session", "server"]

GRACE = 2.0
"""Seconds that interrupted code has to come to its end."""
START_SECONDS = 10.0
"""How long a new session is tried for when the box has no process to spare."""


class Session:
    """A Python process that runs one piece of code after another."""

    def __init__(self, *, seconds: float = 30.0, output: int = 16 * 1024, memory: int = 512 << 20) -> None:
        self.seconds, self.output, self.memory = seconds, output, memory
        self._process: Any = None
        self._requests = self._replies = self._printed = -1
        self._number = 0
        _adopt_orphans()

    def run(self, code: str) -> str:
        """What the code printed, with the value of its last expression, and notes in square brackets."""
        notes = []
        if self._process is not None and self._process.poll() is not None:
            self.close()
            notes.append("the session had ended since the last call: this one is new, and has none of its variables")
        try:
            if self._process is None:
                self._start()
            self._number += 1
            text, more = self._ask(json.dumps({"code": code, "number": self._number}).encode() + b"\n")
        except OSError as error:  # the box has nothing left to start a process with, or the session is gone
            text, more = "", [f"the session could not run this ({error.strerror}): call again"]
            self.close()
        return "\n".join(filter(None, [text.rstrip("\n"), *(f"[{note}]" for note in notes + more)])) or "[no output]"

    def close(self) -> None:
        """End the session and all that it started."""
        if self._process is None:
            return
        _kill_all_below(os.getpid())
        self._process.wait()
        for handle in (self._requests, self._replies, self._printed):
            os.close(handle)
        self._process = None

    def _start(self) -> None:
        # The session reads requests from one pipe, answers on another, and prints into a third.
        theirs_in, self._requests = os.pipe()
        self._replies, theirs_out = os.pipe()
        self._printed, theirs_print = os.pipe()
        program = os.path.join(os.path.dirname(os.path.abspath(__file__)), "_session.py")
        argv = [sys.executable, program, str(theirs_in), str(theirs_out), str(self.memory)]
        try:
            end = time.monotonic() + START_SECONDS
            while True:
                try:
                    self._process = subprocess.Popen(
                        argv,
                        stdin=subprocess.DEVNULL,
                        stdout=theirs_print,
                        stderr=theirs_print,
                        pass_fds=(theirs_in, theirs_out),
                        env={**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1"},
                        start_new_session=True,
                    )
                    break
                except BlockingIOError:  # what was killed is not reaped yet
                    _kill_all_below(os.getpid())
                    if time.monotonic() > end:
                        raise
                    time.sleep(0.05)
        except OSError:
            for handle in (self._requests, self._replies, self._printed):
                os.close(handle)
            raise
        finally:
            for handle in (theirs_in, theirs_out, theirs_print):
                os.close(handle)
        for handle in (self._requests, self._replies, self._printed):
            os.set_blocking(handle, False)

    def _ask(self, request: bytes) -> tuple[str, list[str]]:
        """The output up to the session's answer, or up to its end; and notes."""
        kept, reply, late = _Ends(self.output), b"", False
        unsent = memoryview(request)
        end = time.monotonic() + self.seconds
        while b"\n" not in reply:
            left = end - time.monotonic()
            if left <= 0:
                if late:
                    self.close()
                    return kept.text(), [f"stopped after {self.seconds:g} s; {_LOST}"]
                late, end = True, time.monotonic() + GRACE
                _signal_group(self._process.pid, signal.SIGINT)
                continue
            asks = [self._requests] if unsent else []
            ready, writable, _ = select.select([self._printed, self._replies], asks, [], min(left, 0.2))
            if writable:
                unsent = unsent[os.write(self._requests, unsent) :]
            if self._printed in ready:
                kept.take(self._printed)
            if self._replies in ready:
                new = _read(self._replies)
                reply += new
                if not new or len(reply) > 4096:
                    break
            elif self._process.poll() is not None:
                break
        else:
            kept.drain(self._printed)
            return kept.text(), self._notes(reply, late)
        # It ended, or it broke the pipe that it answers on.
        try:
            code = self._process.wait(0.2)
        except subprocess.TimeoutExpired:
            code = None
        kept.drain(self._printed)
        self.close()
        how = "broke its own pipes" if code is None else _how(code)
        return kept.text(), [f"the session {how}; {_LOST}"]

    def _notes(self, reply: bytes, late: bool) -> list[str]:
        try:
            answer = json.loads(reply)
            note = str(answer["note"])[:200] if answer["number"] == self._number else "?"
        except (ValueError, KeyError, TypeError):
            note = "?"
        if note == "?":
            self.close()
            return [f"the session gave an answer that is none; {_LOST}"]
        if late:
            _kill_all_below(os.getpid(), spare=self._process.pid)
            return [f"stopped after {self.seconds:g} s, with all it had started; variables are still there"]
        return [note] if note else []


_LOST = "it is started afresh, and its variables are gone"


class _Ends:
    """The first and the last bytes of a stream."""

    def __init__(self, keep: int) -> None:
        self.half, self.total = keep // 2, 0
        self.head, self.tail = b"", b""

    def take(self, handle: int) -> bool:
        """Read what is there; whether there was something."""
        data = _read(handle)
        self.total += len(data)
        room = self.half - len(self.head)
        self.head += data[:room]
        self.tail = (self.tail + data[max(room, 0) :])[-self.half :]
        return bool(data)

    def drain(self, handle: int) -> None:
        """Read what a full pipe holds; what goes on printing is read at the next call."""
        for _ in range(32):
            if not self.take(handle):
                return

    def text(self) -> str:
        left_out = self.total - len(self.head) - len(self.tail)
        middle = f"\n[{left_out} bytes of output left out]\n".encode() if left_out else b""
        return (self.head + middle + self.tail).decode("utf-8", "backslashreplace")


def _read(handle: int) -> bytes:
    try:
        return os.read(handle, 1 << 16)
    except BlockingIOError:
        return b""


def _how(code: int) -> str:
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
        return f"was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
    return f"ended with exit status {code}"


def _adopt_orphans() -> None:
    """Become the parent of daemons, so that they can be found."""
    try:
        import _ctypes  # the C half: ctypes itself takes ten times as long

        prctl = _ctypes.dlsym(_ctypes.dlopen(None, 2), "prctl")  # type: ignore
        _ctypes.call_function(prctl, (36, 1, 0, 0, 0))  # PR_SET_CHILD_SUBREAPER
    except (ImportError, OSError, AttributeError):
        pass


def _signal_group(pid: int, number: int) -> None:
    try:
        os.killpg(pid, number)
    except OSError:
        pass


def _kill_all_below(root: int, *, spare: int = 0, seconds: float = 20.0) -> None:
    """Kill every process below ``root`` but ``spare``. All are stopped before the first is killed: what forks faster
    than it is killed cannot then, and has no room to."""
    end = time.monotonic() + seconds
    stopped: set[int] = set()
    while time.monotonic() < end:
        living, dead = _below(root)
        for pid in dead - {spare}:
            try:
                os.waitpid(pid, os.WNOHANG)  # ours by adoption
            except OSError:
                pass
        living -= {spare}
        if not living:
            return
        new = living - stopped
        stopped |= new
        for pid in new or living:
            try:
                os.kill(pid, signal.SIGSTOP if new else signal.SIGKILL)
            except OSError:
                pass
        if not new:
            time.sleep(0.005)


def _below(root: int) -> tuple[set[int], set[int]]:
    """The living and the dead processes below ``root``."""
    children: dict[int, list[int]] = {}
    dead = set()
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat", "rb") as file:
                    state, parent = file.read().rpartition(b")")[2].split()[:2]
            except (OSError, ValueError):
                continue
            children.setdefault(int(parent), []).append(int(entry))
            if state in (b"Z", b"X"):
                dead.add(int(entry))
    found, queue = set(), [root]
    while queue:
        new = children.get(queue.pop(), ())
        found.update(new)
        queue.extend(new)
    return found - dead, found & dead


def server(seconds: float = 30.0, output: int = 16 * 1024, memory: int = 512 << 20) -> Server:
    """A server with the one tool ``code_interpreter``."""
    made = Server("code-interpreter")
    session = Session(seconds=seconds, output=output, memory=memory)

    @made.tool
    def code_interpreter(
        code: Annotated[str, "Python source, one line or many. Print what you want to see."],
    ) -> str:
        """Run Python code in a session that stays: variables, imports and files are there in the next call.

        The value of a last expression is shown. Standard output, errors and tracebacks come back as text.
        """
        return session.run(code)

    return made


def main(arguments: list[str]) -> None:
    """``SECONDS OUTPUT_BYTES MEMORY_MIB``: serve on stdin and stdout."""
    seconds, output, memory = arguments
    server(float(seconds), int(output), int(memory) << 20).run()
