"""The control API: open, add turns, close, hold weights; with its own socket and secret."""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
import stat

import aiohttp
import openai
import pytest

from clawgym.errors import GatewayError
from clawgym.gateway.control import Control
from clawgym.pool import sequences_of
from clawgym.records import prompt_ids

ASK = [{"role": "user", "content": "hello"}]


class Owner:
    """A client of the control API."""

    def __init__(self, client, control):
        self._client, self.control = client, control

    async def __call__(self, method, path, body=None, *, token=None):
        headers = {"Authorization": f"Bearer {token or self.control.token}"}
        async with self._client.request(method, f"http://gateway{path}", json=body, headers=headers) as response:
            return response.status, await response.json()


@pytest.fixture
async def owner(make_gateway, tmp_path):
    async with contextlib.AsyncExitStack() as stack:

        async def make(setup):
            control = await stack.enter_async_context(Control(setup.gateway))
            path = tmp_path / "control.sock"
            await control.listen(path=path)
            assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
            connector = aiohttp.UnixConnector(path=str(path))
            client = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
            return Owner(client, control)

        yield make


async def test_open_use_and_close_session(make_gateway, owner):
    setup = await make_gateway("four")
    call = await owner(setup)
    status, group = await call("POST", "/groups", {"task_id": "t", "size": 1})
    assert status == 200
    status, opened = await call(
        "POST",
        "/sessions",
        {"task_id": "t", "group": group["id"], "sampling": {"temperature": 0.5, "stop": ["x"]}, "meta": {"a": 1}},
    )
    assert status == 200
    async with openai.AsyncOpenAI(base_url=opened["base_url"], api_key=opened["secret"]) as client:
        await client.chat.completions.create(model="policy", messages=ASK)
    assert setup.engine.seen[0].sampling.temperature == 0.5
    _, shown = await call("GET", f"/sessions/{opened['id']}")
    assert (shown["turns"], shown["roles"], shown["flawed"]) == (1, {"main": 1}, 0)
    done = {"outcome": "solved", "reward": 1, "rewards": {"strict": 1.0}}
    assert await call("POST", f"/sessions/{opened['id']}/close", done) == (200, {"closed": True})
    episode = setup.pool.episode(opened["id"])
    assert (episode.outcome, episode.reward, episode.meta["a"]) == ("solved", 1.0, 1)
    _, stats = await call("GET", "/stats")
    assert stats["gateway"]["turns"] == 1


async def test_close_without_outcome_revokes_key(make_gateway, owner):
    setup = await make_gateway("four")
    call = await owner(setup)
    await setup.chat(ASK)
    assert (await call("POST", f"/sessions/{setup.session.id}/close", {}))[0] == 200
    with pytest.raises(openai.APIStatusError):
        await setup.chat(ASK)
    setup.gateway.sessions.evict(setup.session.id)
    with pytest.raises(openai.AuthenticationError):
        await setup.chat(ASK)
    assert (await call("POST", f"/sessions/{setup.session.id}/close", {"outcome": "failed", "reward": 0}))[0] == 200
    assert setup.pool.episode(setup.session.id).outcome == "failed"


async def test_add_turns(make_gateway, owner):
    setup = await make_gateway("four")
    call = await owner(setup)
    rows = [
        {"prompt_ids": [1, 2], "sampled_ids": [3, 4], "logprobs": [-0.5, -0.25], "policy_version": 3},
        {"prompt_ids": [1, 2, 3, 4, 5], "sampled_ids": [6], "logprobs": [-1], "policy_version": 3},
        {"prompt_ids": [1, 2, 9], "sampled_ids": [7], "logprobs": [-2.0]},
    ]
    assert await call("POST", f"/sessions/{setup.session.id}/turns", {"turns": rows[:1]}) == (200, {"turns": 1})
    assert await call("POST", f"/sessions/{setup.session.id}/turns", {"turns": rows[1:]}) == (200, {"turns": 3})
    turns = setup.turns
    assert [t.parent for t in turns] == [None, 0, None]
    assert [list(prompt_ids(turns, n)) for n in range(3)] == [row["prompt_ids"] for row in rows]
    assert [sum(s.mask) for s in sequences_of(turns)] == [3, 1]
    for bad, named in [
        ({"prompt_ids": "x"}, "turns[0].prompt_ids"),
        ({"prompt_ids": [1], "sampled_ids": [2], "logprobs": []}, "turns[0]"),
        ({"prompt_ids": [1], "tokens": []}, "turns[0].tokens"),
    ]:
        status, answer = await call("POST", f"/sessions/{setup.session.id}/turns", {"turns": [bad]})
        assert status == 400
        assert named in answer["error"]["message"]
    assert len(setup.turns) == 3


