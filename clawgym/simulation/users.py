"""Simulated people: what they ask, how good a reply is for them, and what they say to it.

Invariants: what a person says depends on the request and the reply alone; the same seed is the same person with the
same requests; no held-out request has the text of one that is talked about; a reply without the content is worth
nothing, whatever its style.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean

from clawgym.simulation.rules import RULES, UNITS

__all__ = ["MISSING", "MISSING_INSTRUCTION", "NOUNS", "THANKS", "Request", "Score", "User", "requests", "user_of"]

THANKS = "Thanks, that is how I like it."
MISSING_INSTRUCTION = "Give every figure I ask for."
MISSING = f"That is not what I asked. {MISSING_INSTRUCTION}"
"""Said of a reply without the content, whatever its style."""
_NAMED = 2
"""Most rules that one complaint names."""

NOUNS: tuple[str, ...] = (
    "apple", "basket", "bench", "boat", "book", "bottle", "box", "brick", "bucket", "candle", "carpet", "chair",
    "clock", "coat", "desk", "door", "drum", "engine", "fence", "flag", "garden", "guitar", "hammer", "jacket",
    "kettle", "ladder", "lamp", "lemon", "melon", "mirror", "needle", "onion", "paddle", "pear", "piano",
    "pillow", "plate", "pump", "ribbon", "rope", "saddle", "shelf", "shovel", "spoon", "stone", "table", "tent",
    "tower", "trunk", "wagon", "wheel", "window",
)  # fmt: skip
_ASKED: Mapping[str, tuple[str, ...]] = {
    "kg": ("How heavy are they?", "What do they weigh?"),
    "cm": ("How long are they?", "What do they measure?"),
    "min": ("How long do they take?", "What time do they need?"),
}


@dataclass(frozen=True)
class Request:
    """A question whose answer it brings along: what is learnt is how to answer, not what."""

    text: str
    facts: tuple[tuple[str, int], ...]
    """(thing, number): what the answer has to say."""
    unit: str
    """The symbol of it."""

    def content(self, reply: str) -> float:
        """The share of the facts in a reply: the thing is named, and the next number after it is its number."""
        found = 0
        for thing, number in self.facts:
            pattern = rf"\b{re.escape(thing)}\b\D*?(?<![\d.,]){number}(?![\d]|[.,]\d)"
            found += re.search(pattern, reply, re.IGNORECASE) is not None
        return found / len(self.facts)


@dataclass(frozen=True)
class Score:
    """What a reply is worth to a person."""

    content: float
    """In [0, 1]"""
    rules: Mapping[str, float]
    """By rule, in [0, 1]."""

    @property
    def total(self) -> float:
        """The mean of the rules, times the content."""
        return self.content * fmean(self.rules.values())

    @property
    def right(self) -> bool:
        """Whether nothing is left to wish for."""
        return self.content == 1 and all(value == 1 for value in self.rules.values())


@dataclass(frozen=True)
class User:
    """Somebody with two or three rules, which they say only when one is broken."""

    name: str
    rules: tuple[str, ...]
    """Names, the most important first."""

    def score(self, request: Request, reply: str) -> Score:
        """How good ``reply`` is."""
        return Score(request.content(reply), {name: RULES[name].score(reply) for name in self.rules})

    def answer(self, request: Request, reply: str) -> str:
        """What the person says to a reply: :data:`THANKS`, that something is missing, or the first rules it breaks."""
        score = self.score(request, reply)
        if score.right:
            return THANKS
        if score.content < 1:
            return MISSING
        broken = [RULES[name].complaint for name, value in score.rules.items() if value < 1]
        return " ".join(broken[:_NAMED])


def user_of(seed: int) -> User:
    """The person of a seed."""
    rng = random.Random(f"person {seed}")
    return User(f"person-{seed}", tuple(rng.sample(sorted(RULES), rng.choice((2, 3)))))


def requests(seed: int, *, heldout: bool = False) -> Iterator[Request]:
    """Different requests without end, the same for the same seed. A hash of a text says whether it is held out."""
    rng = random.Random(f"requests {seed} {heldout}")
    seen: set[str] = set()
    while True:
        unit = rng.choice(sorted(UNITS))
        facts = tuple((thing, rng.randint(2, 99)) for thing in rng.sample(NOUNS, 2))
        (a, m), (b, n) = facts
        text = f"The {a} has {m} {unit}, the {b} has {n} {unit}. {rng.choice(_ASKED[unit])}"
        if text in seen or (hashlib.sha256(text.encode()).digest()[0] % 4 == 0) != heldout:
            continue
        seen.add(text)
        yield Request(text, facts, unit)
