"""Shapes made of bytes: what a fuzzer changes, turned into documents that come past the first check.

Every choice reads bytes from the input, and an input that is used up answers 0: so the empty input is the valid
document that a target starts from, and each byte of a longer one changes something about it.
"""

from __future__ import annotations

import asyncio
import io
import json
import tarfile
import tempfile
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

__all__ = ["Posted", "Source", "run", "scratch_folder"]

T = TypeVar("T")


class Raw(bytes):
    """JSON text that stands as it is."""


_DEEP = (60, 130, 260, 500, 990, 5_000, 100_000)
"""Brackets: around the bounds of our own checks, of orjson and of Python's recursion limit."""
_TEXTS = (
    "",
    "a",
    "../x",
    "/etc/passwd",
    "\0",
    "\x1b[2J",
    "\u202e",
    "é",
    "\U0001f600",
    "$HOME",
    "*",
    "a" * 300,
    "id",
    "\n",
)
_ODD = tuple(
    map(
        Raw,
        (
            *(b"null", b"true", b"false", b"0", b"-1", b"1", b"2.5", b"1e308", b"1e999", b"-0.0", b"NaN", b"Infinity"),
            *(b"2147483648", b"9223372036854775808", b"1" + b"0" * 400, b"9" * 5000, b'"\\ud800"', b'"\\u0000"'),
            *(b"[]", b"{}", b"[[]]", b"[null]", b'{"":null}', b"[1,2,3]", b'["a"]', b'"1"', b'{"type":"text"}'),
        ),
    )
)


