"""Bag-of-words features of a turn: hashed words of the message before it, of the action, and of the next state."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator, Sequence

import numpy as np

from clawgym.records.judge import Judgeable, Message
from clawgym.rewards.rules import failures

__all__ = ["SIZE", "words"]

SIZE = 2**13
"""Number of features; each word is hashed to one of them."""
_MOST = 2000
"""Most words of each part; of longer parts both ends are used."""
_WORD = re.compile(r"[^\W\d]{2,40}|\d+|[^\w\s]{1,3}")


def words(record: Judgeable) -> np.ndarray:
    """(SIZE,) float32 with Euclidean norm 1: log counts of words, and of the calls that failed or were malformed."""
    found = np.zeros(SIZE, np.float32)
    for word in _words(record):
        found[zlib.crc32(word.encode("utf-8", "replace")) % SIZE] += 1
    found = np.log1p(found)
    return found / (np.linalg.norm(found) or 1.0)


def _words(record: Judgeable) -> Iterator[str]:
    yield from _in_part("s", record.history[-1:])
    yield from _in_part("a", [record.action])
    yield from _in_part("n", record.after.messages)
    failed = failures(record)
    yield from (f"! {record.setting}", f"! failed {min(failed, 3)}", f"! malformed {min(record.malformed_calls, 3)}")
    yield f"! results {min(len(record.after.messages), 3)}"


def _in_part(part: str, messages: Sequence[Message]) -> Iterator[str]:
    text = json.dumps([[m.get("role"), m.get("content"), m.get("tool_calls")] for m in messages], default=str)
    found = _WORD.findall(text)
    if len(found) > _MOST:
        found = found[: _MOST // 2] + found[-_MOST // 2 :]
    yield from (f"{part} {word.lower()}" for word in found)
