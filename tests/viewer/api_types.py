"""Check JSON data against the types of ``web/src/api.ts``, which is the contract of the viewer's answers.

Reads the part of TypeScript that the file uses: interfaces, type aliases, unions, literals, arrays, tuples, records and
one type parameter. An object must have all fields of its type and no others.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parents[2] / "web/src/api.ts"
TOKEN = re.compile(r'\s*("[^"]*"|[A-Za-z_][\w]*|\[\]|[{}\[\]<>|;:,()?=])')


@dataclass
class Type:
    """``kind``: name, literal, array, tuple, record, union, object."""

    kind: str
    name: str = ""
    parts: list[Type] = field(default_factory=list)
    fields: dict[str, Type] = field(default_factory=dict)


class Types:
    """The declarations of a file."""

    def __init__(self, text: str) -> None:
        text = re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.S)
        self._tokens: list[str] = []
        at = 0
        while match := TOKEN.match(text, at):
            self._tokens.append(match[1])
            at = match.end()
        assert not text[at:].strip(), text[at : at + 60]
        self.known: dict[str, tuple[list[str], Type]] = {}
        while self._tokens:
            self._declaration()

    def check(self, value: Any, type: str) -> None:
        """Raise AssertionError, which names the place, unless ``value`` has the type."""
        tokens, self._tokens = self._tokens, [token[1] for token in TOKEN.finditer(type)]
        parsed = self._union()
        self._tokens = tokens
        wrong = self._wrong(value, parsed, {})
        assert wrong is None, f"{type}{wrong}"

    def _take(self, *expected: str) -> str:
        token = self._tokens.pop(0)
        assert not expected or token in expected, f"{token} instead of {expected}, before {self._tokens[:5]}"
        return token

    def _declaration(self) -> None:
        self._take("export")
        kind, name, parameters = self._take("interface", "type"), self._take(), []
        if self._tokens[0] == "<":
            self._take()
            parameters = [self._take()]
            self._take(">")
        if kind == "type":
            self._take("=")
            if self._tokens[0] == "|":
                self._take()
            made = self._union()
            self._take(";")
        else:
            base = {}
            if self._tokens[0] == "extends":
                self._take()
                base = self.known[self._take()][1].fields
            made = self._object()
            made.fields = {**base, **made.fields}
        self.known[name] = parameters, made

    def _union(self) -> Type:
        parts = [self._postfix()]
        while self._tokens and self._tokens[0] == "|":
            self._take()
            parts.append(self._postfix())
        return parts[0] if len(parts) == 1 else Type("union", parts=parts)

    def _postfix(self) -> Type:
        made = self._primary()
        while self._tokens and self._tokens[0] == "[]":
            self._take()
            made = Type("array", parts=[made])
        return made

    def _primary(self) -> Type:
        token = self._tokens[0]
        if token == "{":
            return self._object()
        self._take()
        if token == "(":
            made = self._union()
            self._take(")")
            return made
        if token == "[":
            parts = [self._union()]
            while self._take(",", "]") == ",":
                parts.append(self._union())
            return Type("tuple", parts=parts)
        if token.startswith('"'):
            return Type("literal", token[1:-1])
        made = Type("name", token)
        if self._tokens and self._tokens[0] == "<":
            self._take()
            made.parts = [self._union()]
            while self._take(",", ">") == ",":
                made.parts.append(self._union())
        return made

    def _object(self) -> Type:
        made = Type("object")
        self._take("{")
        while self._tokens[0] != "}":
            name = self._take()
            self._take(":")
            made.fields[name] = self._union()
            if self._tokens[0] == ";":
                self._take()
        self._take("}")
        return made

    def _wrong(self, value: Any, type: Type, given: dict[str, Type]) -> str | None:
        """What is wrong, after the place; None if nothing is."""
        match type.kind:
            case "literal":
                return None if value == type.name else f" is {value!r}, not {type.name!r}"
            case "union":
                found = [self._wrong(value, part, given) for part in type.parts]
                return None if None in found else f" is none of {len(found)}: {found}"
            case "array" | "tuple" if not isinstance(value, list):
                return f" is {value!r:.80}, not a list"
            case "array":
                return self._first(((f"[{n}]", item, type.parts[0]) for n, item in enumerate(value)), given)
            case "tuple":
                if len(value) != len(type.parts):
                    return f" has {len(value)} items"
                return self._first(((f"[{n}]", value[n], part) for n, part in enumerate(type.parts)), given)
            case "object":
                if not isinstance(value, dict):
                    return f" is {value!r:.80}, not an object"
                if value.keys() != type.fields.keys():
                    return f" lacks {type.fields.keys() - value.keys()}, has also {value.keys() - type.fields.keys()}"
                return self._first(((f".{name}", value[name], part) for name, part in type.fields.items()), given)
        return self._wrong_name(value, type, given)

    def _wrong_name(self, value: Any, type: Type, given: dict[str, Type]) -> str | None:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        plain = {"string": isinstance(value, str), "number": is_number, "boolean": isinstance(value, bool)}
        plain |= {"null": value is None, "unknown": True}
        if type.name in plain:
            return None if plain[type.name] else f" is {value!r:.80}, not {type.name}"
        if type.name == "Record":
            if not isinstance(value, dict):
                return f" is {value!r:.80}, not a record"
            return self._first(((f"[{name!r}]", item, type.parts[1]) for name, item in value.items()), given)
        if type.name in given:
            return self._wrong(value, given[type.name], {})
        parameters, made = self.known[type.name]
        return self._wrong(value, made, dict(zip(parameters, type.parts, strict=True)))

    def _first(self, items: Any, given: dict[str, Type]) -> str | None:
        for where, value, type in items:
            if (wrong := self._wrong(value, type, given)) is not None:
                return where + wrong
        return None


TYPES = Types(SOURCE.read_text())
