"""Judge ``head``: logistic regression on hashed words of (state, action, next state). No model, no torch.

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
from clawgym.registry import judges
from clawgym.rewards.rules import failures
from clawgym.rewards.states import Judgeable, Message
from clawgym.rewards.votes import Judgement, Vote

__all__ = ["HeadJudge", "TrainedOn", "features", "train_head"]

SIZE = 2**15
"""Weights; words are hashed to one of so many."""
MARGIN = 0.1
"""A probability nearer to 1/2 than this is the vote 0."""
_FEATURES = 1
"""Counted up with every change of :func:`features`: a file of another one is refused."""
_MOST = 2000
"""Words of each part that are looked at, from both ends."""
_WORD = re.compile(r"[^\W\d]{2,40}|\d+|[^\w\s]{1,3}")


class TrainedOn(ClawGymError):
    """A head was asked about a family of tasks that it was trained on."""


def features(asked: Judgeable) -> tuple[np.ndarray, np.ndarray]:
    """Places (F,) int64, each once, and values (F,) float64 of Euclidean length 1: words of the message before the
    action, of the action, of what came after, each part for itself; how many calls failed or were malformed."""
    counts: dict[int, float] = {}
    for word in _words(asked):
        place = zlib.crc32(word.encode("utf-8", "replace")) % SIZE
        counts[place] = counts.get(place, 0.0) + 1.0
    places = np.array(sorted(counts), dtype=np.int64)
    values = np.log1p(np.array([counts[place] for place in places.tolist()], dtype=np.float64))
    return places, values / (np.linalg.norm(values) or 1.0)


def _words(asked: Judgeable) -> Iterator[str]:
    yield from _in_part("s", asked.history[-1:])
    yield from _in_part("a", [asked.action])
    yield from _in_part("n", asked.after.messages)
    failed = failures(asked)
    yield from (f"! {asked.setting}", f"! failed {min(failed, 3)}", f"! malformed {min(asked.malformed_calls, 3)}")
    yield f"! results {min(len(asked.after.messages), 3)}"


def _in_part(part: str, messages: Sequence[Message]) -> Iterator[str]:
    said = json.dumps([[m.get("role"), m.get("content"), m.get("tool_calls")] for m in messages], default=str)
    words = _WORD.findall(said)
    if len(words) > _MOST:
        words = words[: _MOST // 2] + words[-_MOST // 2 :]
    yield from (f"{part} {word.lower()}" for word in words)


class HeadJudge:
    """One vote on a turn: +1, 0 or -1 by the probability that such a turn belongs to a good outcome.

    Made by :func:`train_head` or :meth:`load`. ``families`` are those that it was trained on; asked about one of them
    it raises :class:`TrainedOn`.
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

    def probability(self, asked: Judgeable) -> float:
        """Of a good outcome, where good and bad ones are equally frequent."""
        places, values = features(asked)
        return _sigmoid(float(values @ self._weights[places]) + self._bias)

    async def judge(self, asked: Judgeable) -> Judgement:
        """One vote, with the probability as its text."""
        if asked.family in self.families:
            raise TrainedOn(f"this head was trained on tasks of family {asked.family!r}: train one on other families")
        p = self.probability(asked)
        vote: Vote = 1 if p >= 0.5 + MARGIN else -1 if p <= 0.5 - MARGIN else 0
        return Judgement((vote,), (f"{p:.6f}",), self.name, self.version)

    def save(self, path: str | Path) -> None:
        """Write the head to one file, which appears whole or not at all."""
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
        """A head that :meth:`save` wrote. Raises :class:`ValueError` for anything else, or one that was changed."""
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
    """Learn from turns and whether their episodes ended well, of families of tasks other than those to be judged.

    Minimises the logistic loss plus ``l2``/2 |w|^2 by ``rounds`` full steps of Adagrad (Duchi et al. 2011); good and
    bad examples weigh the same in all, however many there are of each, so a probability of 1/2 is "as often one as
    the other". The same examples give the same head. Raises :class:`ValueError` without examples of both kinds.
    """
    good = np.array([bool(ended_well) for _, ended_well in examples])
    if not good.any() or good.all():
        raise ValueError("a head learns from good and bad outcomes: give examples of both")
    rows, places, values = [], [], []
    for row, (asked, _) in enumerate(examples):
        where, what = features(asked)
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
    return HeadJudge(weights, bias, [asked.family for asked, _ in examples])


def _sigmoid(z: float) -> float:
    return 0.5 * (1 + math.tanh(z / 2))


@judges.register("head")
def head_judge(file: Path) -> HeadJudge:
    """Logistic regression on hashed words of the turn, trained beforehand.

    Args:
        file: what :meth:`HeadJudge.save` wrote.
    """
    return HeadJudge.load(file.expanduser())
