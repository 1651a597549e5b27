"""Judges without a model: what the results of tools say by themselves, and a judge made worse on purpose.

Invariant: the same turn gets the same vote, always.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import replace

from clawgym.registry import judges
from clawgym.rewards.states import Judgeable, Message
from clawgym.rewards.votes import Judge, Judgement, Vote

__all__ = ["DegradedJudge", "RuleJudge", "failures", "fraction_of", "went_wrong"]

_RULES = 1
"""Counted up with every change of what :func:`went_wrong` says."""
# Of a command's result only the last line is the tool's; the rest is the command's own output.
_EXIT_NOTE = re.compile(r"\[exit code (-?\d+)(?:;[^\n]*)?\]\Z")
_EXIT_WORDS = re.compile(r"\(?Command exited with code (-?\d+)\.?\)?\Z")


def failures(asked: Judgeable) -> int:
    """How many results say that their calls failed (:func:`went_wrong`). Results are the messages of tools; and, in a
    shell, those of the user after a step without calls, which agents that write commands as text are answered by."""
    by_text = asked.setting in ("terminal", "swe") and not asked.action.get("tool_calls")
    results = ("tool", "function", "user") if by_text else ("tool", "function")
    return sum(went_wrong(message) for message in asked.after.messages if message.get("role") in results)


def went_wrong(result: Message) -> bool:
    """Whether a result says that its call failed: an exit code that is not 0, or an error of the tool itself.

    Read are the marks that the tools here and OpenClaw's put there themselves: ``[error: ...]`` around the whole,
    ``[exit code N; ...]`` or ``Command exited with code N`` as the last line, JSON with ``status`` ``error`` or a true
    ``isError``.
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
            said = json.loads(text)
        except (ValueError, RecursionError):
            return False
        return said.get("status") == "error" or said.get("isError") is True
    return False


@judges.register("rule")
class RuleJudge:
    """-1 for a malformed call or a call that failed (one of several is enough); else what ``progress`` says; else 0.

    ``progress`` maps a :class:`~clawgym.rewards.states.Judgeable` to +1, 0, -1 or ``None``, the same each time;
    ``rule`` names it, and is part of the version.
    """

    name = "rule"

    def __init__(self, progress: Callable[[Judgeable], Vote] | None = None, *, rule: str = "") -> None:
        if (progress is None) != (not rule):
            raise ValueError("a progress rule and its name go together: give progress= and rule=, or neither")
        self._progress = progress
        self.version = hashlib.sha256(f"rule {_RULES} {rule}".encode()).hexdigest()

    async def judge(self, asked: Judgeable) -> Judgement:
        """One vote, with its reason as the text."""
        failed = failures(asked)
        if asked.malformed_calls:
            vote, why = -1, f"{asked.malformed_calls} malformed calls"
        elif failed:
            vote, why = -1, f"{failed} calls failed"
        elif self._progress is not None:
            vote, why = self._progress(asked), "progress rule"
        else:
            vote, why = 0, "nothing failed"
        return Judgement((vote,), (why,), self.name, self.version)


class DegradedJudge:
    """An exact judge whose AUC against the truth is ``auc``: it says the opposite at some turns.

    Each turn is flipped (all its votes, +1 <-> -1; 0 stays) with probability p = 1 - auc, by a hash of ``seed``,
    episode and turn. Of a true +1 and a true -1 the ranks are right if neither is flipped, (1 - p)^2, and tied if one
    is, 2 p (1 - p): AUC = (1 - p)^2 + p (1 - p) = 1 - p. So 1.0 changes nothing, 0.5 knows nothing, 0.0 is always
    wrong. Exact means +1 and -1 as the truth is; a judge that is not has less to lose.
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

    async def judge(self, asked: Judgeable) -> Judgement:
        """What the judge says, or the opposite."""
        judgement = replace(await self._judge.judge(asked), judge=self.name, version=self.version)
        if fraction_of(self._seed, asked.episode, asked.turn) >= self._flipped:
            return judgement
        opposite: dict[Vote, Vote] = {1: -1, 0: 0, -1: 1, None: None}
        return replace(judgement, votes=tuple(opposite[vote] for vote in judgement.votes))


def fraction_of(*what: object) -> float:
    """A number in [0, 1) that depends on ``what`` alone."""
    digest = hashlib.blake2b(json.dumps(what).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
