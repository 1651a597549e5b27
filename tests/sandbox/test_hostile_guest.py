"""The host's end of a sandbox against a hostile process 1, which violates the protocol of the link."""

from __future__ import annotations

import asyncio
import json
import math
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from clawgym.errors import SandboxDied, SandboxError
from clawgym.records import Limits
from clawgym.sandbox import SandboxSpec
from clawgym.sandbox.namespace.backend import NamespaceBackend, NamespaceSandbox

HEADER = struct.Struct(">IBI")
DONE = struct.Struct(">IBQd")
CAP, SLACK = 1000, 4096
BOUND = 2 * (CAP + SLACK)
"""Bytes of output and errors together that a guest may send for a command whose output is capped at ``CAP``."""


def frame(op: str, channel: int, payload: bytes = b"") -> bytes:
    return HEADER.pack(len(payload), ord(op), channel) + payload


def done(
    channel: int, code: int = 0, flags: int = 0, omitted: int = 0, seconds: float = 0.1, cwd: bytes = b"/"
) -> bytes:
    return frame("D", channel, DONE.pack(code, flags, omitted, seconds) + cwd)


class Guest:
    """Process 1 as ``answer`` plays it: called with the socket, and with the op, channel and payload of each frame."""

    def __init__(self, sock: socket.socket, answer: Callable[[Any, str, int, bytes], object]) -> None:
        self._sock, self._answer = sock, answer
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            while True:
                length, op, channel = HEADER.unpack(self._exactly(HEADER.size))
                self._answer(self._sock, chr(op), channel, self._exactly(length))
        except (OSError, EOFError):
            pass  # the host has hung up
        finally:
            self._sock.close()

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = self._sock.recv(size - len(data))
            if not part:
                raise EOFError
            data += part
        return data


class Play:
    """A sandbox of the namespace backend whose process 1 is played here."""

    def __init__(self, folder: Path, answer: Callable[[Any, str, int, bytes], object]) -> None:
        self.killed: list[str] = []
        backend = NamespaceBackend()

        async def ask(what: str, *_: object, **__: object) -> dict[str, Any]:
            self.killed.append(what)
            return {}

        backend.supervised.ask = ask  # type: ignore[method-assign]
        host, guest = socket.socketpair()
        host.set_inheritable(False)
        layer, root = (os.open(folder, os.O_RDONLY) for _ in range(2))
        spec = SandboxSpec(limits=Limits(command_seconds=5, output_bytes=CAP))
        self.sandbox = NamespaceSandbox(backend, "played", spec, host, layer, root, ())
        self.sandbox.start()
        self.guest = Guest(guest, answer)

    async def __aenter__(self) -> NamespaceSandbox:
        return self.sandbox

    async def __aexit__(self, *_: object) -> None:
        await self.sandbox.close()
        await asyncio.to_thread(self.guest.thread.join, 30)
        assert not self.guest.thread.is_alive(), "the host still holds the stream"


@pytest.fixture
def play(tmp_path: Path) -> Callable[..., Play]:
    return lambda answer: Play(tmp_path, answer)


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


# -- what an honest guest says


async def test_answer_within_the_bounds_is_accepted(play: Callable[..., Play]) -> None:
    def answer(sock: socket.socket, op: str, channel: int, payload: bytes) -> None:
        assert op == "X"
        half = b"x" * (BOUND // 2)
        sock.sendall(frame("O", channel, half) + frame("L", channel, half) + done(channel, 3, 1, 7, 2.5, cwd=b"/srv"))

    async with play(answer) as sandbox:
        result = await sandbox.exec(["true"])
    assert (len(result.output), len(result.stderr)) == (BOUND // 2, BOUND // 2)
    assert (result.exit_code, result.timed_out, result.omitted_bytes, result.seconds) == (3, True, 7, 2.5)
    assert (result.cwd, result.shell_restarted) == ("/srv", False)


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1.0, 1e9])
async def test_nonsense_numbers_are_harmless(play: Callable[..., Play], seconds: float) -> None:
    def answer(sock: socket.socket, op: str, channel: int, payload: bytes) -> None:
        sock.sendall(done(channel, 2**32 - 1, 255, 2**64 - 1, seconds, cwd=b"x" * 10_000))

    async with play(answer) as sandbox:
        result = await sandbox.exec(["true"])
    assert (result.exit_code, result.seconds) == (255, 0.0)
    assert len(result.cwd) == 4096


# -- too much


