"""Parse a Dockerfile (statements, here-documents, words and variables) and a ``.dockerignore``."""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from clawgym.errors import SandboxError

__all__ = ["Heredoc", "Statement", "expanded", "ignored", "json_words", "statements", "take_flags", "words"]

_HEREDOC = re.compile(r"<<(?P<strip>-?)(?P<quote>[\"']?)(?P<name>\w+)(?P=quote)")
_MOST_STARS = 8
"""Of one part of a path in a ``.dockerignore``: matching takes longer with each."""
_VARIABLE = re.compile(r"\w+|\{(?P<name>\w+)(?:(?P<kind>:[-+])(?P<other>[^{}]*))?\}")


@dataclass(frozen=True, slots=True)
class Heredoc:
    """A here-document of a statement."""

    name: str
    text: str
    expands: bool
    """Whether variables in it are replaced: its name was not quoted."""


@dataclass(frozen=True, slots=True)
class Statement:
    """One statement of a Dockerfile, with its continued lines joined."""

    line: int
    keyword: str
    """In capitals."""
    rest: str
    heredocs: tuple[Heredoc, ...] = ()


def statements(text: str) -> list[Statement]:
    """The statements of a Dockerfile, without comments.

    Raises :class:`~clawgym.errors.SandboxError` for another escape character and for a here-document without an end.
    """
    found: list[Statement] = []
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        start, parts = at, list[str]()
        while at < len(lines):
            stripped = lines[at].strip()
            at += 1
            if not found and not parts and re.match(r"#\s*escape\s*=\s*[^\\\s]", stripped, re.IGNORECASE):
                raise SandboxError(f"line {at} changes the escape character: use \\")
            if stripped.startswith("#") or (not stripped and not parts):
                start = start if parts else at
                continue
            if stripped:
                parts.append(stripped.removesuffix("\\").rstrip() if stripped.endswith("\\") else stripped)
                if not stripped.endswith("\\"):
                    break
        keyword, _, rest = " ".join(parts).partition(" ")
        heredocs: list[Heredoc] = []
        if keyword.upper() in ("RUN", "COPY", "ADD"):
            for match in _HEREDOC.finditer(rest):
                body, at = _heredoc(lines, at, match["name"], strip=bool(match["strip"]))
                heredocs.append(Heredoc(match["name"], body, not match["quote"]))
        if parts:
            found.append(Statement(start + 1, keyword.upper(), rest.strip(), tuple(heredocs)))
    return found


def _heredoc(lines: list[str], at: int, name: str, *, strip: bool) -> tuple[str, int]:
    """The text of a here-document that begins at line ``at``, and the line after it."""
    body: list[str] = []
    for number in range(at, len(lines)):
        line = lines[number].lstrip("\t") if strip else lines[number]
        if line == name:
            return "".join(f"{one}\n" for one in body), number + 1
        body.append(line)
    raise SandboxError(f"line {at}: the here-document {name} has no end: add a line {name}")


def take_flags(rest: str) -> tuple[dict[str, list[str]], str]:
    """The flags ``--name=value`` at the start of a statement, and what follows them."""
    flags: dict[str, list[str]] = {}
    while match := re.match(r"--(?P<flag>[\w-]+)(?:=(?P<value>\S+))?(?:\s+|$)", rest):
        flags.setdefault(match["flag"], []).append(match["value"] or "")
        rest = rest[match.end() :]
    return flags, rest


def json_words(rest: str) -> list[str] | None:
    """The words of ``["a", "b"]``; None for another form."""
    if not rest.startswith("["):
        return None
    try:
        found = json.loads(rest)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, list) and all(isinstance(word, str) for word in found) else None


def words(text: str, variables: Mapping[str, str]) -> list[str]:
    """Split as a shell does, with quotes, and replace variables (not in single quotes).

    Raises :class:`~clawgym.errors.SandboxError` for a quote without an end.

    >>> words('A=1 B="two $X" \\'$X\\'', {"X": "words"})
    ['A=1', 'B=two words', '$X']
    """
    found: list[str] = []
    word: list[str] | None = None
    quote, at = "", 0
    while at < len(text):
        char = text[at]
        at += 1
        if char == "\\" and quote != "'" and at < len(text) and (not quote or text[at] in '"$\\'):
            word = [*(word or []), text[at]]
            at += 1
        elif char == quote:
            quote = ""
        elif char in "\"'" and not quote:
            quote, word = char, word or []
        elif char == "$" and quote != "'" and (match := _VARIABLE.match(text, at)):
            word = [*(word or []), _value(match, variables)]
            at = match.end()
        elif char.isspace() and not quote:
            if word is not None:
                found.append("".join(word))
            word = None
        else:
            word = [*(word or []), char]
    if quote:
        raise SandboxError(f"{text[:80]!r} has a quote without an end: close it")
    return found if word is None else [*found, "".join(word)]


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """``text`` with its variables replaced, and without quotes."""
    return " ".join(words(text, variables))


def ignored(text: str) -> Callable[[str], bool]:
    """What a ``.dockerignore`` leaves out, by path relative to its folder.

    Raises :class:`~clawgym.errors.SandboxError`, with the line, for a pattern that is not supported.

    >>> out = ignored("*.log\\n**/cache\\n!kept.log")
    >>> [path for path in ("a.log", "kept.log", "b/a.log", "b/cache/x") if out(path)]
    ['a.log', 'b/cache/x']
    """
    rules: list[tuple[bool, list[str]]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        pattern = line.strip()
        if not pattern or line.startswith("#"):
            continue
        if "\\" in pattern or any(part.count("*") > _MOST_STARS for part in pattern.split("/")):
            raise SandboxError(f"line {number}: {pattern[:80]} has \\ or many *: write it without")
        plain = posixpath.normpath(pattern.removeprefix("!").strip().lstrip("/") or ".")
        if plain != ".":
            rules.append((not pattern.startswith("!"), plain.replace("[^", "[!").split("/")))

    def leaves_out(path: str) -> bool:
        return next((out for out, parts in reversed(rules) if _begins(path.split("/"), parts)), False)

    return leaves_out


def _begins(path: Sequence[str], pattern: Sequence[str]) -> bool:
    """Whether a pattern matches a path, or a folder that it is in."""
    ends = {0}
    """The numbers of parts of the path that the pattern so far matches."""
    for part in pattern:
        if part == "**":
            ends = set(range(min(ends), len(path) + 1)) if ends else ends
        else:
            ends = {end + 1 for end in ends if end < len(path) and fnmatchcase(path[end], part)}
    return bool(ends)


def _value(match: re.Match[str], variables: Mapping[str, str]) -> str:
    name = match["name"] or match[0]
    value = variables.get(name, "")
    if match["kind"] == ":-":
        return value or expanded(match["other"], variables)
    if match["kind"] == ":+":
        return expanded(match["other"], variables) if value else ""
    return value
