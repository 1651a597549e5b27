"""Simulated users: their requests, how they score a reply, and what they answer.

Invariants: an answer depends on the request and the reply only. The same seed gives the same user and requests. No
request is both in the training split and in the held-out split. A reply without the content scores 0, whatever its
style.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean

from clawgym.simulation.rules import RULES, UNITS

__all__ = [
    "MISSING",
    "MISSING_INSTRUCTION",
    "NOUNS",
    "THANKS",
    "UserRequest",
    "ReplyScore",
    "User",
    "requests",
    "user_of",
]

THANKS = "Thanks, that is how I like it."
MISSING_INSTRUCTION = "Give every figure I ask for."
MISSING = f"That is not what I asked. {MISSING_INSTRUCTION}"
"""The answer to a reply without the content, whatever its style."""
_NAMED = 2
"""Most rules in one complaint."""

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
class UserRequest:
    """A question that contains its answer, so that only the style of replies is trained."""

    text: str
    facts: tuple[tuple[str, int], ...]
    """(thing, number) pairs that the reply must contain."""
    unit: str
    """The symbol of the unit."""

    def content(self, reply: str) -> float:
        """The share of facts in a reply: the thing is named, and the next number is its number."""
        found = 0
        for thing, number in self.facts:
            pattern = rf"\b{re.escape(thing)}\b\D*?(?<![\d.,]){number}(?![\d]|[.,]\d)"
            found += re.search(pattern, reply, re.IGNORECASE) is not None
        return found / len(self.facts)


@dataclass(frozen=True)
class ReplyScore:
    """A user's score of a reply."""

    content: float
    """In [0, 1]."""
    rules: Mapping[str, float]
    """ReplyScore of each of the user's rules, in [0, 1]."""

    @property
    def total(self) -> float:
        """The mean score of the rules, times the content."""
        return self.content * fmean(self.rules.values())

    @property
    def right(self) -> bool:
        """Whether content and all rules are perfect."""
        return self.content == 1 and all(value == 1 for value in self.rules.values())


@dataclass(frozen=True)
class User:
    """A user with two or three style rules, who mentions a rule only when it is broken."""

    name: str
    rules: tuple[str, ...]
    """Names of the rules, the most important first."""

    def score(self, request: UserRequest, reply: str) -> ReplyScore:
        """ReplyScore ``reply``."""
        return ReplyScore(request.content(reply), {name: RULES[name].score(reply) for name in self.rules})

    def answer(self, request: UserRequest, reply: str) -> str:
        """The answer to a reply: :data:`THANKS`, :data:`MISSING`, or complaints about the first broken rules."""
        score = self.score(request, reply)
        if score.right:
            return THANKS
        if score.content < 1:
            return MISSING
        broken = [RULES[name].complaint for name, value in score.rules.items() if value < 1]
        return " ".join(broken[:_NAMED])


def user_of(seed: int) -> User:
    """The user for a seed."""
    rng = random.Random(f"person {seed}")
    return User(f"person-{seed}", tuple(rng.sample(sorted(RULES), rng.choice((2, 3)))))


def requests(seed: int, *, heldout: bool = False) -> Iterator[UserRequest]:
    """Yield endless distinct requests, determined by ``seed``, of the training split or the held-out split.

    A hash of the text decides to which split a request belongs.
    """
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
        yield UserRequest(text, facts, unit)
