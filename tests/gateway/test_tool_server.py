"""The tools of a task, called over HTTP with the official MCP client and with raw requests."""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import httpx
import pytest

from clawgym.errors import InfraError
from clawgym.gateway import tool_server
from clawgym.gateway.tool_server import OfferedTools
from clawgym.records import Image, Observation, ToolCall
from clawgym.tools import CallRefused
from clawgym.tools.protocol import SUBMIT_TOOL, function, ignore

pytest.importorskip("mcp")
TEXT = {"text": {"type": "string"}}


class EchoTools:
    """Answers calls by their text, and keeps them."""

    schemas = (function("echo", "Repeat it.", TEXT, ["text"]), function("late", "A withheld tool.", {}), SUBMIT_TOOL)

    def __init__(self) -> None:
        self.calls: list[ToolCall] = []
        self.running = self.most = 0
        self.go = asyncio.Event()
        self.go.set()

    async def call_all(
        self,
        calls: Sequence[ToolCall],
        *,
        timeout: float | None = None,
        on_observation: Callable[[Observation], None] = ignore,
    ) -> list[Observation]:
        self.calls += calls
        self.running += len(calls)
        self.most = max(self.most, self.running)
        await self.go.wait()
        self.running -= len(calls)
        return [self._answer(call) for call in calls]

    def _answer(self, call: ToolCall) -> Observation:
        match call.arguments.get("text"):
            case None:
                return CallRefused("[error: echo needs the argument 'text']", call.id)
            case "picture":
                return Observation("look", call.id, Image("0" * 64, b"png"))
            case "host fails":
                raise InfraError("the host failed: look at it")
            case text:
                return Observation(text, call.id)

    async def aclose(self) -> None: ...


class Served:
    """A session with tools, and the ways to call them."""

    def __init__(self, setup: Any) -> None:
        self.setup, self.tools = setup, EchoTools()
        self.offered = setup.gateway.offered[setup.session.id] = OfferedTools(self.tools)
        self.url = setup.base_url.removesuffix("/v1") + "/mcp"
        self.key = {"Authorization": f"Bearer {setup.session.secret}"}

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator[Any]:
        """The official client, connected."""
        import httpx2
        from mcp.client.session import ClientSession
        from mcp.client.streamable_http import streamable_http_client

        async with (
            httpx2.AsyncClient(headers=self.key) as http,
            streamable_http_client(self.url, http_client=http) as (reading, writing, *_),
            ClientSession(reading, writing) as client,
        ):
            await client.initialize()
            yield client

    async def post(self, body: Any, **more: Any) -> httpx.Response:
        async with httpx.AsyncClient(headers=self.key) as http:
            given = {"content": body} if isinstance(body, bytes) else {"json": body}
            return await http.post(self.url, **given, **more)

    async def call(self, text: str) -> dict[str, Any]:
        params = {"name": "echo", "arguments": {"text": text}}
        return (await self.post({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params})).json()


@pytest.fixture
async def served(make_gateway: Any) -> Served:
    return Served(await make_gateway(["Hello."]))


async def test_official_client_lists_and_calls(served: Served) -> None:
    """There is no ``submit``; results are texts and pictures; a refused call is an error for the model."""
    async with served.client() as client:
        await client.send_ping()
        listed = (await client.list_tools()).tools
        assert [(tool.name, tool.description) for tool in listed] == [
            ("echo", "Repeat it."),
            ("late", "A withheld tool."),
        ]
        assert listed[0].input_schema == EchoTools.schemas[0]["function"]["parameters"]
        said = await client.call_tool("echo", {"text": "hé"})
        picture = await client.call_tool("echo", {"text": "picture"})
        refused = await client.call_tool("echo", {})
        submitted = await client.call_tool("submit", {"message": "x"})
    assert ([part.text for part in said.content], said.is_error) == (["hé"], False)
    assert picture.content[0].text == "look"
    assert (base64.b64decode(picture.content[1].data), picture.content[1].mime_type) == (b"png", "image/png")
    assert (refused.is_error, refused.content[0].text) == (True, "[error: echo needs the argument 'text']")
    assert (submitted.is_error, submitted.content[0].text) == (True, "[error: there is no tool 'submit']")
    assert [(one.call.id, one.call.arguments) for one in served.offered.executed] == [
        ("task_1", {"text": "hé"}),
        ("task_2", {"text": "picture"}),
        ("task_3", {}),
    ]


