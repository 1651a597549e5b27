"""From inside a sandbox an agent reaches its own session, and nothing else: no other session, no control API, no
outcome. Real sandboxes of every backend; the programs in them may send any bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from clawgym.bounds import LARGEST_BODY
from clawgym.gateway.control import Control
from clawgym.gateway.request import SessionCredentials
from clawgym.gateway.server import Gateway
from clawgym.pool import Pool
from clawgym.sandbox import Backend, Sandbox, SandboxSpec

from ..sandbox.conftest import backend, docker_engine, traits
from .scripted import ScriptedEngine

__all__ = ["backend", "docker_engine", "traits"]

pytestmark = pytest.mark.asyncio(loop_scope="module")

PORT = 9000
PROBE = (Path(__file__).parent / "inside.py").read_text()
BODY = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8})


class SandboxedAgent:
    """A sandbox with an agent, a gateway that it can reach, the control API, and the session of another agent."""

    def __init__(self, sandbox: Sandbox, where: int | str, gateway: Gateway, control: Control) -> None:
        self.sandbox = sandbox
        self.where = where
        self.gateway = gateway
        self.control = control
        self.elsewhere: list[Any] = []
        self.mine: SessionCredentials
        self.other: SessionCredentials

    def raw(
        self, path: str = "", *, method: str = "POST", body: str = BODY, key: str | None = "", head: str = ""
    ) -> str:
        """One raw request; ``key`` is the agent's own by default, None leaves it out."""
        path = path or f"/s/{self.mine.id}/v1/chat/completions"
        lines = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", "Connection: close"]
        if "length:" not in head.lower() and "chunked" not in head.lower():
            lines.append(f"Content-Length: {len(body.encode())}")
        if key is not None:
            lines.append(f"Authorization: Bearer {key or self.mine.secret}")
        return "\r\n".join([*lines, *([head] if head else []), "", body])

    async def ask(self, requests: Mapping[str, str], **more: Any) -> dict[str, Any]:
        """Send ``requests`` from inside the sandbox."""
        asked = {"where": self.where, "requests": dict(requests), **more}
        argv = [*self.sandbox.tool("python3"), "-I", "-S", "-c", PROBE]
        done = await self.sandbox.exec(
            argv, stdin=json.dumps(asked).encode(), timeout=120, stdout_only=True, max_output=2**20
        )
        assert done.exit_code == 0, done.stderr.decode()
        return json.loads(done.output)

    def check_untouched(self) -> None:
        """Check that the other session is unchanged and no episode has an outcome."""
        pool = self.gateway.pool
        assert pool.turns(self.other.id) == ()
        for session in (self.mine, self.other):
            episode = pool.episode(session.id)
            assert (episode.state, episode.outcome, episode.reward) == ("open", None, None)
            assert session.id in [e.id for e in pool.episodes()]
        assert len(list(pool.episodes())) == 2


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def inside(
    backend: Backend, model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[SandboxedAgent]:
    await backend.probe()
    folder = tmp_path_factory.mktemp("gateway")
    async with contextlib.AsyncExitStack() as stack:
        pool = stack.enter_context(contextlib.closing(Pool(folder / "pool.db")))
        sandbox = await backend.create(SandboxSpec())
        stack.push_async_callback(sandbox.close)
        engine = ScriptedEngine(model_folder, lambda prompt, n: "hello there")
        gateway = await stack.enter_async_context(Gateway(engine, pool))
        control = await stack.enter_async_context(Control(gateway))
        sock = await sandbox.listen(PORT)
        await gateway.listen(sock=sock)
        where = PORT if sandbox.isolation.features["loopback"] else f"/dev/listen-{PORT}"
        made = SandboxedAgent(sandbox, where, gateway, control)
        open_control = await control.listen()
        await control.listen(path=folder / "control.sock")
        port = int(open_control.url.rpartition(":")[2])
        made.elsewhere = [["127.0.0.1", port], ["localhost", port], ["::1", port], str(folder / "control.sock")]
        made.elsewhere.append(f"/proc/{os.getpid()}/root{folder}/control.sock")
        made.mine = await gateway.open_session()
        made.other = await gateway.open_session()
        yield made
        made.check_untouched()


async def test_agent_in_sandbox_reaches_its_session(inside: SandboxedAgent) -> None:
    stream = json.dumps({**json.loads(BODY), "stream": True})
    models = inside.raw(f"/s/{inside.mine.id}/v1/models", method="GET", body="")
    got = await inside.ask({"whole": inside.raw(), "stream": inside.raw(body=stream), "models": models})
    assert got["answers"] == {"whole": [200], "stream": [200], "models": [200]}
    assert "hello" in json.loads(got["bodies"]["whole"])["choices"][0]["message"]["content"]
    assert "data: [DONE]" in got["bodies"]["stream"]
    turns = inside.gateway.pool.turns(inside.mine.id)
    assert len(turns) == 2
    assert all(turn.flaw is None and turn.sampled_ids for turn in turns)


async def test_control_api_is_unreachable(inside: SandboxedAgent) -> None:
    got = await inside.ask({}, elsewhere=inside.elsewhere)
    assert got["reached"] == []


def requests_to_other_sessions(i: SandboxedAgent) -> dict[str, str]:
    """Requests to another session, whose id is known but not its secret."""
    chat, other, mine = "v1/chat/completions", i.other.id, i.mine.id
    paths = {
        "plain": f"/s/{other}/{chat}",
        "models": f"/s/{other}/v1/models",
        "up": f"/s/{mine}/../{other}/{chat}",
        "up twice": f"/s/{mine}/v1/../../{other}/{chat}",
        "encoded dots": f"/s/{mine}/%2e%2e/{other}/{chat}",
        "encoded slashes": f"/s/{mine}%2f..%2f{other}/{chat}",
        "encoded twice": f"/s/{mine}%252f..%252f{other}/{chat}",
        "backslashes": f"/s/{mine}\\..\\{other}/{chat}",
        "encoded other": f"/s/%{ord(other[0]):02x}{other[1:]}/{chat}",
        "empty parts": f"//s//{other}//{chat}",
        "dot": f"/./s/./{other}/./{chat}",
        "parameters": f"/s/{other};{mine}/{chat}",
        "query": f"/s/{other}/{chat}?session={mine}",
        "fragment": f"/s/{other}/{chat}#/s/{mine}/{chat}",
        "nul": f"/s/{other}%00{mine}/{chat}",
        "space": f"/s/{other}%20/{chat}",
        "newline": f"/s/{other}%0d%0aAuthorization:%20Bearer/{chat}",
        "absolute": f"http://gateway/s/{other}/{chat}",
        "absolute with a user": f"http://{mine}:{i.mine.secret}@gateway/s/{other}/{chat}",
        "upper case": f"/S/{other.upper()}/{chat}",
        "both": f"/s/{mine},{other}/{chat}",
        "responses": f"/s/{other}/v1/responses",
        "messages": f"/s/{other}/v1/messages",
        "wildcard": f"/s/*/{chat}",
        "percent": f"/s/%/{chat}",
        "sql": f"/s/{other}'%20or%20'1'='1/{chat}",
        "like": f"/s/{other[:4]}%25/{chat}",
    }
    found = {f"path: {name}": i.raw(path) for name, path in paths.items()}
    guesses = ["", "0", "1", "null", "admin", other[:-1], other + "0", other[::-1], "a" * 4000, "../" * 50]
    found |= {f"guess: {g[:20]}": i.raw(f"/s/{g}/{chat}") for g in guesses}
    at = f"/s/{other}/{chat}"
    digest = i.gateway.pool.episode(other).secret_sha256
    keys = [None, " ", "null", "undefined", "*", "%", other, digest, i.mine.secret[:-1], i.control.token[:-1], "é" * 20]
    found |= {f"key: {key and key[:12]}": i.raw(at, key=key) for key in keys}
    heads = {
        "two keys": f"Authorization: Bearer {i.mine.secret}",
        "basic": f"Authorization: Basic {i.mine.secret}",
        "anthropic": f"x-api-key: {i.mine.secret}",
        "forwarded": "X-Forwarded-For: 127.0.0.1\r\nX-Forwarded-Host: localhost\r\nForwarded: for=127.0.0.1",
        "original url": f"X-Original-URL: /s/{i.mine.id}/v1/models\r\nX-Rewrite-URL: /s/{i.mine.id}/v1/models",
        "override": "X-HTTP-Method-Override: GET",
        "session": f"X-Session: {i.mine.id}\r\nX-Clawgym-Session: {i.mine.id}",
        "folded": f"X-A: b\r\n Authorization: Bearer {i.mine.secret}",
        "cookie": f"Cookie: session={i.mine.id}; key={i.mine.secret}",
        "upgrade": "Upgrade: websocket\r\nSec-WebSocket-Key: x\r\nSec-WebSocket-Version: 13",
        "h2c": "Upgrade: h2c\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA",
        "expect": "Expect: 100-continue",
    }
    found |= {f"head: {name}": i.raw(at, head=head) for name, head in heads.items()}
    methods = ("GET", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE", "CONNECT", "PROPFIND")
    return found | {f"method: {method}": i.raw(at, method=method) for method in methods}


def requests_to_control_api(i: SandboxedAgent) -> dict[str, str]:
    """Requests of an agent to open, close or reward sessions."""
    outcome = json.dumps({"outcome": "solved", "reward": 1.0})
    paths = ["/sessions", f"/sessions/{i.mine.id}", f"/sessions/{i.mine.id}/close", f"/sessions/{i.mine.id}/turns"]
    paths += ["/groups", "/weights/hold", "/weights/release", "/stats", "/control", "/admin", "/metrics", "/"]
    paths += [f"/s/{i.mine.id}{end}" for end in ("", "/", "/close", "/outcome", "/v1", "/v1/close", "/v1/outcome")]
    paths += [f"/s/{i.mine.id}/../../sessions/{i.mine.id}/close", f"/s/{i.mine.id}/v1/..%2f..%2f..%2fstats"]
    found: dict[str, str] = {}
    for path in paths:
        for method in ("POST", "GET", "PUT", "DELETE"):
            found[f"{method} {path}"] = i.raw(path, method=method, body=outcome)
    for name, key in (("no key", None), ("guess", "control"), ("part", i.control.token[:20])):
        found[name] = i.raw(f"/sessions/{i.mine.id}/close", body=outcome, key=key)
    # The owner's token does not work on the agents' listener either.
    found["the token"] = i.raw(f"/sessions/{i.mine.id}/close", body=outcome, key=i.control.token)
    found["the token, chat"] = i.raw(key=i.control.token)
    return found


@pytest.mark.parametrize("ways", [requests_to_other_sessions, requests_to_control_api])
async def test_other_requests_are_refused(inside: SandboxedAgent, ways: Any) -> None:
    before = len(inside.gateway.pool.turns(inside.mine.id))
    requests = ways(inside)
    got = await inside.ask(requests)
    wrong = {name: codes for name, codes in got["answers"].items() if not codes or any(200 <= c < 400 for c in codes)}
    assert wrong == {}, "each is refused in words"
    secrets = (inside.other.secret, inside.control.token, inside.gateway.pool.episode(inside.other.id).secret_sha256)
    assert not [name for name, text in got["bodies"].items() if any(secret in text for secret in secrets)]
    inside.check_untouched()
    assert len(inside.gateway.pool.turns(inside.mine.id)) == before
    assert inside.gateway.stats()["running"] == 0


async def test_smuggled_requests_are_refused(inside: SandboxedAgent) -> None:
    """One request hidden in another: the inner one has no key and is refused."""
    outcome = json.dumps({"outcome": "solved", "reward": 1.0})
    hidden = {
        "other": inside.raw(f"/s/{inside.other.id}/v1/chat/completions"),
        "close": inside.raw(f"/sessions/{inside.mine.id}/close", body=outcome),
    }
    requests: dict[str, str] = {}
    for name, inner in hidden.items():
        chunk = f"{len(BODY):x}\r\n{BODY}\r\n0\r\n\r\n{inner}"
        framings = {
            "pipelined": (f"Content-Length: {len(BODY)}", BODY + inner),
            "length and chunks": (f"Content-Length: {len(chunk)}\r\nTransfer-Encoding: chunked", chunk),
            "chunks and length": (f"Transfer-Encoding: chunked\r\nContent-Length: {len(BODY)}", BODY + inner),
            "two lengths": (f"Content-Length: {len(BODY)}\r\nContent-Length: {len(BODY + inner)}", BODY + inner),
            "space before the colon": (f"Content-Length : 0\r\nContent-Length: {len(BODY)}", BODY + inner),
            "plus": (f"Content-Length: +{len(BODY)}", BODY + inner),
            "other chunked": (f"Transfer-Encoding: xchunked\r\nContent-Length: {len(BODY)}", BODY + inner),
            "bare newline": (f"X-A: b\nContent-Length: 0\r\nContent-Length: {len(BODY)}", BODY + inner),
            "chunk extension": (
                "Transfer-Encoding: chunked",
                f"{len(BODY):x};a=b\r\n{BODY}\r\n0\r\nX: y\r\n\r\n{inner}",
            ),
        }
        for framing, (head, body) in framings.items():
            raw = inside.raw(body=body, head=head).replace("Connection: close\r\n", "", 1)
            requests[f"{name}: {framing}"] = raw
    got = await inside.ask(requests)
    for name, codes in got["answers"].items():
        assert all(code >= 400 for code in codes[1:]), name
    assert any(codes[:1] == [200] for codes in got["answers"].values())
    inside.check_untouched()


async def test_request_fields_do_not_control_gateway(inside: SandboxedAgent) -> None:
    fields = {"outcome": "solved", "reward": 1, "session": inside.other.id, "adapter": "other", "policy_version": 99}
    fields |= {"group": "g", "meta": {"outcome": "solved"}, "model": inside.other.id, "user": inside.other.id}
    head = "x-clawgym-outcome: solved\r\nx-clawgym-reward: 1\r\nx-clawgym-session: " + inside.other.id
    got = await inside.ask({"body": inside.raw(body=json.dumps({**json.loads(BODY), **fields}), head=head)})
    assert got["answers"]["body"] == [200]
    inside.check_untouched()
    turn = inside.gateway.pool.turns(inside.mine.id)[-1]
    assert turn.policy_version == 0
    assert inside.gateway.engine.seen[-1].adapter is None


async def test_too_large_and_missing_bodies(inside: SandboxedAgent) -> None:
    def head(length: int, extra: str = "") -> str:
        return inside.raw(body="", head=f"Content-Length: {length}{extra}")

    deep = "[" * 50_000 + "]" * 50_000
    requests = {
        "not json": inside.raw(body="{"),
        "no object": inside.raw(body="[]"),
        "deep": inside.raw(body=f'{{"messages": {deep}}}'),
        "deep content": inside.raw(body=f'{{"messages": [{{"role": "user", "content": {deep}}}]}}'),
        "not utf-8": inside.raw(body=BODY.replace("hi", "\xff\xfe"), head=f"Content-Length: {len(BODY)}"),
        "many headers": inside.raw(head="\r\n".join(f"X-{n}: y" for n in range(20_000))),
        "long header": inside.raw(head="X-A: " + "y" * 100_000),
        "long path": inside.raw("/s/" + "y" * 100_000),
        "negative": head(-1),
        "no number": head(0, "x"),
        "bad chunk": inside.raw(body="zz\r\n", head="Transfer-Encoding: chunked"),
        "no http": "hello\r\n\r\n",
        "tls": "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    }
    large = {
        "too large": (head(LARGEST_BODY + 1), LARGEST_BODY + 1),
        "too large, no length": (
            inside.raw(body="", head="Transfer-Encoding: chunked") + "ffffffff\r\n",
            LARGEST_BODY + 9,
        ),
    }
    got = await inside.ask(requests, large=large)
    wrong = {name: codes for name, codes in got["answers"].items() if any(code < 400 for code in codes)}
    assert wrong == {}
    assert got["answers"]["too large"] in ([413], []), "a client that is still sending may not hear the answer"
    assert not {n for n, c in got["answers"].items() if any(code >= 500 for code in c)}
    assert (await inside.ask({"after": inside.raw()}))["answers"]["after"] == [200]
    inside.check_untouched()


async def test_idle_connections_do_not_block_others(inside: SandboxedAgent) -> None:
    got = await inside.ask({"still": inside.raw()}, idle=400)
    assert got["held"] == 400
    assert got["answers"]["still"] == [200]


async def test_connections_per_sandbox_are_limited(inside: SandboxedAgent) -> None:
    sock = await inside.sandbox.listen(PORT + 1)
    address = await inside.gateway.listen(sock=sock, connections=64)
    where = f"/dev/listen-{PORT + 1}" if isinstance(inside.where, str) else PORT + 1
    before = psutil.Process().num_fds()
    asking = asyncio.ensure_future(inside.ask({"none left": inside.raw()}, where=where, idle=1000, rest=3.0))
    most = 0
    while not asking.done():
        await asyncio.sleep(0.1)
        most = max(most, psutil.Process().num_fds() - before)
    got = await asking
    assert got["answers"]["none left"] == []
    assert 60 < most < 250, "those that were just refused are not closed yet"
    assert (await inside.ask({"again": inside.raw()}, where=where))["answers"]["again"] == [200]
    await inside.gateway.unlisten(address)
    await inside.gateway.unlisten(address)
    assert (await inside.ask({"closed": inside.raw()}, where=where))["answers"]["closed"] == []
    assert (await inside.ask({"open": inside.raw()}))["answers"]["open"] == [200]
    assert sock.fileno() == -1
