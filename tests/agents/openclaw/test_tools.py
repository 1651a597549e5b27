"""The tool server of a shared OpenClaw, called directly: each agent reaches only its own sandbox."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from clawgym.agents.openclaw._tools import OpenClawToolServer
from clawgym.errors import SandboxDied
from clawgym.sandbox import SandboxSpec

from ...conftest import usable
from ..conftest import kill_from_outside

pytestmark = pytest.mark.asyncio(loop_scope="module")


class Client:
    """A client of a server on loopback, which has two agents with one sandbox each."""

    def __init__(self) -> None:
        self.server = OpenClawToolServer()
        self.port = 0

    async def send(self, data: bytes, *, half: bool = False) -> bytes:
        """Send a request; ``half``: close the sending side afterwards."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(data)
            await writer.drain()
            if half:
                writer.write_eof()
            return await asyncio.wait_for(reader.read(), 20)
        except ConnectionError:
            return b""
        finally:
            writer.close()

    async def ask(self, agent: str, op: str, data: bytes = b"", **more: object) -> tuple[dict, bytes]:
        head = {"op": op, "agent": agent, "key": self.server.key, "size": len(data), **more}
        first, _, rest = (await self.send(json.dumps(head).encode() + b"\n" + data)).partition(b"\n")
        return (json.loads(first) if first else {}), rest

    async def run(self, agent: str, command: str) -> tuple[bytes, bytes]:
        answer, _ = await self.ask(agent, "exec", command=command, env={})
        said = await self.send(json.dumps({"op": "run", "ticket": answer["ticket"]}).encode() + b"\n")
        return said, await self.send(json.dumps({"op": "code", "ticket": answer["ticket"]}).encode() + b"\n")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def backend():
    async with usable("namespace") as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def client(backend) -> AsyncIterator[Client]:
    made = Client()
    sock = socket.create_server(("127.0.0.1", 0))
    made.port = sock.getsockname()[1]
    await made.server.start(sock)
    sandboxes = {name: await backend.create(SandboxSpec()) for name in ("a", "b")}
    agent_tools = [made.server.add(name, sandbox) for name, sandbox in sandboxes.items()]
    yield made
    await made.server.aclose()
    for each in agent_tools:
        await each.aclose()
    for sandbox in sandboxes.values():
        await sandbox.close()


async def test_agents_have_separate_files_and_commands(client):
    for name in ("a", "b"):
        assert await client.ask(name, "write", f"of {name}".encode(), path="/tmp/x") == ({}, b"")
    for name in ("a", "b"):
        assert await client.ask(name, "read", path="/tmp/x") == ({}, f"of {name}".encode())
        assert await client.run(name, "cat /tmp/x; exit 3") == (f"of {name}".encode(), b"3\n")
    (answer, _) = await client.ask("a", "stat", path="/tmp")
    assert answer["stat"]["type"] == "directory"
    assert await client.ask("a", "rename", path="/tmp/x", to="/tmp/y") == ({}, b"")
    assert await client.ask("a", "stat", path="/tmp/x") == ({"stat": None}, b"")
    assert await client.ask("a", "remove", path="/tmp/y") == ({}, b"")
    assert "No such file" in (await client.ask("a", "read", path="/tmp/y"))[0]["error"]


async def test_unknown_key_or_agent_is_refused(client):
    assert await client.ask("a", "read", path="/etc/hostname", key="wrong") == ({}, b"")
    assert await client.ask("nobody", "read", path="/etc/hostname") == ({"error": "the sandbox is gone"}, b"")
    assert await client.ask("a", "no-such-thing", path="/etc/hostname") == ({}, b"")
    assert await client.send(b'{"op":"run","ticket":"0"}\n') == b""
    assert await client.send(b'{"op":"code","ticket":"0"}\n') == b""


async def test_too_large_file_is_refused(client):
    assert "larger" in (await client.ask("a", "write", path="/tmp/x", size=1 << 30))[0]["error"]


async def test_background_process_of_command_keeps_running(client):
    out, code = await client.run("b", "(while sleep 0.1; do echo tick; echo tick >> /tmp/ticks; done) & echo first")
    assert (out.split()[0], code) == (b"first", b"0\n")
    await asyncio.sleep(1.5)
    before = len((await client.ask("b", "read", path="/tmp/ticks"))[1])
    await asyncio.sleep(1.0)
    assert len((await client.ask("b", "read", path="/tmp/ticks"))[1]) > before


async def test_ticket_is_valid_for_its_command_only(client):
    dial = f"exec 3<>/dev/tcp/127.0.0.1/9000; echo {'0' * 32} >&3; echo forged >&3; cat <&3; echo over"
    assert await client.run("a", dial) == (b"over\n", b"0\n")


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    head=st.dictionaries(
        st.sampled_from(["op", "agent", "key", "size", "path", "command", "env", "ticket"]),
        st.one_of(
            st.none(), st.booleans(), st.integers(-5, 2**40), st.text(max_size=8), st.lists(st.integers(), max_size=2)
        ),
    ),
    rest=st.binary(max_size=64),
)
@pytest.mark.asyncio(loop_scope="module")
async def test_malformed_request_gets_error_or_no_answer(client, head, rest):
    data = json.dumps({"agent": "a", "key": client.server.key, "size": 0, **head}).encode() + b"\n" + rest
    answer = await client.send(data, half=True)
    assert answer == b"" or json.loads(answer.partition(b"\n")[0]).keys() <= {"error", "stat", "ticket"}


async def test_dead_sandbox_is_noticed_at_once(backend, client):
    sandbox = await backend.create(SandboxSpec())
    agent_tools = client.server.add("c", sandbox)
    await kill_from_outside(sandbox)
    assert (await client.ask("c", "stat", path="/etc/hostname"))[0] == {"error": "the sandbox is gone"}
    with pytest.raises(SandboxDied):
        await agent_tools.failed
    await client.server.remove("c")
    await sandbox.close()
