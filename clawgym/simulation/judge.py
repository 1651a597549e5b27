"""A judge that reads the user's answer: thanks are a vote for the reply; a complaint is a vote against it and a hint.

Invariant: it reads the next state only, not the reply, the request or the user's rules.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from clawgym.records.judge import Judgeable, Judgement, Vote
from clawgym.registry import judges
from clawgym.simulation.rules import RULES
from clawgym.simulation.users import MISSING, MISSING_INSTRUCTION, THANKS

__all__ = ["ComplaintJudge"]

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
