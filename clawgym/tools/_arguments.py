"""Check the arguments of a call against the tool's JSON Schema, with the library ``jsonschema``.

Invariant: no schema is fetched from elsewhere; a reference out of the schema is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from clawgym.records import ToolCall

__all__ = ["BadCall", "check_schema", "checked"]

MAX_SCHEMA_BYTES = 64 * 1024
_SHOWN = 300


class BadCall(Exception):
    """A tool call that cannot be carried out; the message is for the model."""


def checked(call: ToolCall, schemas: Mapping[str, str]) -> dict[str, Any]:
    """Return the arguments of ``call`` once they fit the tool's schema.

    A null for an optional argument that may not be null is removed. ``schemas`` has the parameters of each tool as JSON
    text. Raises :class:`BadCall`.
    """
    schema = schemas.get(call.name)
    if schema is None:
        raise BadCall(f"there is no tool {call.name!r}: use {', '.join(schemas)}")
    arguments = dict(call.arguments)
    complaint = _complaint(schema, arguments)
    if complaint and None in arguments.values():
        required = json.loads(schema).get("required", ())
        without = {key: value for key, value in arguments.items() if value is not None or key in required}
        if _complaint(schema, without) is None:
            return without
    if complaint:
        raise BadCall(f"{call.name} {complaint}: call it again")
    return arguments


def check_schema(schema: Any) -> str:
    """``schema`` as JSON text for :func:`checked`. Raises ValueError if it cannot be used for a tool."""
    try:
        text = json.dumps(schema)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON ({error})") from error
    if len(text) > MAX_SCHEMA_BYTES:
        raise ValueError(f"has {len(text)} bytes, over {MAX_SCHEMA_BYTES}")
    _check_text(text)
    return text


@lru_cache(maxsize=4096)
def _check_text(text: str) -> None:
    """Check a schema; cached, as it takes 5 ms and many episodes have the same tools. Raises ValueError."""
    from jsonschema.exceptions import SchemaError

    try:
        schema = json.loads(text)
        if not isinstance(schema, dict) or schema.get("type") != "object":
            raise ValueError('does not say "type": "object"')
        for reference in _references(schema):
            if not reference.startswith("#"):
                raise ValueError(f"refers to {reference[:_SHOWN]!r}, which is not in it")
        type(_validator(text)).check_schema(schema)
        _complaint(text, {})
    except SchemaError as error:
        raise ValueError(f"is no JSON Schema ({error.message[:_SHOWN]})") from error
    except RecursionError as error:
        raise ValueError("is nested too deeply") from error


def _references(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        for key, value in schema.items():
            if key in ("$ref", "$dynamicRef", "$recursiveRef") and isinstance(value, str):
                yield value
            yield from _references(value)
    elif isinstance(schema, list):
        for item in schema:
            yield from _references(item)


@lru_cache(maxsize=4096)
def _validator(schema: str) -> Any:
    from jsonschema import Draft202012Validator, validators
    from referencing import Registry

    parsed = json.loads(schema)
    kind: Any = validators.validator_for(parsed, default=Draft202012Validator)
    return kind(parsed, registry=Registry())  # the default registry would fetch references over the network


def _complaint(schema: str, arguments: Mapping[str, Any]) -> str | None:
    """What is wrong, worded to follow the tool's name; None if the arguments fit."""
    from jsonschema.exceptions import best_match
    from referencing.exceptions import Unresolvable

    try:
        error = best_match(_validator(schema).iter_errors(arguments))
    except Unresolvable as unresolvable:
        return f"has a schema with the unknown reference {unresolvable.ref!r}"
    except RecursionError:
        return "takes no arguments that are nested so deeply"
    if error is None:
        return None
    where = _named(error.absolute_path)
    properties = error.schema.get("properties", {}) if isinstance(error.schema, dict) else {}
    if error.validator == "required":
        name = next(n for n in error.validator_value if n not in error.instance)
        return f"needs the argument {_named([*error.absolute_path, name])}{_kind(properties.get(name))}"
    if error.validator == "additionalProperties" and isinstance(error.instance, dict) and properties:
        unknown = ", ".join(repr(n) for n in error.instance if n not in properties)
        return f"does not take {unknown[:_SHOWN]}, but {', '.join(map(repr, properties))}"
    if error.validator == "type":
        return f"needs the argument {where}{_kind(error.schema)}" if where else "needs an object of arguments"
    if error.validator == "minLength":
        return f"needs {where or 'arguments'}: not empty"
    return f"does not take this for {where or 'its arguments'}: {error.message[:_SHOWN]}"


def _named(path: Sequence[Any]) -> str:
    """``'items[0].price'``, quoted."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return repr(text) if text else ""


_KINDS = {"string": "a string", "integer": "a whole number", "number": "a number", "boolean": "true or false"}
_KINDS |= {"array": "an array", "object": "an object", "null": "null"}


def _kind(schema: Any) -> str:
    kinds = schema.get("type") if isinstance(schema, dict) else None
    names = [kinds] if isinstance(kinds, str) else kinds if isinstance(kinds, list) else []
    return f", {' or '.join(_KINDS.get(name, str(name)) for name in names)}" if names else ""
