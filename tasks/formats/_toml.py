"""Write JSON-like values as TOML (the standard library can only read TOML)."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

__all__ = ["dumps"]


def dumps(document: Mapping[str, Any]) -> str:
    """``document`` as TOML 1.0. :mod:`tomllib` reads it back equal, without ``None`` values.

    Raises :class:`ValueError` for values without a TOML form (lone surrogates, other types).

    >>> print(dumps({"a": 1, "b": {"c": ["x", {"d": True}]}}))
    a = 1
    <BLANKLINE>
    [b]
    c = ["x", {d = true}]
    <BLANKLINE>
    """
    return _table(document, ())


def _table(table: Mapping[str, Any], path: tuple[str, ...]) -> str:
    plain = {k: v for k, v in table.items() if v is not None and not isinstance(v, Mapping)}
    lines = [f"{_key(k)} = {_value(v)}\n" for k, v in plain.items()]
    head = f"[{'.'.join(map(_key, path))}]\n" if path else ""
    below = [_table(v, (*path, k)) for k, v in table.items() if isinstance(v, Mapping)]
    return "\n".join(part for part in (head + "".join(lines), *below) if part)


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _value(key)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else str(value)
    if isinstance(value, str):
        value.encode()
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return f"[{', '.join(_value(item) for item in value if item is not None)}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items() if v is not None) + "}"
    raise ValueError(f"{type(value).__name__} has no TOML form")
