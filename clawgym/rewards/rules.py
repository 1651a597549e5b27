"""Judges without a model: one that reads tool results, and one that makes another judge worse on purpose.

Invariant: both are deterministic.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import replace

from clawgym.records.judge import Judge, Judgeable, Judgement, Message, Vote
from clawgym.registry import judges

__all__ = ["DegradedJudge", "RuleJudge", "failures", "fraction_of", "went_wrong"]

_RULES = 1
"""Version of :func:`went_wrong`."""
# Only the last line of a command's result is from the tool; the rest is the command's output.
_EXIT_NOTE = re.compile(r"\[exit code (-?\d+)(?:;[^\n]*)?\]\Z")
_EXIT_WORDS = re.compile(r"\(?Command exited with code (-?\d+)\.?\)?\Z")


def failures(record: Judgeable) -> int:
    """The number of results that report a failure (:func:`went_wrong`).

    Results are the messages of tools. In a shell setting they are also the user's messages after a step without calls:
    agents that write commands as text get their results that way.
    """
    by_text = record.setting in ("terminal", "swe") and not record.action.get("tool_calls")
    results = ("tool", "function", "user") if by_text else ("tool", "function")
    return sum(went_wrong(message) for message in record.after.messages if message.get("role") in results)


def went_wrong(result: Message) -> bool:
    """Whether a result reports that its call failed: a non-zero exit code, or an error of the tool.

    It recognises the formats of ClawGym's and OpenClaw's tools: ``[error: ...]`` as the whole result, ``[exit code N;
    ...]`` or ``Command exited with code N`` as the last line, and JSON with ``status`` ``error`` or a true ``isError``.
    """
    content = result.get("content")
    if isinstance(content, list):
        content = "".join(str(p.get("text") or "") for p in content if isinstance(p, dict))
    text = content.strip() if isinstance(content, str) else ""
    if text.startswith("[error:") and text.endswith("]"):
        return True
    last = text.rpartition("\n")[2].strip()
    if code := _EXIT_NOTE.search(last) or _EXIT_WORDS.search(last):
        return code.group(1).strip("-0") != ""
    if text.startswith("{") and text.endswith("}"):
        try:
            answer = json.loads(text)
        except (ValueError, RecursionError):
            return False
        return answer.get("status") == "error" or answer.get("isError") is True
    return False


@judges.register("rule")
class RuleJudge:
    """Votes -1 if any call was malformed or failed; otherwise as ``progress`` says, or 0 without it.

    Args:
        progress: deterministically maps a :class:`~clawgym.rewards.states.Judgeable` to +1, 0, -1 or None.
        rule: the name of ``progress``, which is part of the version.
    """

    name = "rule"

    def __init__(self, progress: Callable[[Judgeable], Vote] | None = None, *, rule: str = "") -> None:
        if (progress is None) != (not rule):
            raise ValueError("a progress rule and its name go together: give progress= and rule=, or neither")
        self._progress = progress
        self.version = hashlib.sha256(f"rule {_RULES} {rule}".encode()).hexdigest()

    async def judge(self, record: Judgeable) -> Judgement:
        """One vote; its text is the reason."""
        failed = failures(record)
        if record.malformed_calls:
            vote, why = -1, f"{record.malformed_calls} malformed calls"
        elif failed:
            vote, why = -1, f"{failed} calls failed"
        elif self._progress is not None:
            vote, why = self._progress(record), "progress rule"
        else:
            vote, why = 0, "nothing failed"
        return Judgement((vote,), (why,), self.name, self.version)


class DegradedJudge:
    """Inverts the votes of an exact judge at some turns, so that its AUC becomes ``auc``.

    All votes of a turn are inverted (0 stays 0) with probability p = 1 - auc, by a hash of ``seed``, episode and turn.
    A true +1 and a true -1 are ranked correctly if neither is inverted, (1 - p)^2, and tied if one is, 2 p (1 - p): AUC
    = (1 - p)^2 + p (1 - p) = 1 - p. So 1.0 changes nothing, 0.5 is random, 0.0 is always wrong. An exact judge votes +1
    or -1 as the truth is; a less exact one loses less.
    """

    def __init__(self, judge: Judge, auc: float, *, seed: int = 0) -> None:
        if not 0.0 <= auc <= 1.0:
            raise ValueError(f"auc={auc}: must be between 0 and 1: correct it")
        self._judge = judge
        self._flipped = 1.0 - auc
        self._seed = seed
        self.name = f"{judge.name}-degraded"
        self.auc = auc

    @property
    def version(self) -> str:
        return hashlib.sha256(f"degraded {self.auc!r} {self._seed} {self._judge.version}".encode()).hexdigest()

    async def judge(self, record: Judgeable) -> Judgement:
        """The judge's votes, inverted at some turns."""
        judgement = replace(await self._judge.judge(record), judge=self.name, version=self.version)
        if fraction_of(self._seed, record.episode, record.turn) >= self._flipped:
            return judgement
        opposite: dict[Vote, Vote] = {1: -1, 0: 0, -1: 1, None: None}
        return replace(judgement, votes=tuple(opposite[vote] for vote in judgement.votes))


def fraction_of(*what: object) -> float:
    """A pseudo-random number in [0, 1), determined by ``what``."""
    digest = hashlib.blake2b(json.dumps(what).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