async def test_new_client_of_sdk_falls_back_to_the_handshake(served: Served) -> None:
    """Clients of protocol 2026-07-28 first ask for ``server/discover``."""
    answer = (await served.post({"jsonrpc": "2.0", "id": 1, "method": "server/discover", "params": {}})).json()
    assert answer["error"]["code"] == -32601
    for version, chosen in (("2025-03-26", "2025-03-26"), ("2030-01-01", "2025-11-25")):
        params = {"protocolVersion": version, "capabilities": {}, "clientInfo": {"name": "x", "version": "1"}}
        answer = (await served.post({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": params})).json()
        assert answer["result"]["protocolVersion"] == chosen


@pytest.mark.parametrize("text", ["2068", "[1]", '"x"', "null"])
async def test_text_that_is_other_json_is_no_first_part(served: Served, text: str) -> None:
    parts = (await served.call(text))["result"]["content"]
    assert [part["text"] for part in parts] == ["", text]
    assert len((await served.call('{"a": 1}'))["result"]["content"]) == 1


async def test_withheld_tools_are_neither_listed_nor_called(served: Served) -> None:
    served.offered.withheld = {"late"}
    async with served.client() as client:
        assert [tool.name for tool in (await client.list_tools()).tools] == ["echo"]
        assert "there is no tool" in (await client.call_tool("late", {})).content[0].text
    assert served.tools.calls == []


async def test_nothing_is_called_while_the_user_has_the_word(served: Served) -> None:
    served.offered.accepting = False
    assert "before the next message of the user" in str(await served.call("x"))
    assert served.tools.calls == []
    assert served.offered.executed == []


async def test_one_call_runs_at_a_time_and_few_wait(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool_server, "MOST_WAITING_CALLS", 3)
    served.tools.go.clear()
    calls = [asyncio.ensure_future(served.call(str(n))) for n in range(5)]
    done, _ = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
    assert all("calls are waiting" in str(call.result()) for call in done)
    served.tools.go.set()
    answers = [str(answer) for answer in await asyncio.gather(*calls)]
    assert sum("calls are waiting" in answer for answer in answers) == 2
    assert (len(served.tools.calls), served.tools.most) == (3, 1)


@pytest.mark.parametrize(("bound", "value"), [("MOST_TOOL_CALLS", 2), ("RECORDED_CALLS", 50)])
async def test_calls_of_an_episode_are_bounded(
    served: Served, monkeypatch: pytest.MonkeyPatch, bound: str, value: int
) -> None:
    monkeypatch.setattr(tool_server, bound, value)
    answers = [str(await served.call("x" * 10)) for _ in range(3)]
    assert ["too many calls" in answer for answer in answers] == [False, False, True]
    assert len(served.offered.executed) == 2


async def test_failure_of_the_host_is_kept_and_ends_the_tools(served: Served) -> None:
    for text in ("host fails", "x"):
        assert (await served.call(text))["error"]["message"] == "the tools have ended"
    assert isinstance(served.offered.failure, InfraError)
    assert len(served.offered.executed) == 1


async def test_interrupted_call_is_recorded(served: Served) -> None:
    """A program that goes away before the answer cannot hide that it called. Its session stays in memory meanwhile."""
    served.tools.go.clear()
    served.setup.gateway.sessions._resident = 1
    call = asyncio.ensure_future(served.call("x"))
    async with asyncio.timeout(20):
        while not served.tools.calls:  # noqa: ASYNC110 (there is no event for it)
            await asyncio.sleep(0.01)
    await served.setup.gateway.open_session()
    await served.setup.gateway.stop_session(served.setup.session.id)
    assert [(one.call.arguments, one.observation) for one in served.offered.executed] == [({"text": "x"}, None)]
    with contextlib.suppress(httpx.NetworkError, httpx.ProtocolError):  # and no time-out: the call is ended
        await call
    refused = await served.post({"jsonrpc": "2.0", "id": 1, "method": "tools/list"})
    assert refused.status_code == 403


async def test_wrong_keys_other_sessions_and_sessions_without_tools(served: Served) -> None:
    body = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
    other = await served.setup.gateway.open_session()
    key = {"Authorization": f"Bearer {other.secret}"}
    assert (await served.post(body, headers={"Authorization": "Bearer x"})).status_code == 401
    assert (await served.post(body, headers=key)).status_code == 401
    async with httpx.AsyncClient(headers=key) as http:
        url = served.url.replace(served.setup.session.id, other.id)
        assert (await http.post(url, json=body)).status_code == 404
    async with httpx.AsyncClient(headers=served.key) as http:
        assert (await http.get(served.url)).status_code == 405
        assert (await http.delete(served.url)).status_code == 405


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b"[]", 400),
        (b"[" * 300 + b"]" * 300, 413),
        (b'{"id": 1, "method": "ping"}', 400),
        (b'{"jsonrpc": "2.0", "id": [1], "method": "ping"}', 400),
        (b'{"jsonrpc": "2.0", "id": 1, "method": 7}', 400),
        (b'{"jsonrpc": "2.0", "id": 1, "method": "ping", "params": []}', 200),
        (b'{"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": 7}}', 200),
        (b'{"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "echo", "arguments": [1]}}', 200),
        (b'{"jsonrpc": "2.0", "method": "notifications/initialized"}', 202),
        (b'{"jsonrpc": "2.0", "method": "tools/call", "params": {"name": "echo", "arguments": {"text": "x"}}}', 202),
        (b'{"jsonrpc": "2.0", "id": 1, "result": {}}', 202),
    ],
)
async def test_malformed_messages(served: Served, body: bytes, status: int) -> None:
    answer = await served.post(body)
    assert answer.status_code == status
    if status == 200:
        assert answer.json()["error"]["code"] == -32602
    assert served.tools.calls == []
