"""``clawgym_tools``: the protocol, schemas from annotations, and what is checked before a tool runs."""

from __future__ import annotations

import ast
import functools
import inspect
import json
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawgym.records import TaskFile, ToolServer
from clawgym.tasks.worlds.servers import clawgym_tools
from clawgym.tasks.worlds.servers.clawgym_tools import PROTOCOLS, Server, ToolError, problem_with, schema_of

from ..served import Running

OWN = b'''
import os, sys
from clawgym_tools import ToolError, serve, tool

@tool
def add(a: int, b: int = 1) -> dict:
    """The sum."""
    return {"sum": a + b}

@tool
def fail(how: str) -> str:
    """Fails."""
    if how == "tool":
        raise ToolError("try another")
    if how == "print":
        print("this is not JSON")
        os.system("echo nor this; cat")
        return "fine"
    raise ValueError(how)

serve("own")
'''


@pytest.fixture
def own(tmp_path: Path):
    """A server as somebody would write it: two files, no flags."""
    helper = TaskFile("clawgym_tools.py", Path(clawgym_tools.__file__))
    server = ToolServer("own", ("python3", "/tools/own/server.py"), (TaskFile("server.py", OWN), helper))
    with Running(server, tmp_path) as running:
        yield running


def test_a_server_of_ones_own(own: Running) -> None:
    hello = own.ask("initialize", protocolVersion="2024-11-05", capabilities={}, clientInfo={})["result"]
    assert hello["protocolVersion"] == "2024-11-05"
    assert hello["serverInfo"]["name"] == "own"
    assert own.ask("initialize", protocolVersion="1999-01-01")["result"]["protocolVersion"] == PROTOCOLS[0]
    assert own.ask("ping")["result"] == {}
    (add, fail) = own.ask("tools/list")["result"]["tools"]
    assert (add["name"], add["description"], fail["name"]) == ("add", "The sum.", "fail")
    result = own.ask("tools/call", name="add", arguments={"a": 2})["result"]
    assert result == {
        "content": [{"type": "text", "text": '{"sum": 3}'}],
        "isError": False,
        "structuredContent": {"sum": 3},
    }


def test_errors_of_tools_are_results(own: Running) -> None:
    assert own.call("fail", how="tool") == ("try another", True)
    assert own.call("fail", how="x") == ("ValueError: x", True)
    assert own.call("fail", how="print") == ("fine", False)
    assert own.call("add") == ("add needs the argument 'a' (it takes a, b): call it again", True)
    assert own.call("add", a="1") == ("the argument 'a' of add must be an integer, not \"1\"", True)
    assert own.call("add", a=True)[1]
    assert own.call("add", a=1, c=2) == ("add takes no argument 'c': use a, b", True)


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (b"{", -32700),
        (b"[" * 100_000, -32700),
        (b'{"a": NaN}', -32700),
        (b"\xff", -32700),
        (b"[]", -32600),
        (b'{"jsonrpc": "2.0", "id": 1}', -32600),
        (b'{"jsonrpc": "2.0", "id": 1, "method": "rules"}', -32601),
        (b'{"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "zzz"}}', -32602),
        (b'{"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": [1]}', -32602),
        (b'{"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": ["a"]}}', -32603),
        (b" " * ((16 << 20) + 1) + b"{}", -32700),
    ],
    ids=range(11),
)
def test_what_is_no_request_gets_an_error(own: Running, line: bytes, code: int) -> None:
    assert own.raw(line)["error"]["code"] == code
    assert own.ask("ping")["result"] == {}


def test_notifications_and_answers_are_not_answered(own: Running) -> None:
    assert own.process.stdin
    for line in (
        b'{"jsonrpc": "2.0", "method": "notifications/initialized"}\n',
        b"\n",
        b'{"jsonrpc": "2.0", "id": 7, "result": {}}\n',
    ):
        own.process.stdin.write(line)
    assert own.ask("ping")["result"] == {}


def test_schemas_come_from_annotations() -> None:
    def book(title: str, people: list[str], hours: Annotated[float, "at most 8"] = 1, how: Literal["a", "b"] = "a"): ...

    assert schema_of(book) == {
        "type": "object",
        "properties": {
            "title": {"type": "string"},
            "people": {"type": "array", "items": {"type": "string"}},
            "hours": {"type": "number", "description": "at most 8"},
            "how": {"type": "string", "enum": ["a", "b"]},
        },
        "required": ["title", "people"],
        "additionalProperties": False,
    }
    with pytest.raises(TypeError, match="annotate 'a'"):
        schema_of(lambda a: a)
    server = Server()
    server.tool(book)
    with pytest.raises(ValueError, match="two tools"):
        server.tool(book)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


def decorated(function: Any) -> Any:
    @functools.wraps(function)
    def louder(*args: Any, **more: Any) -> str:
        return function(*args, **more).upper()

    return louder


class Shelf:
    @decorated
    def find(self, name: str, *, most: int = 3) -> str:
        """Look it up.

        Names are in any case:
            as they come.
        """
        return name * most


def test_a_method_and_a_decorated_function_are_tools() -> None:
    server = Server()
    server.tool(Shelf().find)
    offered = server.tools["find"]
    assert offered["description"] == inspect.getdoc(Shelf.find)
    assert offered["inputSchema"]["properties"] == {"name": {"type": "string"}, "most": {"type": "integer"}}
    assert offered["inputSchema"]["required"] == ["name"]
    assert server.call("find", {"name": "a"})["content"][0]["text"] == "AAA"
    with pytest.raises(TypeError, match="any number"):
        schema_of(lambda *args: args)


@given(st.dictionaries(st.sampled_from(["name", "count", "tags", "x"]), JSON))
def test_a_tool_sees_only_what_its_schema_allows(arguments: dict[str, Any]) -> None:
    server, seen = Server(), []

    @server.tool
    def look(name: str, count: int, tags: list[str] = []) -> str:  # noqa: B006
        seen.append((name, count, tags))
        raise ToolError("seen")

    result = server.call("look", arguments)
    assert result["isError"]
    json.dumps(result).encode("ascii")
    if seen:
        name, count, tags = seen[0]
        assert isinstance(name, str)
        assert type(count) is int
        assert all(isinstance(tag, str) for tag in tags)
        name.encode()
    else:
        assert problem_with(arguments, server.tools["look"]["inputSchema"], "look")


def test_everything_parses_on_an_old_python() -> None:
    for path in Path(clawgym_tools.__file__).parent.glob("*.py"):
        ast.parse(path.read_text(), feature_version=(3, 9))
