"""Calls of tools: the actions at a desktop, and arguments against schemas that a server sent."""

from __future__ import annotations

import json

from clawgym.desktop.actions import KINDS, parse
from clawgym.errors import SandboxError
from clawgym.records import ToolCall
from clawgym.tools._arguments import BadCall, check_schema, checked

from ..source import Source

READS = ("desktop.actions", "tools._arguments")

_ACTION = {
    "action": "left_click", "coordinate": [1, 2.5], "start_coordinate": [0, 0], "unit": "pixel", "text": "x", "keys": ["a"],
    "amount": 3, "direction": "vertical", "seconds": 1.0,
}  # fmt: skip
_SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "string", "minLength": 1, "pattern": "^a+$"},
        "b": {"type": ["integer", "null"], "minimum": 0, "multipleOf": 2},
        "c": {"type": "array", "items": {"$ref": "#/$defs/x"}, "uniqueItems": True},
        "d": {"anyOf": [{"const": 1}, {"enum": [2, 3]}]},
    },
    "$defs": {"x": {"type": "object", "properties": {"y": {"$ref": "#/$defs/x"}}, "required": ["y"]}},
    "required": ["a"],
    "additionalProperties": False,
}
_ARGUMENTS = {"a": "aa", "b": 2, "c": [{"y": {}}], "d": 1}


def fuzz(data: bytes) -> None:
    source = Source(data)
    try:
        given = json.loads(source.json({**_ACTION, "action": source.pick(KINDS)}))
        schema = json.loads(source.json(_SCHEMA))
        arguments = json.loads(source.json(_ARGUMENTS))
    except (ValueError, RecursionError):
        return
    if isinstance(given, dict):
        try:
            action = parse(given, 640, 480)
        except SandboxError as error:
            assert str(error)
        else:
            assert action.x is None or (0 <= action.x < 640 and action.y is not None and 0 <= action.y < 480)
            assert 0 <= action.seconds <= 10
    try:
        text = check_schema(schema)
    except ValueError:
        return
    if isinstance(arguments, dict):
        try:
            json.dumps(checked(ToolCall("c", "f", arguments), {"f": text}))
        except BadCall as error:
            assert str(error)
