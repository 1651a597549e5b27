"""Judge ``head``: logistic regression on hashed words of (state, action, next state), without torch.

Invariant: a head never judges a family of tasks whose outcomes it was trained on.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from clawgym.errors import ClawGymError
from clawgym.records.judge import Judgeable, Judgement, Message, Vote
from clawgym.registry import judges
from clawgym.rewards.rules import failures

__all__ = ["HeadJudge", "TrainedOn", "features", "train_head"]

SIZE = 2**15
"""Number of weights; each word is hashed to one of them."""
MARGIN = 0.1
"""Probabilities closer to 1/2 than this give the vote 0."""
_FEATURES = 1
"""Version of :func:`features`. Files of other versions are refused."""
_MOST = 2000
"""Most words of each part; of longer parts both ends are used."""
_WORD = re.compile(r"[^\W\d]{2,40}|\d+|[^\w\s]{1,3}")


class TrainedOn(ClawGymError):
    """A head was asked to judge a family of tasks that it was trained on."""


def features(record: Judgeable) -> tuple[np.ndarray, np.ndarray]:
    """The features of a turn: indices (F,) int64 without duplicates, and values (F,) float64 with Euclidean norm 1.

    They count words of the message before the action, of the action, and of the next state, each separately, and the
    calls that failed or were malformed.
    """
    counts: dict[int, float] = {}
    for word in _words(record):
        place = zlib.crc32(word.encode("utf-8", "replace")) % SIZE
        counts[place] = counts.get(place, 0.0) + 1.0
    places = np.array(sorted(counts), dtype=np.int64)
    values = np.log1p(np.array([counts[place] for place in places.tolist()], dtype=np.float64))
    return places, values / (np.linalg.norm(values) or 1.0)


def _words(record: Judgeable) -> Iterator[str]:
    yield from _in_part("s", record.history[-1:])
    yield from _in_part("a", [record.action])
    yield from _in_part("n", record.after.messages)
    failed = failures(record)
    yield from (f"! {record.setting}", f"! failed {min(failed, 3)}", f"! malformed {min(record.malformed_calls, 3)}")
    yield f"! results {min(len(record.after.messages), 3)}"


def _in_part(part: str, messages: Sequence[Message]) -> Iterator[str]:
    text = json.dumps([[m.get("role"), m.get("content"), m.get("tool_calls")] for m in messages], default=str)
    words = _WORD.findall(text)
    if len(words) > _MOST:
        words = words[: _MOST // 2] + words[-_MOST // 2 :]
    yield from (f"{part} {word.lower()}" for word in words)


class HeadJudge:
    """Votes +1, 0 or -1 by the probability that the turn belongs to a good outcome.

    Made by :func:`train_head` or :meth:`load`. Raises :class:`TrainedOn` for tasks of ``families``, which it was
    trained on.
    """

    name = "head"

    def __init__(self, weights: np.ndarray, bias: float, families: Sequence[str]) -> None:
        weights = np.ascontiguousarray(weights, dtype="<f4")
        if weights.shape != (SIZE,) or not np.isfinite(weights).all() or not math.isfinite(bias):
            raise ValueError(f"a head has {SIZE} finite weights and a bias, not {weights.shape}: train it again")
        self._weights, self._bias = weights, float(bias)
        self.families = tuple(sorted(set(families)))
        about = json.dumps([_FEATURES, MARGIN, self._bias, self.families])
        self.version = hashlib.sha256(about.encode() + weights.tobytes()).hexdigest()

    def probability(self, record: Judgeable) -> float:
        """The probability of a good outcome, if good and bad outcomes are equally frequent."""
        places, values = features(record)
        return _sigmoid(float(values @ self._weights[places]) + self._bias)

    async def judge(self, record: Judgeable) -> Judgement:
        """One vote; its text is the probability."""
        if record.family in self.families:
            raise TrainedOn(f"this head was trained on tasks of family {record.family!r}: train one on other families")
        p = self.probability(record)
        vote: Vote = 1 if p >= 0.5 + MARGIN else -1 if p <= 0.5 - MARGIN else 0
        return Judgement((vote,), (f"{p:.6f}",), self.name, self.version)

    def save(self, path: str | Path) -> None:
        """Write the head to a file, atomically."""
        target = Path(path)
        about = {"features": _FEATURES, "bias": self._bias, "families": self.families, "version": self.version}
        number, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        try:
            with os.fdopen(number, "wb") as file:
                np.savez_compressed(file, weights=self._weights, about=np.array(json.dumps(about)))
            os.replace(name, target)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise

    @classmethod
    def load(cls, path: str | Path) -> HeadJudge:
        """Read a head that :meth:`save` wrote. Raises :class:`ValueError` for other or modified files."""
        try:
            with np.load(path, allow_pickle=False) as file:
                about = json.loads(str(file["about"]))
                head = cls(file["weights"], about["bias"], about["families"])
        except (OSError, ValueError, KeyError, TypeError, EOFError, AttributeError, zipfile.BadZipFile) as error:
            raise ValueError(f"{path}: not a judge's head ({error}): train it again") from error
        if about.get("features") != _FEATURES or about.get("version") != head.version:
            raise ValueError(f"{path}: of another version, or changed since it was written: train it again")
        return head


def train_head(examples: Sequence[tuple[Judgeable, bool]], *, l2: float = 1e-3, rounds: int = 200) -> HeadJudge:
    """Train a head on turns, each with whether its episode ended well.

    Minimises the logistic loss plus ``l2``/2 |w|^2 by ``rounds`` full steps of Adagrad (Duchi et al. 2011). Good and
    bad examples have the same total weight, however many there are of each. Training is deterministic. The head must
    judge other families of tasks than those of the examples. Raises :class:`ValueError` without examples of both kinds.
    """
    good = np.array([bool(ended_well) for _, ended_well in examples])
    if not good.any() or good.all():
        raise ValueError("a head is trained on good and bad outcomes: give examples of both")
    rows, places, values = [], [], []
    for row, (record, _) in enumerate(examples):
        where, what = features(record)
        rows.append(np.full(len(where), row))
        places.append(where)
        values.append(what)
    row, place, value = np.concatenate(rows), np.concatenate(places), np.concatenate(values)
    share = np.where(good, 0.5 / good.sum(), 0.5 / (~good).sum())
    weights, bias = np.zeros(SIZE), 0.0
    seen, seen_bias = np.full(SIZE, 1e-8), 1e-8
    for _ in range(rounds):
        z = np.bincount(row, value * weights[place], minlength=len(good)) + bias
        error = share * (0.5 * (1 + np.tanh(z / 2)) - good)
        slope = np.bincount(place, value * error[row], minlength=SIZE) + l2 * weights
        seen += slope**2
        seen_bias += error.sum() ** 2
        weights -= 0.5 * slope / np.sqrt(seen)
        bias -= 0.5 * error.sum() / math.sqrt(seen_bias)
    return HeadJudge(weights, bias, [record.family for record, _ in examples])


def _sigmoid(z: float) -> float:
    return 0.5 * (1 + math.tanh(z / 2))


@judges.register("head")
def head_judge(file: Path) -> HeadJudge:
    """Logistic regression on hashed words of the turn, trained beforehand.

    Args:
        file: a file written by :meth:`HeadJudge.save`.
    """
    return HeadJudge.load(file.expanduser())
