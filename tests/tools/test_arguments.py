"""Checking arguments against schemas, without fetching anything."""

from __future__ import annotations

import json
import socket
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawgym.records import ToolCall
from clawgym.tools._arguments import BadCall, check_schema, checked

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1},
        "count": {"type": "integer", "minimum": 1},
        "either": {"type": ["string", "null"]},
        "deep": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]},
        "kind": {"enum": ["a", "b"]},
    },
    "required": ["name"],
    "additionalProperties": False,
}


def given_to(arguments: Any, schema: dict[str, Any] = SCHEMA) -> dict[str, Any]:
    return checked(ToolCall("1", "do", arguments), {"do": check_schema(schema)})


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ({}, "do needs the argument 'name', a string"),
        ({"name": 7}, "do needs the argument 'name', a string"),
        ({"name": None}, "do needs the argument 'name', a string"),
        ({"name": ""}, "do needs 'name': not empty"),
        ({"name": "x", "count": "1"}, "do needs the argument 'count', a whole number"),
        ({"name": "x", "count": 0}, "'count'"),
        ({"name": "x", "nmae": 1}, "do does not take 'nmae', but 'name', 'count'"),
        ({"name": "x", "either": 1}, "'either', a string or null"),
        ({"name": "x", "deep": {}}, "'deep.x', a number"),
        ({"name": "x", "kind": "c"}, "'kind'"),
    ],
)
def test_what_does_not_fit_is_said(arguments: dict[str, Any], part: str):
    with pytest.raises(BadCall) as error:
        given_to(arguments)
    assert part in str(error.value)
    assert str(error.value).endswith("call it again")


def test_null_for_an_optional_argument_is_removed():
    assert given_to({"name": "x", "count": None, "either": None}) == {"name": "x"}
    assert given_to({"name": "x", "either": None}) == {"name": "x", "either": None}


def test_an_unknown_tool_names_the_others():
    with pytest.raises(BadCall, match="no tool 'x': use do, submit"):
        checked(ToolCall("1", "x", {}), {"do": "{}", "submit": "{}"})


@pytest.mark.parametrize(
    ("schema", "part"),
    [
        ([], "object"),
        ({"type": "string"}, "object"),
        ({"type": "object", "properties": {"a": {"type": "sting"}}}, "no JSON Schema"),
        ({"type": "object", "properties": {"a": {"pattern": "("}}}, "no JSON Schema"),
        ({"type": "object", "properties": {"a": {"$ref": "http://127.0.0.1:1/x.json"}}}, "not in it"),
        ({"type": "object", "properties": {"a": {"$ref": "file:///etc/passwd"}}}, "not in it"),
        ({"type": "object", "description": "x" * 70_000}, "bytes"),
        ({"type": "object", "default": {1, 2}}, "not JSON"),
    ],
)
def test_invalid_tool_schemas_are_refused(schema: Any, part: str):
    with pytest.raises(ValueError, match=part):
        check_schema(schema)


def test_no_schema_is_fetched(monkeypatch: pytest.MonkeyPatch):
    """Not even for a reference that points elsewhere only because of a base URL."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a schema opened a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    schema = {"$id": "http://127.0.0.1:1/a", "type": "object", "properties": {"a": {"$ref": "#/$defs/none"}}}
    with pytest.raises(BadCall, match="unknown reference"):
        given_to({"a": 1}, schema)


def test_drafts_and_references_inside_are_understood():
    old = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "definitions": {"n": {"type": "integer"}},
        "properties": {"a": {"$ref": "#/definitions/n"}},
    }
    assert given_to({"a": 1}, old) == {"a": 1}
    with pytest.raises(BadCall, match="'a', a whole number"):
        given_to({"a": "1"}, old)
    endless = {"type": "object", "properties": {"a": {"$ref": "#"}}}
    nested: dict[str, Any] = {}
    for _ in range(5000):
        nested = {"a": nested}
    with pytest.raises(BadCall, match="nested so deeply"):
        given_to(nested, endless)


values = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


@given(st.dictionaries(st.sampled_from([*SCHEMA["properties"], "other"]), values))
def test_exactly_the_fitting_arguments_pass(arguments: dict[str, Any]):
    fits = jsonschema.Draft202012Validator(SCHEMA).is_valid(arguments)
    try:
        passed = given_to(arguments)
    except BadCall as error:
        message = str(error)
    else:
        jsonschema.validate(passed, SCHEMA)
        assert passed == arguments if fits else passed == {k: v for k, v in arguments.items() if v is not None}
        json.dumps(passed)
        return
    assert not fits
    assert message.startswith("do ")