@pytest.mark.parametrize("kind", ["O", "L"])
async def test_one_byte_over_the_cap_ends_the_sandbox(play: Callable[..., Play], kind: str) -> None:
    def answer(sock: socket.socket, op: str, channel: int, payload: bytes) -> None:
        sock.sendall(frame(kind, channel, b"x" * (BOUND + 1)) + done(channel))

    made = play(answer)
    async with made as sandbox:
        with pytest.raises(SandboxDied) as died:
            await sandbox.exec(["true"])
        assert died.value.cause == "protocol"
        with pytest.raises(SandboxDied):
            await sandbox.exec(["true"])
    assert "kill" in made.killed


async def test_output_without_an_end_is_cut_at_the_cap(play: Callable[..., Play]) -> None:
    sent = 0

    def answer(sock: socket.socket, op: str, channel: int, payload: bytes) -> None:
        nonlocal sent
        while True:
            sock.sendall(frame("O", channel, b"x" * 500))
            sent += 500

    async with play(answer) as sandbox:
        with pytest.raises(SandboxDied) as died:
            await sandbox.exec(["true"])
        assert died.value.cause == "protocol"
    assert sent < 16 * 2**20  # what a socket holds, not what memory does


async def test_frame_of_more_than_a_megabyte_ends_the_sandbox_at_once(play: Callable[..., Play]) -> None:
    def answer(sock: socket.socket, op: str, channel: int, payload: bytes) -> None:
        sock.sendall(HEADER.pack(2**20 + 1, ord("O"), channel))

    async with play(answer) as sandbox:
        with pytest.raises(SandboxDied) as died:
            await sandbox.exec(["true"])
        assert died.value.cause == "protocol"


async def test_unrequested_answers_take_no_memory(play: Callable[..., Play]) -> None:
    """Late answers to a cancelled command are dropped, however many arrive."""
    import tracemalloc

    def answer(sock: socket.socket, op: str, channel: int, payload: bytes) -> None:
        for n in range(1000):
            sock.sendall(frame("OL"[n % 2], 10_000 + n, b"x" * 50_000) + frame("F", 20_000 + n, b"{"))
        sock.sendall(done(channel))

    async with play(answer) as sandbox:
        tracemalloc.start()
        try:
            assert (await sandbox.exec(["true"])).exit_code == 0
            assert tracemalloc.get_traced_memory()[1] < 8 * 2**20
        finally:
            tracemalloc.stop()


# -- wrong frames

NESTED = b"[" * 100_000


@pytest.mark.parametrize(
    ("op", "payload"),
    [
        ("D", b""),
        ("D", bytes(DONE.size - 1)),
        ("F", b""),
        ("F", b"no json"),
        ("F", b"[1]"),
        ("F", b"\xff\xfe"),
        ("F", NESTED),
        ("X", b"{}"),
        ("\0", b""),
        ("\xff", b"x"),
    ],
)
async def test_invalid_frame_ends_the_sandbox(play: Callable[..., Play], op: str, payload: bytes) -> None:
    def answer(sock: socket.socket, _: str, channel: int, __: bytes) -> None:
        sock.sendall(frame(op, channel, payload))

    async with play(answer) as sandbox:
        with pytest.raises(SandboxDied) as died:
            await sandbox.exec(["true"])
        assert died.value.cause == "protocol"


async def test_frame_of_unknown_kind_and_channel_ends_the_sandbox(play: Callable[..., Play]) -> None:
    def answer(sock: socket.socket, op: str, channel: int, payload: bytes) -> None:
        sock.sendall(frame("X", channel + 1))

    async with play(answer) as sandbox:
        with pytest.raises(SandboxDied) as died:
            await sandbox.exec(["true"])
        assert died.value.cause == "protocol"


@pytest.mark.parametrize(
    ("body", "error", "said"),
    [
        ({"cause": "pids", "error": "EAGAIN"}, SandboxDied, "cannot start a process"),
        ({"cause": "files", "error": "ENOSPC"}, SandboxError, "disk_mb"),
        ({"error": "x" * 10_000}, SandboxError, "refused the command"),
        ({"cause": ["a"], "error": {"b": 1}}, SandboxError, "refused the command"),
    ],
)
async def test_a_refusal_is_an_error_of_bounded_length(
    play: Callable[..., Play], body: dict[str, Any], error: type[Exception], said: str
) -> None:
    def answer(sock: socket.socket, op: str, channel: int, payload: bytes) -> None:
        sock.sendall(frame("F", channel, json.dumps(body).encode()))

    async with play(answer) as sandbox:
        with pytest.raises(error, match=said) as caught:
            await sandbox.exec(["true"])
        assert len(str(caught.value)) < 400


