"""The browser's pipe against hostile browsers: every violation ends in a sandbox error, in bounded time and memory."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clawgym.desktop import browser as module
from clawgym.desktop.browser import Browser
from clawgym.errors import SandboxDied, SandboxError
from clawgym.sandbox.program import Program

Answer = Callable[[dict[str, Any]], Any]


@contextlib.asynccontextmanager
async def browser(answer: Answer) -> AsyncIterator[Browser]:
    """A browser that answers each message with ``answer(message)``: bytes as they are, else JSON as the result."""
    ours, theirs = socket.socketpair()

    async def serve() -> None:
        reader, writer = await asyncio.open_connection(sock=theirs)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                message = json.loads((await reader.readuntil(b"\0"))[:-1])
                said = answer(message)
                if not isinstance(said, bytes):
                    said = json.dumps({"id": message["id"], "result": said}).encode() + b"\0"
                writer.write(said)
                if not said:
                    break
        writer.close()

    serving = asyncio.ensure_future(serve())
    try:
        made = Browser(None, Program(*await asyncio.open_connection(sock=ours, limit=1 << 19)))  # type: ignore[arg-type]
        made._task = asyncio.ensure_future(made._listen())
        try:
            yield made
        finally:
            await made.aclose()
    finally:
        serving.cancel()
        await asyncio.wait([serving])
        theirs.close()


def honest(value: Any) -> Answer:
    """Of a browser with one page, on which every expression comes to ``value`` and which consists of it."""

    def answer(message: dict[str, Any]) -> Any:
        if message["method"] == "Target.getTargets":
            return {"targetInfos": [{"type": "page", "url": "http://x/", "targetId": "1"}]}
        if message["method"] == "Target.attachToTarget":
            return {"sessionId": "s"}
        return {"nodes": value, "result": {"value": value}}

    return answer


async def test_honest_browser() -> None:
    async with browser(honest("[1, 2, 3, 4.0]")) as made:
        assert await made.bounding_box("#a") == (1, 2, 3, 4)
    nodes = [
        {"nodeId": "1", "role": {"value": "button"}, "name": {"value": "Send"}},
        {"nodeId": "2", "parentId": "1", "role": {"value": "generic"}, "name": {"value": "x"}, "childIds": ["5", "4"]},
        {"nodeId": "3", "parentId": "1", "role": {"value": "StaticText"}, "name": {"value": "Send"}},
        {"nodeId": "4", "parentId": "2", "role": {"value": "textbox"}, "value": {"value": 3}},
        {"nodeId": "5", "parentId": "2", "role": {"value": "link"}, "name": {"value": "more"}},
    ]
    nodes[0]["childIds"] = ["2", "3"]
    async with browser(honest(nodes)) as made:
        assert [tuple(node.values()) for node in await made.tree()] == [
            ("button", "Send", "", 0),
            ("link", "more", "", 1),
            ("textbox", "", "3", 1),
        ]


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"\0",
        b"{}x\0",
        b"[1]\0",
        b"\xff\xfe\0",
        b"[" * 60_000 + b"\0",
        b"x" * (1 << 20),
        b'{"id": 1' + b" " * (1 << 20),
    ],
)
async def test_invalid_messages_end_the_browser(said: bytes) -> None:
    async with browser(lambda message: said) as made:
        async with asyncio.timeout(5):
            with pytest.raises(SandboxDied, match="begin the episode again"):
                await made.tree()
            with pytest.raises(SandboxDied):
                await made.bounding_box("#a")


@pytest.mark.parametrize("value", [None, 3, "", "{", "[1, 2, 3]", "[1e999, 1, 1, 1]", "[" * 60_000, {"a": 1}])
async def test_invalid_positions_end_the_browser(value: Any) -> None:
    async with browser(honest(value)) as made:
        with pytest.raises(SandboxError, match="no element"):
            await made.bounding_box("#a")


@pytest.mark.parametrize("nodes", [None, {}, [None], ["x"], [{"nodeId": []}, 3]])
async def test_invalid_trees_end_the_browser(nodes: Any) -> None:
    async with browser(honest(nodes)) as made:
        with pytest.raises(SandboxDied, match="tree"):
            await made.tree()


async def test_a_tree_without_end_is_cut() -> None:
    node = {"role": {"value": "x" * 700}, "name": {"value": math.pi}, "value": {"value": None}}
    nodes = [{**node, "nodeId": str(n), "parentId": str(n - 1), "childIds": [str(n + 1), "0"]} for n in range(300)]
    async with browser(honest(nodes)) as made:
        tree = await made.tree()
    assert len(tree) == 300
    assert tree[-1] == {"role": "x" * 500, "name": str(math.pi), "value": "", "depth": 299}
    async with browser(honest([{**node, "nodeId": "1", "parentId": "1", "childIds": ["1"]}])) as made:
        assert await made.tree() == []


async def test_missing_page_is_an_error_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ANSWER_SECONDS", 0.1)
    none = [{"type": "iframe"}, 3, {"type": "page", "url": "devtools://x"}]
    async with browser(lambda message: {"targetInfos": none}) as made:
        with pytest.raises(SandboxError, match="no page"):
            await made.tree()


_NAMES = ("id", "result", "error", "code", "method", "params", "requestId", "value", "nodes", "targetInfos")
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(_NAMES), inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(messages=st.lists(_JSON, min_size=1, max_size=4), named=st.booleans())
def test_only_sandbox_errors_are_raised(messages: list[Any], named: bool) -> None:
    def answer(message: dict[str, Any]) -> bytes:
        said = [{**m, "id": message["id"]} if named and isinstance(m, dict) else m for m in messages]
        return b"".join(json.dumps(each).encode() + b"\0" for each in said)

    async def ask() -> None:
        module._ANSWER_SECONDS, before = 0.05, module._ANSWER_SECONDS
        try:
            async with browser(answer) as made:
                for work in (made.tree, lambda: made.bounding_box("#a")):
                    with contextlib.suppress(SandboxError):
                        await work()
        finally:
            module._ANSWER_SECONDS = before

    asyncio.run(ask())
