"""Tools for agents in a few lines: a server of the Model Context Protocol on stdin and stdout.

One file, standard library only, Python 3.9 or newer: copy it beside your own program.

    from clawgym_tools import ToolError, serve, tool

    @tool
    def add(a: int, b: int = 1) -> int:
        "The sum of two integers."
        return a + b

    serve("adder")

The description is the docstring, the JSON schema comes from the annotations (``str int float bool list dict``,
``list[int]``, ``Literal["a", "b"]``, ``Annotated[int, "in cents"]``); a parameter with a default is optional.

Invariants: calls are carried out one after another, in the order in which they come; whatever a tool does, raises or
prints, the client gets one well-formed answer per request; arguments are checked here too, so a tool sees only what
its schema allows. Text a tool prints goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Any, Callable, Literal, get_args, get_origin, get_type_hints

__all__ = ["PROTOCOLS", "Server", "ToolError", "problem_with", "schema_of", "serve", "tool"]

PROTOCOLS = ("2025-06-18", "2025-11-25", "2024-11-05")
"""Versions of the protocol that are spoken; the first is offered to a client that asks for another one."""

LINE_CAP = 16 << 20
"""Longest request, in bytes."""

_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}
_PYTHON = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "array": list,
    "object": dict,
    "null": type(None),
}


class ToolError(Exception):
    """A call that cannot be carried out; the text is for the agent and says what to do instead."""


def tool(function: Any = None, *, name: str = "", description: str = "", schema: dict | None = None) -> Any:
    """Offer the decorated function as a tool of :func:`serve`."""
    return _DEFAULT.tool(function, name=name, description=description, schema=schema)


def serve(name: str, version: str = "1") -> None:
    """Answer requests on stdin until it ends."""
    _DEFAULT.name, _DEFAULT.version = name, version
    _DEFAULT.run()


class Server:
    """A set of tools, in the order in which they were added."""

    def __init__(self, name: str = "tools", version: str = "1") -> None:
        self.name, self.version = name, version
        self.tools: dict[str, dict] = {}
        self._functions: dict[str, Callable[..., Any]] = {}

    def tool(self, function: Any = None, *, name: str = "", description: str = "", schema: Any = None) -> Any:
        """Add ``function``; also usable as a decorator. Raises ``ValueError`` for a name that is taken."""
        if function is None:
            return lambda later: self.tool(later, name=name, description=description, schema=schema)
        name = name or function.__name__
        if name in self.tools:
            raise ValueError(f"two tools are called {name!r}: rename one")
        self.tools[name] = {
            "name": name,
            "description": description or _described(function),
            "inputSchema": schema or schema_of(function),
        }
        self._functions[name] = function
        return function

    def call(self, name: str, arguments: dict[str, Any]) -> dict:
        """The result of a call, as the protocol has it: ``content`` and ``isError``."""
        problem = problem_with(arguments, self.tools[name]["inputSchema"], name)
        if problem:
            return _failed(problem)
        try:
            return _result(self._functions[name](**arguments))
        except ToolError as error:
            return _failed(str(error))
        except Exception as error:  # whatever a tool raises is an answer, not the end of the server
            traceback.print_exc()
            return _failed(f"{type(error).__name__}: {error}")

    def answer(self, message: Any) -> dict | None:
        """The answer to one decoded message; ``None`` for a notification, which is never answered."""
        if not isinstance(message, dict) or not isinstance(message.get("method"), str):
            if isinstance(message, dict) and "id" in message and ("result" in message or "error" in message):
                return None  # an answer to us, and we never ask
            return _error(None, -32600, "not a request: send an object with 'jsonrpc', 'id' and 'method'")
        if "id" not in message:
            return None
        number, params = message["id"], message.get("params") or {}
        if not isinstance(params, dict):
            return _error(number, -32602, "params must be an object")
        method = message["method"]
        if method == "initialize":
            wanted = params.get("protocolVersion")
            body = {
                "protocolVersion": wanted if wanted in PROTOCOLS else PROTOCOLS[0],
                "capabilities": {"tools": {"listChanged": False}},
                "serverInfo": {"name": self.name, "version": self.version},
            }
        elif method == "ping":
            body = {}
        elif method == "tools/list":
            body = {"tools": list(self.tools.values())}
        elif method == "tools/call":
            name, arguments = params.get("name"), params.get("arguments")
            if name not in self.tools:
                return _error(number, -32602, "there is no tool {!r}: use {}".format(name, ", ".join(self.tools)))
            body = self.call(name, {} if arguments is None else arguments)
        else:
            return _error(number, -32601, f"there is no method {method!r} here")
        return {"jsonrpc": "2.0", "id": number, "result": body}

    def run(self) -> None:
        """Answer requests, one per line, until stdin ends."""
        # The protocol keeps its two streams for itself: what tools and their children read and print is elsewhere.
        source, sink = os.fdopen(os.dup(0), "rb"), os.dup(1)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        os.dup2(2, 1)
        sys.stdout = sys.stderr
        while True:
            line = source.readline(LINE_CAP + 1)
            if not line:
                return
            if len(line) > LINE_CAP:
                while line and not line.endswith(b"\n"):
                    line = source.readline(LINE_CAP)
                reply = _error(None, -32700, f"the request is longer than {LINE_CAP} bytes")
            elif not line.strip():
                continue
            else:
                reply = self._answer_line(line)
            if reply is not None:
                _write(sink, json.dumps(reply).encode("ascii") + b"\n")

    def _answer_line(self, line: bytes) -> dict | None:
        try:
            message = json.loads(line, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            return _error(None, -32700, f"the request is not JSON: {error}")
        try:
            return self.answer(message)
        except Exception as error:
            traceback.print_exc()
            return _error(message.get("id") if isinstance(message, dict) else None, -32603, repr(error))


_DEFAULT = Server()


def schema_of(function: Callable[..., Any]) -> dict:
    """The JSON schema of a function's parameters. Raises ``TypeError`` for an annotation that says too little."""
    hints = get_type_hints(function, include_extras=True)
    properties, required = {}, []
    for name, optional in _parameters(function):
        if name not in hints:
            raise TypeError(f"{function.__name__}: annotate {name!r}, or give a schema")
        properties[name] = _schema_of_type(hints[name], function.__name__)
        if not optional:
            required.append(name)
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