async def test_guest_that_never_answers_is_unresponsive(
    play: Callable[..., Play], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clawgym.sandbox.link._GRACE", 0.2)
    async with play(lambda *_: None) as sandbox:
        with pytest.raises(SandboxDied) as died:
            await asyncio.wait_for(sandbox.exec(["true"], timeout=0.1), 60)
        assert died.value.cause == "unresponsive"


async def test_a_guest_that_hangs_up_is_dead(play: Callable[..., Play]) -> None:
    async with play(lambda sock, *_: sock.shutdown(socket.SHUT_RDWR)) as sandbox:
        with pytest.raises(SandboxDied) as died:
            await sandbox.exec(["true"])
        assert died.value.cause == "died"


# -- descriptors


def _tcp() -> socket.socket:
    return socket.socket(socket.AF_INET, socket.SOCK_STREAM)


def _bound(port: int) -> socket.socket:
    sock = _tcp()
    sock.bind(("127.0.0.1", port))
    return sock


def _listening(family: int = socket.AF_INET, host: str = "127.0.0.1", port: int = 0) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.bind((host, port))
    sock.listen()
    return sock


def _connected() -> Iterator[socket.socket]:
    with _listening() as server:
        ours = socket.create_connection(server.getsockname())
        with server.accept()[0]:
            yield ours


def _gives(*fds: int) -> Callable[[Any, str, int, bytes], object]:
    """A guest that answers everything with these descriptors."""
    return lambda sock, op, channel, payload: socket.send_fds(sock, [done(channel)], fds)


async def test_requested_socket_is_accepted(play: Callable[..., Play]) -> None:
    with _listening() as offered:
        port = offered.getsockname()[1]
        async with play(_gives(offered.fileno())) as sandbox:
            with await sandbox.listen(port) as sock:
                assert sock.getsockname() == ("127.0.0.1", port)
                assert sock.gettimeout() == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda port: os.open("/dev/null", os.O_RDWR),
        lambda port: os.open("/proc/self", os.O_RDONLY | os.O_DIRECTORY),
        lambda port: socket.socket(socket.AF_UNIX, socket.SOCK_STREAM).detach(),
        lambda port: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).detach(),
        lambda port: _tcp().detach(),
        lambda port: _bound(port).detach(),
        lambda port: _listening().detach(),
        lambda port: _listening(host="0.0.0.0", port=port).detach(),
        lambda port: _listening(socket.AF_INET6, "::1", port).detach(),
    ],
    ids=["file", "folder", "unix", "udp", "new", "does not listen", "another port", "every address", "ipv6"],
)
async def test_another_descriptor_than_a_listening_socket_is_refused(
    play: Callable[..., Play], make: Callable[[int], int]
) -> None:
    with _listening() as probe:
        port = probe.getsockname()[1]
    fd = make(port)
    before = descriptors()
    try:
        async with play(_gives(fd)) as sandbox:
            with pytest.raises(SandboxError, match="cannot be listened on"):
                await sandbox.listen(port)
    finally:
        assert descriptors() <= before
        os.close(fd)


@pytest.mark.parametrize("kind", ["listens", "connected", "unix", "bound"])
async def test_another_socket_than_a_new_one_is_not_connected(play: Callable[..., Play], kind: str) -> None:
    """A connection that already leads somewhere, or a listening socket, would be taken for the program in there."""
    connected = _connected()
    offered = {
        "listens": _listening,
        "connected": lambda: next(connected),
        "unix": lambda: socket.socket(socket.AF_UNIX),
        "bound": lambda: _bound(0),
    }[kind]()
    with offered:
        async with play(_gives(offered.fileno())) as sandbox:
            with pytest.raises(SandboxError, match="another socket than requested"):
                await sandbox.connect(4567)
    connected.close()


@pytest.mark.parametrize("count", [0, 2, 4])
async def test_no_socket_or_several_are_refused_and_closed(play: Callable[..., Play], count: int) -> None:
    with _listening() as offered:
        port = offered.getsockname()[1]
        before = descriptors()
        async with play(_gives(*[offered.fileno()] * count)) as sandbox:
            with pytest.raises(SandboxError, match="no socket came"):
                await sandbox.listen(port)
        assert descriptors() <= before


async def test_unrequested_descriptors_are_dropped(play: Callable[..., Play]) -> None:
    held: list[int] = []

    def answer(sock: socket.socket, op: str, channel: int, payload: bytes) -> None:
        with open("/dev/null") as file:
            for _ in range(50):
                socket.send_fds(sock, [frame("O", 999, b"x")], [file.fileno()] * 4)
            held.append(len(descriptors()))
            sock.sendall(done(channel))

    before = descriptors()
    async with play(answer) as sandbox:
        assert (await sandbox.exec(["true"])).exit_code == 0
        assert len(descriptors()) < len(before) + 20
    assert descriptors() <= before
