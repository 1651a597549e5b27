"""A judge that reads the user's answer: thanks are a vote for the reply; a complaint is a vote against it and a hint.
And a scorer of other replies to the same request, which reads that answer too.

Invariant: neither knows the user's rules. The judge reads the next state only.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from statistics import fmean
from typing import Any

from clawgym.records.judge import Judgeable, Judgement, Vote
from clawgym.registry import judges, scorers
from clawgym.simulation.rules import RULES, Rule
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
    """Scores a reply by what the user said to another reply to the same request (:mod:`clawgym.online.replay`), and in
    conversations that began earlier: all of a service are taken for those of one person.

    The rules that the person has complained of so far must be kept; after thanks without any complaint so far, those
    that the thanked reply kept. A reply that lacks a figure scores 0.
    """

    def __init__(self, context: Any) -> None:
        self._pool: Any = context and context.pool
        self._first: dict[str, float] = {}
        """Name of a rule -> when the first conversation began in which the person complained of it."""
        self._read: set[str] = set()

    async def score(self, replayed: Any) -> float:
        """In [0, 1]; 0.5 if the user said neither."""
        record: Judgeable = replayed.turn.record
        answer = " ".join(str(m.get("content") or "") for m in record.after.messages if m.get("role") == "user")
        before, reply = str(record.action.get("content") or ""), str((replayed.reply or {}).get("content") or "")
        asked = next((str(m.get("content")) for m in record.history if m.get("role") == "user"), "")
        facts = _FACTS.findall(asked)
        if facts and UserRequest(asked, tuple((a, int(n)) for a, n, _ in facts), facts[0][2]).content(reply) < 1:
            return 0.0
        names = {rule.name for rule in _named([*_said(record.history), answer])}
        if not names and THANKS not in answer and MISSING not in answer:
            return 0.5
        names |= self._known(replayed.turn.at)
        if names or MISSING in answer:
            return fmean([RULES[name].score(reply) for name in names] or [1.0])
        return fmean([rule.score(reply) for rule in RULES.values() if rule.score(before) == 1] or [0.5])

    def _known(self, at: float) -> set[str]:
        """The rules that the person complained of in conversations that began before ``at``."""
        for episode in self._pool.episodes(state="closed") if self._pool else ():
            if episode.id not in self._read:
                self._read.add(episode.id)
                for rule in _named(_said(m for turn in self._pool.turns(episode.id) for m in turn.messages or ())):
                    self._first[rule.name] = min(self._first.get(rule.name, episode.opened_at), episode.opened_at)
        return {name for name, first in self._first.items() if first < at}


def _said(messages: Iterable[Mapping[str, Any]]) -> list[str]:
    """What the user said."""
    return [str(message.get("content") or "") for message in messages if message.get("role") == "user"]


def _named(said: Iterable[str]) -> list[Rule]:
    """The rules that complaints in ``said`` name."""
    text = " ".join(said)
    return [rule for rule in RULES.values() if rule.complaint in text]