# Both without the module inspect, whose import takes as long as a short call.
def _parameters(function: Any) -> list[tuple[str, bool]]:
    """The parameters of a function or method, and whether they have a default."""
    bound = hasattr(function, "__self__")
    while hasattr(function, "__wrapped__"):  # by a decorator
        function = function.__wrapped__
    code = function.__code__
    if code.co_flags & 0x0C:
        raise TypeError(f"{function.__name__}: takes any number of arguments: name them, or give a schema")
    places, names = code.co_argcount, code.co_varnames
    first = places - len(function.__defaults__ or ())
    given = [(name, n >= first) for n, name in enumerate(names[:places])]
    by_name = function.__kwdefaults__ or {}
    return given[bound:] + [(name, name in by_name) for name in names[places : places + code.co_kwonlyargcount]]


def _described(function: Any) -> str:
    """The docstring, without its margin."""
    first, *rest = (function.__doc__ or "").expandtabs().split("\n")
    margin = min((len(line) - len(line.lstrip()) for line in rest if line.strip()), default=0)
    return "\n".join([first.lstrip(), *(line[margin:] for line in rest)]).strip("\n")


def _schema_of_type(hint: Any, where: str) -> dict[str, Any]:
    notes = getattr(hint, "__metadata__", ())
    if notes:
        return {**_schema_of_type(hint.__origin__, where), "description": str(notes[0])}
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Literal:
        return {"type": _TYPES[type(parts[0])], "enum": list(parts)}
    if origin is list:
        return {"type": "array", "items": _schema_of_type(parts[0], where)}
    if (origin or hint) in _TYPES:
        return {"type": _TYPES[origin or hint]}
    raise TypeError(f"{where}: no schema for {hint!r}: use a simple type, or give a schema")


def problem_with(value: Any, schema: dict, where: str) -> str:
    """What is wrong with ``value`` under ``schema`` (type, enum, bounds, items, properties), or an empty text."""
    kind = schema.get("type")
    if isinstance(kind, str) and not _is(value, kind):
        return "{} must be {} {}, not {}".format(where, "an" if kind[0] in "aeio" else "a", kind, _shown(value))
    if "enum" in schema and value not in schema["enum"]:
        return "{} must be one of {}, not {}".format(where, ", ".join(map(json.dumps, schema["enum"])), _shown(value))
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        low, high = schema.get("minimum"), schema.get("maximum")
        if (low is not None and value < low) or (high is not None and value > high):
            return f"{where} must be from {low} to {high}, not {_shown(value)}"
    if isinstance(value, str):
        if len(value) > schema.get("maxLength", LINE_CAP) or len(value) < schema.get("minLength", 0):
            return (
                f"{where} must have from {schema.get('minLength', 0)} to {schema.get('maxLength', LINE_CAP)} characters"
            )
        if any("\ud800" <= character <= "\udfff" for character in value):
            return f"{where} holds half a surrogate pair: send whole characters"
    if isinstance(value, list):
        for number, item in enumerate(value):
            problem = problem_with(item, schema.get("items", {}), f"{where}[{number}]")
            if problem:
                return problem
    if isinstance(value, dict):
        return _problem_with_object(value, schema, where)
    return ""


def _problem_with_object(value: dict, schema: dict, where: str) -> str:
    properties = schema.get("properties", {})
    for name in schema.get("required", ()):
        if name not in value:
            return "{} needs the argument {!r} (it takes {}): call it again".format(where, name, ", ".join(properties))
    for name, item in value.items():
        if name not in properties:
            if schema.get("additionalProperties", True) is False:
                return "{} takes no argument {!r}: use {}".format(where, name, ", ".join(properties) or "none")
            continue
        problem = problem_with(item, properties[name], f"the argument {name!r} of {where}")
        if problem:
            return problem
    return ""


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, _PYTHON.get(kind, object))


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _result(value: Any) -> dict:
    """Text as it is; anything else as JSON, an object also as structured content."""
    if isinstance(value, str):
        text = value.encode("utf-8", "backslashreplace").decode()
        return {"content": [{"type": "text", "text": text}], "isError": False}
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    result = {"content": [{"type": "text", "text": text}], "isError": False}
    return {**result, "structuredContent": value} if isinstance(value, dict) else result


def _failed(text: str) -> dict:
    text = text.encode("utf-8", "backslashreplace").decode()
    return {"content": [{"type": "text", "text": text}], "isError": True}


def _error(number: Any, code: int, message: str) -> dict:
    return {"jsonrpc": "2.0", "id": number, "error": {"code": code, "message": message}}


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _write(sink: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(sink, view) :]
