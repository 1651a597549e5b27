"""Replaces secrets and personal data in the texts of conversations that are stored.

A finding becomes ``<KIND>``: ``SECRET``, ``EMAIL_ADDRESS``, ``PHONE_NUMBER``, ``CREDIT_CARD``, ``IBAN_CODE``,
``US_SSN``, ``IP_ADDRESS`` or ``CRYPTO`` (a Bitcoin address). A redacted turn cannot be trained on, so everything is
found by a format that can be checked, or by the name before it. A value that only looks unusual stays.

Not found: names, postal addresses, birthdays, and numbers of other documents; passwords without a name before them, or
made of letters only; national phone numbers without a word like *phone* before them, but for North American ones;
Ethereum addresses; a value that is split over several lines or messages, encoded (base64, ``\\u0040``) or spelled out
(*name at host dot com*). Addresses, numbers and values that are reserved for documentation stay.

Invariants: the result depends on the text alone. The time is linear in its length, whatever a client writes. JSON stays
JSON.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from clawgym.errors import MissingDependency
from clawgym.online._personal_data import DETECTORS
from clawgym.online._secrets import secrets
from clawgym.records import Turn

__all__ = ["REDACTED", "Redactor"]

REDACTED = "redacted"
"""The flaw of a turn in which something was replaced."""

_SHORTEST = 6
"""The length of the shortest finding: of an e-mail address, and of a password."""
_PLAIN = {ord(c): " " for c in "\u00a0\u2007\u2009\u202f\u3000"}
_PLAIN |= {ord(c): "-" for c in "\u2010\u2011\u2012\u2013\u2212"}
_PLAIN |= {0xFEE0 + n: chr(n) for n in range(0x21, 0x7F)}
"""Spaces, hyphens and full-width characters that stand for an ASCII one."""
_UNSEEN = re.compile("[\u00ad\u200b-\u200d\u2060\ufeff]")
_ESCAPED = re.compile(r"\\[nrt]")
_JSON_PART = re.compile(r'"((?:[^"\\]|\\.)*+)"(\s*:)?|(?<![\w.+-])-?\d{9,40}(?![\w.])', re.DOTALL)
"""A string, with the colon behind a key, or a long integer."""


class Redactor:
    """Finds and replaces secrets and personal data.

    Raises :class:`~clawgym.errors.MissingDependency` without the extra ``serve``.
    """

    def __init__(self) -> None:
        try:
            list(_find("a"))
        except ImportError as error:
            raise MissingDependency(
                "redaction needs detect-secrets and phonenumbers: pip install 'clawgym[serve]'"
            ) from error

    def text(self, text: str) -> tuple[str, Counter[str]]:
        """``text`` with each finding replaced by ``<KIND>``, and the number of findings of each kind.

        A text that is a JSON object or array is searched string by string, and only the findings in it change.
        """
        counts = Counter[str]()
        return _text(text, "", counts), counts

    def turn(self, turn: Turn) -> Turn:
        """``turn`` with the findings in all its texts replaced; the same object if there are none.

        A redacted turn has the flaw ``redacted``, and neither token ids nor log-probs: the ids would still spell what
        was replaced. It is never trained on, and neither is a turn that continues it. Images and the definitions of
        tools are stored elsewhere, and are not searched.
        """
        counts = Counter[str]()
        messages = tuple(_value(message, "", counts) for message in turn.messages)
        reply, sampling = _value(turn.reply, "", counts), _value(turn.sampling, "", counts)
        if not counts:
            return turn
        return replace(
            turn,
            messages=messages,
            reply=reply,
            sampling=sampling,
            context_ids=(),
            sampled_ids=(),
            logprobs=(),
            flaw=REDACTED,
        )


def _find(text: str) -> list[tuple[int, int, str]]:
    """Start, end and kind of each finding, in order. Findings that overlap are one, of the kind of the longest."""
    view, places = _view(text)
    found = [(start, end, "SECRET") for start, end in secrets(view)]
    found += [(*span, kind) for kind, detect in DETECTORS.items() for span in detect(view)]
    merged: list[tuple[int, int, str]] = []
    longest = 0
    for start, end, kind in sorted(found):
        if merged and start < merged[-1][1]:
            first, last, old = merged[-1]
            merged[-1] = (first, max(last, end), kind if end - start >= longest else old)
            longest = max(longest, end - start)
        else:
            merged.append((start, end, kind))
            longest = end - start
    if places is None:
        return merged
    return [(places[start], places[end - 1] + 1, kind) for start, end, kind in merged]


def _view(text: str) -> tuple[str, list[int] | None]:
    """``text`` as it is searched, and the place in ``text`` of each of its characters if they differ.

    Invisible characters are left out, and escaped line breaks are spaces.
    """
    view, places = text, None
    if not text.isascii():
        view = text.translate(_PLAIN)
        if _UNSEEN.search(view):
            places = [n for n, char in enumerate(view) if not _UNSEEN.match(char)]
            view = "".join(view[n] for n in places)
    return _ESCAPED.sub("  ", view) if "\\" in view else view, places


def _value(value: Any, name: str, counts: Counter[str]) -> Any:
    """``value`` with all strings in it redacted. ``name``: the key that it belongs to."""
    if isinstance(value, str):
        return _text(value, name, counts)
    if isinstance(value, Mapping):
        return {
            _text(key, "", counts) if isinstance(key, str) else key: _value(inner, str(key), counts)
            for key, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [_value(inner, name, counts) for inner in value]
    return value


def _text(text: str, name: str, counts: Counter[str]) -> str:
    """``text`` redacted. It may be a secret for its ``name`` alone, as in ``"password": "..."``."""
    if len(text) < _SHORTEST:
        return text
    if text.lstrip()[:1] in ("{", "[") and _is_json(text):
        return _json(text, name, counts)
    before = f"{name}: " if 0 < len(name) <= 64 else ""
    parts, done = [], 0
    for start, end, kind in _find(before + text):
        if end > len(before):
            parts += [text[done : max(0, start - len(before))], f"<{kind}>"]
            done = end - len(before)
            counts[kind] += 1
    return "".join([*parts, text[done:]])


def _is_json(text: str) -> bool:
    """Whether ``text`` is JSON. What is nested too deeply for Python is searched as plain text."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _json(text: str, name: str, counts: Counter[str]) -> str:
    """JSON with its strings redacted. Everything else stays as it was written."""
    key = name

    def part(match: re.Match[str]) -> str:
        nonlocal key
        if match[1] is None:  # a number, which becomes a string
            number = _text(match.group(), key, counts)
            return match.group() if number == match.group() else json.dumps(number)
        plain = json.loads(match.group().removesuffix(match[2] or ""), strict=False)
        new = _text(plain, "" if match[2] else key, counts)
        if match[2]:
            key = plain
        if new == plain:
            return match.group()
        return json.dumps(new) + (match[2] or "")

    return _JSON_PART.sub(part, text)