class Source:
    """Reads choices from ``data``."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def byte(self) -> int:
        self._at += 1
        return self._data[self._at - 1] if self._at <= len(self._data) else 0

    def number(self, low: int, high: int) -> int:
        """From ``low`` (also for an input that is used up) to ``high``."""
        span, value = high - low, 0
        while span:
            value, span = value << 8 | self.byte(), span >> 8
        return low + value % (high - low + 1)

    def pick(self, choices: Sequence[T]) -> T:
        return choices[self.number(0, len(choices) - 1)]

    def bytes(self, most: int = 255) -> bytes:
        """A length, then so many bytes of the input."""
        size = min(self.number(0, most), max(0, len(self._data) - self._at))
        self._at += size
        return self._data[self._at - size : self._at]

    def text(self, most: int = 255) -> str:
        """Any text, lone surrogates too."""
        known = self.byte()
        return _TEXTS[known % len(_TEXTS)] if known < 128 else self.bytes(most).decode("utf-8", "surrogateescape")

    def rest(self) -> bytes:
        """What was not read yet."""
        rest, self._at = self._data[self._at :], len(self._data)
        return rest

    @property
    def left(self) -> int:
        return max(0, len(self._data) - self._at)

    def pieces(self, data: bytes) -> list[bytes]:
        """``data``, cut."""
        cut: list[bytes] = []
        while data:
            size = self.byte() or len(data)
            cut.append(data[:size])
            data = data[size:]
        return cut

    def change(self) -> int:
        """0 for most bytes, and for an input that is used up; else 1 to 4."""
        return max(0, (self.byte() >> 3) - 27)

    # -- JSON

    def json(self, like: Any) -> bytes:
        """A document as ``like``, some of it changed; or any bytes at all."""
        if self.byte() == 255:
            return self.rest()
        return _encoded(self.value(like))

    def value(self, like: Any) -> Any:
        """``like``, some of it changed."""
        match self.change():
            case 1:
                return self.pick(_ODD)
            case 2:
                return self._deep()
            case 3:
                return self.text()
            case 4:
                return self.any()
        if isinstance(like, Mapping):
            return self._object(like)
        if isinstance(like, list | tuple):
            return self._list(like)
        return like

    def _object(self, like: Mapping[str, Any]) -> dict[str, Any]:
        made = {name: self.value(inner) for name, inner in like.items()}
        match self.change():
            case 1 if made:
                del made[self.pick(list(made))]
            case 2:
                made[self.text()] = self.any()
            case 3 if made:
                made[self.pick(list(made))] = self.any()
        return made

    def _list(self, like: Sequence[Any]) -> list[Any]:
        made = [self.value(inner) for inner in like]
        match self.change():
            case 1 if made:
                made.append(self.value(self.pick(like)))
            case 2 if made:
                made.pop(self.number(0, len(made) - 1))
            case 3:
                made.append(self.any())
            case 4 if made:
                made *= 3
        return made

    def any(self, depth: int = 0) -> Any:
        """Any JSON."""
        match self.number(0, 7) if depth < 4 else 0:
            case 1 | 2:
                return self.text()
            case 3:
                return [self.any(depth + 1) for _ in range(self.number(0, 4))]
            case 4 | 5:
                return {self.text(): self.any(depth + 1) for _ in range(self.number(0, 4))}
            case 6:
                return self._deep()
        return self.pick(_ODD)

    def _deep(self) -> Raw:
        depth = self.pick(_DEEP)
        before, after = self.pick(((b"[", b"]"), (b'{"a":', b"}"), (b'[{"b":', b"}]")))
        return Raw(before * depth + b"0" + after * depth)

    # -- archives

    def tar(self) -> bytes:
        """An archive of files, folders, links and stranger things; or any bytes at all."""
        if self.byte() == 255:
            return self.rest()
        made = io.BytesIO()
        with tarfile.open(fileobj=made, mode="w", format=self.pick((tarfile.PAX_FORMAT, tarfile.GNU_FORMAT))) as tar:
            for _ in range(self.number(0, 12)):
                entry = tarfile.TarInfo(self.path())
                entry.type = self.pick(
                    (*(tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.REGTYPE),
                     *(tarfile.SYMTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.CONTTYPE, tarfile.AREGTYPE))
                )  # fmt: skip
                entry.linkname = self.path() if entry.type in (tarfile.SYMTYPE, tarfile.LNKTYPE) else ""
                entry.mode, entry.mtime = self.number(0, 0o7777), self.pick((0, -1, 1 << 33, 1 << 62, 0.5))
                data = self.bytes(40) if entry.isreg() else b""
                entry.size = len(data)
                if self.byte() == 255:
                    entry.pax_headers = {
                        self.pick(("path", "size", "mtime", "GNU.sparse.map", "linkpath")): self.text()
                    }
                try:
                    tar.addfile(entry, io.BytesIO(data))
                except (ValueError, OverflowError):  # such a header cannot be written
                    continue
        archive = bytearray(made.getvalue())
        for _ in range(self.number(0, 2)):  # and damage
            if archive:
                archive[self.number(0, min(len(archive), 1 << 16) - 1)] = self.byte()
        return bytes(archive[: -self.byte()] if self.byte() == 255 else archive)

    def path(self) -> str:
        """Names of few kinds, so that entries meet one another."""
        parts = ("a", "b", "c", "out", "reward", "..", ".", "", "/", "a" * 90, "\x1b", "é\udc80", "task.txt")
        return "/".join(self.pick(parts) for _ in range(1 + self.number(0, 4))) if self.byte() != 255 else self.text()


def _encoded(value: Any) -> bytes:
    if isinstance(value, Raw):
        return value
    if isinstance(value, Mapping):
        return (
            b"{" + b",".join(json.dumps(name).encode() + b":" + _encoded(item) for name, item in value.items()) + b"}"
        )
    if isinstance(value, list | tuple):
        return b"[" + b",".join(map(_encoded, value)) + b"]"
    return json.dumps(value).encode()


class Posted:
    """A request that brings ``body``, in two pieces: as much of aiohttp's as the gateway reads."""

    content_length = None

    def __init__(self, body: bytes) -> None:
        self._body = body

    @property
    def content(self) -> Posted:
        return self

    def is_eof(self) -> bool:
        return False

    async def iter_any(self) -> AsyncIterator[bytes]:
        half = len(self._body) // 2
        yield self._body[:half]
        yield self._body[half:]


_loop: asyncio.AbstractEventLoop | None = None


def run(work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``. Raises what a task of it, or a callback, raised and nobody waited for."""
    global _loop
    if _loop is None or _loop.is_closed():
        _loop = asyncio.new_event_loop()
    unheard: list[dict[str, Any]] = []
    _loop.set_exception_handler(lambda _, context: unheard.append(context))
    result = _loop.run_until_complete(work)
    for context in unheard:
        raise context.get("exception") or AssertionError(context["message"])
    return result


@cache
def scratch_folder() -> Path:
    """A folder of this process, in memory where there is such a place; it goes with the process."""
    held = _held(Path("/dev/shm") if Path("/dev/shm").is_dir() else None)
    return Path(held.name)


@cache
def _held(place: Path | None) -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="clawgym-fuzz-", dir=place, ignore_cleanup_errors=True)
