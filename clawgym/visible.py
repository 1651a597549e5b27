"""Escape characters in untrusted texts that could mislead the reader of a terminal or log.

Task folders, endpoints, agents and file names may contain any character. Escaped are control characters (C0, C1, DEL),
direction marks and overrides, invisible format characters, line and paragraph separators, and lone surrogates, which
cannot be encoded.
"""

from __future__ import annotations

import re

__all__ = ["cut", "visible", "visible_lines", "visible_value"]

_FORMAT = (
    "\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f"
)
_HIDDEN = re.compile(f"[\x00-\x1f\x7f-\x9f{_FORMAT}]")
_HIDDEN_IN_LINES = re.compile(f"[\x00-\x08\x0b-\x1f\x7f-\x9f{_FORMAT}]")


def visible(text: str) -> str:
    r"""``text`` on one line, with control and format characters, including newlines and tabs, as escapes.

    >>> visible("ok\n\x1b[2J\u202egnp")
    'ok\\n\\x1b[2J\\u202egnp'
    """
    return _HIDDEN.sub(_escape, text)


def visible_lines(text: str) -> str:
    """:func:`visible`, with newlines and tabs as they are: for logs, and for texts whose lines are our own."""
    return _HIDDEN_IN_LINES.sub(_escape, text)


def cut(text: str, most: int) -> tuple[str, int]:
    """Both ends of a text longer than ``most`` characters with a mark between them, and how many are left out."""
    if len(text) <= most:
        return text, 0
    half = most // 2
    left_out = len(text) - 2 * half
    return f"{text[:half]}\n[... {left_out:,} characters left out ...]\n{text[len(text) - half :]}", left_out


def visible_value(value: object) -> object:
    """:func:`visible_lines` of a plain string, also inside of lists and mappings; anything else as it is, markup too.

    For the ``finalize`` of a template, and for data that a page shows.
    """
    if type(value) is str:
        return visible_lines(value)
    if isinstance(value, list | tuple):
        return [visible_value(item) for item in value]
    if isinstance(value, dict):
        return {visible_value(key): visible_value(item) for key, item in value.items()}
    return value


def _escape(match: re.Match[str]) -> str:
    return repr(match[0])[1:-1]
