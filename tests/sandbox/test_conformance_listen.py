"""Sockets of the host that listen in a sandbox: its programs connect, and only the host accepts."""

from __future__ import annotations

import asyncio
import hashlib
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from clawgym.errors import SandboxError
from clawgym.sandbox import Backend, Sandbox, SandboxSpec

pytestmark = pytest.mark.asyncio(loop_scope="module")

PORT = 9000
# argv: where, how many bytes to send; prints what comes back.
TALK = r"""
import hashlib, socket, sys
where, size = sys.argv[1], int(sys.argv[2])
if where.startswith("/"):
    peer = socket.socket(socket.AF_UNIX)
    peer.connect(where)
else:
    peer = socket.create_connection(("127.0.0.1", int(where)), 10)
peer.settimeout(20)
peer.sendall(b"x" * size)
peer.shutdown(socket.SHUT_WR)
got = b""
while data := peer.recv(65536):
    got += data
print(len(got), hashlib.sha256(got).hexdigest() if len(got) > 99 else got.decode())
"""


def place(sandbox: Sandbox, sock: socket.socket, port: int = PORT) -> str:
    """Where a program in the sandbox connects to."""
    if not sandbox.isolation.features["loopback"]:
        assert sock.family == socket.AF_UNIX
        return f"/dev/listen-{port}"
    assert sock.family == socket.AF_UNIX or sock.getsockname() == ("127.0.0.1", port)
    return str(port)


async def talk(sandbox: Sandbox, where: str, size: int = 5) -> str:
    done = await sandbox.exec([*sandbox.tool("python3"), "-I", "-S", "-c", TALK, where, str(size)], timeout=30)
    return done.text.strip().splitlines()[-1]


@asynccontextmanager
async def served(sock: socket.socket, answer: bytes) -> AsyncIterator[list[int]]:
    """Answers every connection, once all has been read; yields how much each sent."""
    read: list[int] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        read.append(len(await reader.read(-1)))
        writer.write(answer)
        await writer.drain()
        writer.close()

    start = asyncio.start_unix_server if sock.family == socket.AF_UNIX else asyncio.start_server
    server = await start(handle, sock=sock)
    try:
        yield read
    finally:
        server.close()
        await server.wait_closed()


@pytest.fixture(autouse=True)
async def _probed(backend: Backend) -> None:
    await backend.probe()


async def test_programs_in_the_sandbox_talk_to_a_server_outside(sandbox: Sandbox) -> None:
    sock = await sandbox.listen(PORT)
    where = place(sandbox, sock)
    async with served(sock, b"hello") as read:
        assert await talk(sandbox, where) == "5 hello"
        shell = await sandbox.shell()
        assert "5 hello" in (await shell.run(f"python3 -I -S -c '{TALK}' {where} 7")).text
    assert read == [5, 7]


async def test_large_transfers_in_both_directions_while_commands_run(sandbox: Sandbox) -> None:
    answer = bytes(range(256)) * 4096
    sock = await sandbox.listen(PORT)
    where = place(sandbox, sock)
    async with served(sock, answer) as read:
        talks = [talk(sandbox, where, 2**20) for _ in range(4)]
        *lines, busy = await asyncio.gather(*talks, sandbox.exec(["sh", "-c", "seq 20000 | tail -1"], timeout=30))
    assert lines == [f"{2**20} {hashlib.sha256(answer).hexdigest()}"] * 4
    assert busy.output == b"20000\n"
    assert read == [2**20] * 4


async def test_same_port_in_several_sandboxes(backend: Backend) -> None:
    sandboxes = [await backend.create(SandboxSpec()) for _ in range(2)]
    try:
        socks = [await sandbox.listen(PORT) for sandbox in sandboxes]
        async with served(socks[0], b"one"), served(socks[1], b"two"):
            answers = [await talk(b, place(b, s)) for b, s in zip(sandboxes, socks, strict=True)]
        assert answers == ["3 one", "3 two"]
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", PORT), 2)
    finally:
        await asyncio.gather(*(sandbox.close() for sandbox in sandboxes))


async def test_several_ports_and_one_in_use(sandbox: Sandbox) -> None:
    socks = await asyncio.gather(*(sandbox.listen(PORT + n) for n in range(5)))
    for number, sock in enumerate(socks):
        place(sandbox, sock, PORT + number)
    with pytest.raises(SandboxError, match=r"port 9002 .*in use.*choose another one"):
        await sandbox.listen(PORT + 2)
    async with served(socks[2], b"still"):
        assert await talk(sandbox, place(sandbox, socks[2], PORT + 2)) == "5 still"


@pytest.mark.parametrize("port", [0, 80, 65536, -1, "9000", True])
async def test_ports_that_no_sandbox_can_have(shared: Sandbox, port: int) -> None:
    with pytest.raises(SandboxError, match="from 1024 to 65535"):
        await shared.listen(port)


async def test_the_socket_ends_with_the_sandbox(backend: Backend) -> None:
    sandbox = await backend.create(SandboxSpec())
    sock = await sandbox.listen(PORT)
    assert sock.fileno() >= 0
    await sandbox.close()
    assert sock.fileno() == -1
    with pytest.raises(SandboxError, match="closed"):
        await sandbox.listen(PORT)


async def test_a_program_cannot_take_the_port_away(sandbox: Sandbox) -> None:
    sock = await sandbox.listen(PORT)
    where = place(sandbox, sock)
    grab = "import os, socket, sys\np = sys.argv[1]\n"
    grab += "if p.startswith('/'): os.unlink(p)\nelse: socket.create_server(('127.0.0.1', int(p)), reuse_port=True)"
    done = await sandbox.exec(["python3", "-I", "-S", "-c", grab, where], timeout=20)
    assert done.exit_code == 1, done.text
    async with served(sock, b"ours"):
        assert await talk(sandbox, where) == "4 ours"


async def test_flooded_stream_returns_no_other_socket(sandbox: Sandbox) -> None:
    flood = sandbox.exec(["sh", "-c", "timeout 3 yes"], timeout=10, max_output=2**16)
    running = asyncio.ensure_future(flood)
    await asyncio.sleep(0.2)
    socks = [await sandbox.listen(PORT + n) for n in range(20)]
    async with served(socks[7], b"seven"):
        assert await talk(sandbox, place(sandbox, socks[7], PORT + 7)) == "5 seven"
    await running
