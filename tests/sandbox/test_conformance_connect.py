"""Connections to a program in a sandbox reach nothing else, and no sandbox can block the host."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from clawgym.errors import SandboxDied, SandboxError
from clawgym.sandbox import Backend, Sandbox, SandboxSpec
from clawgym.sandbox.linux.listen import sandbox_path_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

PORT = 18789
NOBODY = f"port {PORT}: nothing listens there in the sandbox: start the program"
# argv: port, path or "", what to answer with: all that came, twice.
SERVE = r"""
import os, socket, sys
port, path = int(sys.argv[1]), sys.argv[2]
if path:
    server = socket.socket(socket.AF_UNIX)
    if os.path.lexists(path):
        os.unlink(path)
    server.bind(path)
    server.listen(16)
else:
    server = socket.create_server(("127.0.0.1", port))
print("ready", flush=True)
while True:
    peer = server.accept()[0]
    if not os.fork():
        got = b""
        while data := peer.recv(65536):
            got += data
        peer.sendall(got + got)
        os._exit(0)
    peer.close()
"""


@pytest.fixture(autouse=True)
async def _probed(backend: Backend) -> None:
    await backend.probe()


def place(sandbox: Sandbox, port: int) -> str:
    """Where a program in the sandbox listens, if at a path."""
    return "" if sandbox.isolation.features["loopback"] else sandbox_path_of(port)


async def serve(sandbox: Sandbox, port: int = PORT) -> None:
    """Start a server in the sandbox, and wait for it."""
    words = f"python3 -I -S -c '{SERVE}' {port} '{place(sandbox, port)}' > /tmp/said-{port} 2>&1 &"
    done = await sandbox.exec(["bash", "-c", f"{words} while ! grep -q ready /tmp/said-{port}; do sleep 0.01; done"])
    assert done.exit_code == 0, done.text


async def ask(sock: socket.socket, data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(sock=sock)
    try:
        writer.write(data)
        await writer.drain()
        writer.write_eof()
        return await asyncio.wait_for(reader.read(-1), 20)
    finally:
        writer.close()


async def test_host_talks_to_a_program_in_the_sandbox(sandbox: Sandbox) -> None:
    await serve(sandbox)
    sock = await sandbox.connect(PORT)
    assert sock.gettimeout() == 0
    assert await ask(sock, b"hello") == b"hellohello"
    big = os.urandom(2**20)
    socks = [await sandbox.connect(PORT) for _ in range(4)]
    assert await asyncio.gather(*(ask(s, big) for s in socks)) == [big + big] * 4


async def test_each_sandbox_is_reached_by_itself(backend: Backend) -> None:
    one, two = await backend.create(SandboxSpec()), await backend.create(SandboxSpec())
    try:
        await serve(one)
        with pytest.raises(SandboxError, match=NOBODY):
            await two.connect(PORT)
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", PORT), 2)
        assert await ask(await one.connect(PORT), b"1") == b"11"
    finally:
        await one.close()
        await two.close()


async def test_nobody_listens(shared: Sandbox) -> None:
    started = time.monotonic()
    for _ in range(3):
        with pytest.raises(SandboxError, match=NOBODY) as refused:
            await shared.connect(PORT)
        assert not isinstance(refused.value, SandboxDied)
    assert time.monotonic() - started < 5
    assert (await shared.exec(["echo", "alive"])).output == b"alive\n"


@pytest.mark.parametrize("port", [0, 80, 65536, -1, "18789", True])
async def test_ports_that_no_program_can_have(shared: Sandbox, port: int) -> None:
    with pytest.raises(SandboxError, match="from 1024 to 65535"):
        await shared.connect(port)


async def test_program_that_never_accepts_blocks_nothing_else(sandbox: Sandbox) -> None:
    """Its queue is full: the connection is refused after a while, and nothing else is blocked."""
    where = place(sandbox, PORT)
    make = f"s = socket.socket(socket.AF_UNIX); s.bind('{where}')" if where else f"s.bind(('127.0.0.1', {PORT}))"
    deaf = f"import socket, time\ns = socket.socket()\n{make}\ns.listen(0)\nprint('ready', flush=True)\ntime.sleep(60)"
    if where:
        deaf = deaf.replace("s = socket.socket()\n", "")
    start = 'python3 -I -S -c "$CODE" > /tmp/said & while ! grep -q ready /tmp/said; do sleep 0.01; done'
    await sandbox.exec(["bash", "-c", start], env={"CODE": deaf})
    socks: list[socket.socket] = []
    try:
        for _ in range(8):
            waiting = asyncio.ensure_future(sandbox.connect(PORT))
            assert (await sandbox.exec(["echo", "meanwhile"])).output == b"meanwhile\n"
            try:
                socks.append(await asyncio.wait_for(waiting, 20))
            except SandboxError as error:
                assert "takes no connections" in str(error)  # noqa: PT017
                break
        else:
            pytest.fail("a full queue took eight connections")
    finally:
        for sock in socks:
            sock.close()


async def test_closed_sandbox_refuses_connections_and_open_ones_do_not_delay_close(backend: Backend) -> None:
    sandbox = await backend.create(SandboxSpec())
    await serve(sandbox)
    sock = await sandbox.connect(PORT)
    await asyncio.wait_for(sandbox.close(), 20)
    assert sock.fileno() >= 0  # ours to close
    reader, writer = await asyncio.open_connection(sock=sock)
    try:
        assert await asyncio.wait_for(reader.read(-1), 20) == b""
    except ConnectionError:
        pass
    finally:
        writer.close()
    with pytest.raises(SandboxError, match="closed"):
        await sandbox.connect(PORT)


async def test_dead_sandbox_raises_sandbox_died(backend: Backend) -> None:
    sandbox = await backend.create(SandboxSpec())
    try:
        await serve(sandbox)
        token = secrets.token_hex(8)
        await sandbox.exec(["bash", "-c", f"exec -a {token} sleep 60 &"])
        sleepers: list[psutil.Process] = []
        while not sleepers:
            sleepers = [p for p in psutil.process_iter(["cmdline"]) if (p.info["cmdline"] or [""])[0] == token]
        first = sleepers[0].parent()
        assert first is not None
        first.kill()
        with pytest.raises(SandboxDied):
            await sandbox.exec(["true"])  # until its end is heard of, its programs may still answer
        with pytest.raises(SandboxDied):
            await sandbox.connect(PORT)
    finally:
        await sandbox.close()


async def test_cancelled(sandbox: Sandbox) -> None:
    await serve(sandbox)
    for _ in range(10):
        task = asyncio.ensure_future(sandbox.connect(PORT))
        await asyncio.sleep(0)
        task.cancel()
        try:
            (await task).close()
        except asyncio.CancelledError:
            pass
    assert await ask(await sandbox.connect(PORT), b"still") == b"stillstill"


async def test_connect_follows_no_link_out_of_the_sandbox(sandbox: Sandbox) -> None:
    """Whatever is at the path of the socket, nothing outside of the sandbox is reached."""
    here = sandbox_path_of(PORT)
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as theirs:
        path = Path(folder, "host.sock")
        theirs.bind(str(path))
        theirs.listen()
        theirs.setblocking(False)
        os.chmod(path, 0o666)
        os.chmod(folder, 0o755)
        up = "/".join([".."] * 12)
        for line in (
            f"ln -sfn {path} {here}",
            f"ln -sfn {up}{path} {here}",
            f"ln -sfn /proc/1/root{path} {here}",
            f"rm {here}; mv /tmp /tmp.old; ln -s {up}{folder} /tmp",
            f"rm /tmp; mkdir /tmp; mkfifo {here}",
            f"rm {here}; echo > {here}",
            f"rm {here}; mkdir {here}",
            f"rmdir {here}; ln -sfn /tmp/real {here}",
        ):
            await sandbox.exec(["bash", "-c", line])
            with pytest.raises(SandboxError, match=NOBODY):
                await sandbox.connect(PORT)
            with pytest.raises(BlockingIOError):
                theirs.accept()
    await sandbox.exec(["rm", "-f", here])
    await serve(sandbox)
    assert await ask(await sandbox.connect(PORT), b"ours") == b"oursours"
