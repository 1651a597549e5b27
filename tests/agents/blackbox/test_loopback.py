"""loopback.cjs: Node programs can use 127.0.0.1 in a sandbox without a loopback."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import AsyncIterator
from importlib import resources

import pytest
import pytest_asyncio

from clawgym.records import TaskFile
from clawgym.sandbox import Sandbox, SandboxSpec, backend

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(os.geteuid() != 0, reason="chroot sandboxes need root"),
    pytest.mark.skipif(not shutil.which("node", path="/usr/local/bin:/usr/bin"), reason="no Node in /usr"),
]

PORT = 18789
SERVER = f"""
const http = require("node:http");
const server = http.createServer((request, response) => {{
  const {{ remoteAddress, localPort }} = request.socket;
  let body = "";
  request.on("data", (part) => (body += part));
  request.on("end", () => response.end(JSON.stringify({{ remoteAddress, localPort, body, at: server.address() }})));
}});
server.on("error", (error) => (console.log(error.code), process.exit(3)));
server.listen({{ port: {PORT}, host: "127.0.0.1" }}, () => require("node:fs").writeFileSync("/tmp/ready", ""));
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sandbox() -> AsyncIterator[Sandbox]:
    sandboxes = backend("chroot")
    await sandboxes.probe()
    shim = resources.files("clawgym.agents.blackbox").joinpath("loopback.cjs").read_bytes()
    made = await sandboxes.create(SandboxSpec(readonly={"/opt/shim": (TaskFile("loopback.cjs", shim),)}))
    yield made
    await sandboxes.aclose()


async def node(sandbox: Sandbox, code: str) -> str:
    done = await sandbox.exec(["node", "--require", "/opt/shim/loopback.cjs", "-e", code], timeout=60)
    return done.text.strip()


async def serve(sandbox: Sandbox) -> asyncio.Task[str]:
    await sandbox.exec(["rm", "-f", "/tmp/ready"])
    running = asyncio.ensure_future(node(sandbox, SERVER))
    while (await sandbox.exec(["test", "-e", "/tmp/ready"])).exit_code:
        assert not running.done(), running.result()
        await asyncio.sleep(0.05)
    return running


async def ask(sandbox: Sandbox) -> dict[str, object]:
    reader, writer = await asyncio.open_connection(sock=await sandbox.connect(PORT))
    writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 5\r\n\r\nhello")
    answer = await asyncio.wait_for(reader.read(-1), 30)
    writer.close()
    return json.loads(answer.partition(b"\r\n\r\n")[2])


async def test_server_is_reachable_from_host_and_sandbox(sandbox: Sandbox) -> None:
    running = await serve(sandbox)
    local = {"remoteAddress": "127.0.0.1", "localPort": PORT, "body": "hello"}
    expected = {**local, "at": {"address": "127.0.0.1", "family": "IPv4", "port": PORT}}
    assert await ask(sandbox) == expected
    inside = f"fetch('http://localhost:{PORT}/', {{method: 'POST', body: 'hello'}}).then((r) => r.text())"
    assert json.loads(await node(sandbox, f"{inside}.then(console.log)")) == expected
    # A port in use cannot be taken; the port of a killed program is free again.
    assert await node(sandbox, SERVER) == "EADDRINUSE"
    assert await ask(sandbox) == expected
    await sandbox.exec(["bash", "-c", "kill -9 -1"])
    await asyncio.gather(running, return_exceptions=True)
    running = await serve(sandbox)
    assert await ask(sandbox) == expected
    await sandbox.exec(["bash", "-c", "kill -9 -1"])
    await asyncio.gather(running, return_exceptions=True)


async def test_sandbox_program_reaches_host_listener(sandbox: Sandbox) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\nConnection: close\r\n\r\nhost")
        await writer.drain()
        writer.close()

    server = await asyncio.start_unix_server(answer, sock=await sandbox.listen(9000))
    http = "require('http').get({URL}, (r) => r.on('data', (d) => console.log(String(d))))"
    for code in (
        "fetch('http://127.0.0.1:9000/v1').then((r) => r.text()).then(console.log)",
        http.replace("{URL}", "'http://localhost:9000/'"),
        http.replace("{URL}", "{host: '::1', port: '9000', agent: new (require('http').Agent)({keepAlive: true})}"),
        "const s = require('net').connect(9000, () => s.end('GET / HTTP/1.1\\r\\n\\r\\n'));"
        "s.on('data', (d) => console.log(String(d).slice(-4)))",
        "const n = require('net'); const s = new n.Socket(); s.setNoDelay(true); s.connect(9000, '127.0.0.1');"
        "s.write('GET / HTTP/1.1\\r\\n\\r\\n'); s.on('data', (d) => console.log(String(d).slice(-4)))",
    ):
        assert await node(sandbox, code) == "host", code
    server.close()


async def test_listen_on_port_zero(sandbox: Sandbox) -> None:
    code = """
    const net = require("node:net");
    const server = net.createServer((s) => s.end("mine")).listen(0, "127.0.0.1", () => {
      const { port } = server.address();
      net.connect(port, "127.0.0.1").on("data", (d) => console.log(String(d), port > 1023)).on("close", () =>
        server.close(() => console.log(require("node:fs").existsSync(`/tmp/port-${port}`), server.address())));
    });"""
    assert await node(sandbox, code) == "mine true\nfalse null"


async def test_other_addresses_fail(sandbox: Sandbox) -> None:
    say = ".on('error', (e) => console.log(e.code)).on('connect', () => console.log('connected'))"
    for to in ("9, '127.0.0.1'", "9000, '10.0.0.1'", "{port: 18790}"):
        assert await node(sandbox, f"require('net').connect({to}){say}") == "EAFNOSUPPORT", to
    for at in ("9001, '0.0.0.0'", "9001, '::1'", "9001"):
        assert await node(sandbox, f"require('net').createServer().listen({at}){say}") == "EAFNOSUPPORT", at
    path = "const n = require('net'); n.createServer((s) => s.end('x')).listen('/tmp/own', () => n.connect('/tmp/own')"
    assert await node(sandbox, f"{path}.on('data', () => process.exit(7)))") == ""