async def test_added_turn_does_not_continue_flawed_turn(make_gateway, owner):
    setup = await make_gateway("four")
    call = await owner(setup)
    rows = [
        {"prompt_ids": [1], "sampled_ids": [2], "logprobs": [-0.5]},
        {"prompt_ids": [1, 2, 3], "sampled_ids": [4], "logprobs": [-0.5], "flaw": "aborted"},
        {"prompt_ids": [1, 2, 3, 4, 5], "sampled_ids": [6], "logprobs": [-0.5]},
    ]
    assert (await call("POST", f"/sessions/{setup.session.id}/turns", {"turns": rows}))[0] == 200
    assert [t.parent for t in setup.turns] == [None, 0, 0]
    assert [sum(s.mask) for s in sequences_of(setup.turns)] == [2]


async def test_hold_weights_between_turns(make_gateway, owner):
    setup = await make_gateway("one two three", pause=0.01)
    call = await owner(setup)
    first = asyncio.ensure_future(setup.chat(ASK))
    await setup.engine.called.wait()
    assert (await call("POST", "/weights/hold", {}))[0] == 200
    assert first.done() or len(setup.turns) == 1, "held once the running turn has ended"
    second = asyncio.ensure_future(setup.chat(ASK))
    await asyncio.sleep(0.1)
    assert len(setup.engine.seen) == 1
    assert (await call("POST", "/weights/hold", {}))[0] == 200, "twice is once"
    assert (await call("POST", "/weights/release", {"policy_version": 5}))[0] == 200
    await asyncio.gather(first, second)
    assert [t.policy_version for t in setup.turns] == [0, 5]


async def test_control_token_is_required(make_gateway, owner):
    setup = await make_gateway("four")
    call = await owner(setup)
    for method, path in [
        ("POST", "/sessions"),
        ("GET", f"/sessions/{setup.session.id}"),
        ("POST", f"/sessions/{setup.session.id}/close"),
        ("POST", "/weights/hold"),
        ("GET", "/stats"),
        ("GET", "/nothing"),
    ]:
        status, _ = await call(method, path, {}, token=setup.session.secret)
        assert status == 401
    assert (await call("GET", "/nothing"))[0] == 404
    status, answer = await call("POST", "/sessions", {"chanel": "x"})
    assert status == 400
    assert "'chanel' is unknown" in answer["error"]["message"]
    assert (await call("POST", "/sessions", {"group": "none"}))[0] == 409
    assert (await call("POST", "/sessions/nobody/close", {}))[0] == 409
    async with aiohttp.ClientSession() as client:
        headers = {"Authorization": f"Bearer {call.control.token}"}
        for path in ("/sessions", "/stats", f"/s/{setup.session.id}/close"):
            async with client.post(setup.base_url.split("/s/")[0] + path, headers=headers, json={}) as response:
                assert response.status == 404, "the agents' listener knows nothing of it"


async def test_unexpected_failure_and_odd_token_are_answered(make_gateway, owner, tmp_path, monkeypatch):
    call = await owner(setup := await make_gateway("four"))

    def fail():
        raise RuntimeError("a secret of the gateway")

    monkeypatch.setattr(setup.gateway, "stats", fail)
    status, answer = await call("GET", "/stats")
    assert (status, answer["error"]["message"]) == (500, "the gateway failed unexpectedly: see its log")
    reader, writer = await asyncio.open_unix_connection(tmp_path / "control.sock")
    writer.write(b"GET /stats HTTP/1.1\r\nHost: gateway\r\nAuthorization: Bearer \xff\r\n\r\n")
    assert (await reader.readline()).split()[1] == b"401"
    writer.close()
    await writer.wait_closed()


async def test_public_address_needs_certificate(make_gateway, tmp_path):
    setup = await make_gateway("four")
    with pytest.raises(GatewayError, match="--tls-cert"):
        await setup.gateway.listen(host="0.0.0.0")
    with pytest.raises(GatewayError, match="cannot listen"):
        await setup.gateway.listen(port=int(setup.base_url.split(":")[2].split("/")[0]))
    process = await asyncio.create_subprocess_exec(
        "openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost",
        "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", tmp_path / "key.pem", "-out", tmp_path / "cert.pem",
        stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    assert await process.wait() == 0
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    address = await setup.gateway.listen(host="127.0.0.1", tls=tls)
    assert address.url.startswith("https://127.0.0.1:")
    trust = ssl.create_default_context(cafile=str(tmp_path / "cert.pem"))
    async with aiohttp.ClientSession() as client:
        url = setup.gateway.base_url(setup.session, address) + "/chat/completions"
        headers = {"Authorization": f"Bearer {setup.session.secret}"}
        async with client.post(url, json={"messages": ASK}, headers=headers, ssl=trust) as response:
            assert (await response.json())["choices"][0]["message"]["content"] == "four"
