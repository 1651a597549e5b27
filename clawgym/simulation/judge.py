"""A judge that reads the user's answer: thanks are a vote for the reply; a complaint is a vote against it and a hint.
And a scorer of other replies to the same request, which reads that answer too.

Invariant: neither knows the user's rules. The judge reads the next state only.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from statistics import fmean
from typing import Any

from clawgym.records.judge import Judgeable, Judgement, Vote
from clawgym.registry import judges, scorers
from clawgym.simulation.rules import RULES
from clawgym.simulation.users import MISSING, MISSING_INSTRUCTION, THANKS, UserRequest

__all__ = ["ComplaintJudge", "ComplaintScorer"]

_HINTS: Mapping[str, str] = {rule.complaint: rule.instruction for rule in RULES.values()} | {
    MISSING: MISSING_INSTRUCTION
}


@judges.register("complaints")
class ComplaintJudge:
    """+1 for thanks, -1 for complaints, with one hint that says what they ask for; 0 for anything else."""

    name = "complaints"

    @property
    def version(self) -> str:
        """Hex digest of all texts that count as thanks or complaints."""
        return hashlib.sha256(json.dumps([THANKS, _HINTS], sort_keys=True).encode()).hexdigest()

    async def judge(self, record: Judgeable) -> Judgement:
        """One vote, with the user's answer as its text."""
        answer = " ".join(str(m.get("content") or "") for m in record.after.messages if m.get("role") == "user")
        places = {complaint: answer.find(complaint) for complaint in _HINTS}
        complaints = sorted((place, complaint) for complaint, place in places.items() if place >= 0)
        vote: Vote = -1 if complaints else 1 if THANKS in answer else 0
        hints = (" ".join(_HINTS[complaint] for _, complaint in complaints),) if complaints else ()
        return Judgement((vote,), (answer,), self.name, self.version, hints, hints)


_FACTS = re.compile(r"[Tt]he (\w+) has (\d+) (\w+)")


@scorers.register("complaints")
class ComplaintScorer:
    """Scores a reply by what the user said to another reply to the same request (:mod:`clawgym.online.replay`).

    The rules that the user complained of up to this answer must be kept; after thanks without any complaint, those that
    the thanked reply kept. A reply that lacks a figure scores 0.
    """

    def __init__(self, context: Any) -> None:
        pass

    async def score(self, replayed: Any) -> float:
        """In [0, 1]; 0.5 if the user said neither."""
        record: Judgeable = replayed.turn.record
        answer = " ".join(str(m.get("content") or "") for m in record.after.messages if m.get("role") == "user")
        before, reply = str(record.action.get("content") or ""), str((replayed.reply or {}).get("content") or "")
        asked = next((str(m.get("content")) for m in record.history if m.get("role") == "user"), "")
        facts = _FACTS.findall(asked)
        if facts and UserRequest(asked, tuple((a, int(n)) for a, n, _ in facts), facts[0][2]).content(reply) < 1:
            return 0.0
        said = " ".join([*(str(m.get("content")) for m in record.history if m.get("role") == "user"), answer])
        named = [rule for rule in RULES.values() if rule.complaint in said]
        if not named and THANKS in answer:
            named = [rule for rule in RULES.values() if rule.score(before) == 1]
        if named:
            return fmean(rule.score(reply) for rule in named)
        return 1.0 if MISSING in answer else 0.5
