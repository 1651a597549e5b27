"""Encode a turn as a database row: ids as little-endian int32, exact log-probs, the rest as one JSON document.

Invariant: ``unpack(pack(turn)) == turn``, bit for bit, for everything that JSON can represent. A row that was modified
after it was written is refused.
"""

from __future__ import annotations

import hashlib
import json
import sys
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, cast, get_args

from clawgym.errors import PoolError
from clawgym.records import Role, Turn, ids_array

__all__ = ["document_of", "from_document", "from_json", "pack", "pack_ids", "text", "to_json", "unpack", "unpack_ids"]

LARGEST_DOCUMENT = 256 * 2**20
"""Most bytes of one decompressed document."""
_LARGE = 512
"""Documents with more bytes than this are compressed."""
_ROLES = frozenset(get_args(Role))
_COLUMNS = (
    "parent", "role", "flaw", "policy_version", "finish_reason", "malformed_calls",
    "context_ids", "sampled_ids", "logprobs",
)  # fmt: skip
_COMPACT = json.JSONEncoder(separators=(",", ":")).encode
_IN_DOCUMENT = tuple(f.name for f in fields(Turn) if f.name not in _COLUMNS)


def text(where: str, value: object) -> str:
    """``value`` if every database can store it as text. Otherwise raises :class:`PoolError`, which names ``where``."""
    if not isinstance(value, str) or "\0" in value:
        raise PoolError(f"{where}: {value!r} is not text without NUL: correct it")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise PoolError(f"{where}: {value!r} has half a surrogate pair: correct it") from None
    return value


def _little(numbers: array[Any]) -> bytes:
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


def _read(code: str, data: bytes) -> list[Any]:
    numbers = array(code)
    numbers.frombytes(data)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tolist()


def pack_ids(where: str, ids: Sequence[int]) -> bytes:
    """Encode as little-endian int32. Raises :class:`PoolError` for invalid token ids."""
    try:
        return _little(ids_array(ids))
    except ValueError as error:
        raise PoolError(f"{where}: {error}: give ids as the engine did") from error


def unpack_ids(data: bytes) -> tuple[int, ...]:
    return tuple(_read("i", data))


def _pack_floats(where: str, values: Sequence[float]) -> bytes:
    """A type code, then float32 if that is exact (most engines compute in it), else float64."""
    try:
        single, double = array("f", values), array("d", values)
    except (TypeError, OverflowError) as error:
        raise PoolError(f"{where}: log-probs are numbers ({error}): give them as the engine did") from error
    exact = single.tolist() == double.tolist()
    return b"f" + _little(single) if exact else b"d" + _little(double)


def _unpack_floats(data: bytes) -> tuple[float, ...]:
    return tuple(_read(chr(data[0]), data[1:]))


def _plain_json(where: str, value: Any) -> bytes:
    try:
        plain = _COMPACT(value).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise PoolError(f"{where}: cannot be written as JSON ({error}): give plain data") from error
    if len(plain) > LARGEST_DOCUMENT:
        raise PoolError(f"{where}: is larger than {LARGEST_DOCUMENT >> 20} MiB: give less")
    return plain


def _squeezed(plain: bytes) -> bytes:
    return plain if len(plain) <= _LARGE else zlib.compress(plain, 1)


def _plain(data: bytes) -> bytes:
    """Decompress a document. Raises :class:`PoolError` beyond :data:`LARGEST_DOCUMENT`."""
    if data[:1] != b"x":
        return data
    unpacker = zlib.decompressobj()
    plain = unpacker.decompress(data, LARGEST_DOCUMENT)
    if unpacker.unconsumed_tail or not unpacker.eof:
        raise PoolError(
            f"a document of over {LARGEST_DOCUMENT >> 20} MiB, or a cut one: give a pool that this library wrote"
        )
    return plain


def to_json(where: str, value: Any) -> bytes:
    """JSON as bytes, compressed if large. Raises :class:`PoolError` for what JSON cannot represent."""
    return _squeezed(_plain_json(where, value))


def from_json(data: bytes) -> Any:
    return json.loads(_plain(data))


def _digest(episode: str, index: int, row: Any, plain: bytes) -> bytes:
    """SHA-256 of a whole turn, with its document uncompressed, as compression differs between machines."""
    head = json.dumps([episode, index, *(row[name] for name in _COLUMNS[:6])])
    digest = hashlib.sha256(head.encode())
    for part in (*(row[name] for name in _COLUMNS[6:]), plain):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def document_of(turn: Turn) -> dict[str, Any]:
    """The non-empty fields that have no column of their own."""
    return {name: v for name in _IN_DOCUMENT if (v := getattr(turn, name))}


def from_document(document: dict[str, Any]) -> dict[str, Any]:
    """The fields of a document as arguments of :class:`Turn`."""
    return {name: tuple(v) if isinstance(v, list) else v for name, v in document.items()}


def pack(episode: str, index: int, turn: Turn) -> dict[str, Any]:
    """The columns of one turn. Raises :class:`PoolError`, which names the field that cannot be stored."""
    where = f"episode {episode}, turn {index}"
    if turn.parent is not None and not 0 <= turn.parent < index:
        raise PoolError(f"{where}: parent {turn.parent} does not come before it: name an earlier turn")
    if turn.role not in _ROLES:
        raise PoolError(f"{where}: role {turn.role!r} is not one of {', '.join(sorted(_ROLES))}: correct it")
    if not isinstance(turn.policy_version, int | None):
        raise PoolError(f"{where}: policy_version {turn.policy_version!r} is not a whole number: correct it")
    row: dict[str, Any] = {
        "parent": turn.parent,
        "role": turn.role,
        "flaw": None if turn.flaw is None else text(f"{where}: flaw", turn.flaw),
        "policy_version": turn.policy_version,
        "finish_reason": text(f"{where}: finish_reason", turn.finish_reason),
        "malformed_calls": turn.malformed_calls,
        "context_ids": pack_ids(f"{where}: context_ids", turn.context_ids),
        "sampled_ids": pack_ids(f"{where}: sampled_ids", turn.sampled_ids),
        "logprobs": _pack_floats(f"{where}: logprobs", turn.logprobs),
    }
    plain = _plain_json(where, document_of(turn))
    return row | {"document": _squeezed(plain), "digest": _digest(episode, index, row, plain)}


def unpack(episode: str, index: int, row: Any) -> Turn:
    """The turn of these columns. Raises :class:`PoolError` if they are not what was written."""
    changed = f"episode {episode}, turn {index}: changed since it was written: restore it from a copy"
    try:
        plain = _plain(row["document"])
    except (zlib.error, PoolError):
        raise PoolError(changed) from None
    if bytes(row["digest"]) != _digest(episode, index, row, plain):
        raise PoolError(changed)
    return Turn(
        context_ids=unpack_ids(row["context_ids"]),
        sampled_ids=unpack_ids(row["sampled_ids"]),
        logprobs=_unpack_floats(row["logprobs"]),
        policy_version=row["policy_version"],
        role=cast(Role, row["role"]),
        parent=row["parent"],
        finish_reason=row["finish_reason"],
        flaw=row["flaw"],
        malformed_calls=row["malformed_calls"],
        **from_document(json.loads(plain)),
    )
