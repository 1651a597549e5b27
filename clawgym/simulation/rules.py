"""Rules of style: what a person wants of every reply, how far a reply keeps to it, and what is said where it does not.

Invariant: a scorer is a pure function of the reply's text, in [0, 1], and never raises; 1 is a rule that is kept.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

__all__ = ["LONGEST", "RULES", "UNITS", "Rule", "words_in"]

LONGEST = 14
"""Words of a reply that is short."""
UNITS: Mapping[str, str] = {"kg": "kilos", "cm": "centimetres", "min": "minutes"}
"""Symbol of a unit -> the loose word for it."""

_BULLET = re.compile(r"^\s*(?:[-*+•‣◦–—]|\d{1,3}[.)])\s+\S", re.MULTILINE)
_BOLD = re.compile(r"\*\*(?=\S)[^*\n]*\S\*\*|\*\*\S\*\*|(?<!\w)__(?=\S)[^_\n]+__(?!\w)|<(?:b|strong)\b", re.IGNORECASE)
_POLITE = re.compile(
    r"\b(?:please|thanks?|thank you|welcome|glad(?:ly)?|happy|pleasure|hello|hi|dear|kindly|of course)\b", re.IGNORECASE
)
_NUMBER = re.compile(r"(?<![\w.])\d+(?:[.,]\d+)*\**\s*(?P<unit>[^\W\d_]*)")
_CLOSING = "*_~`\"'”’)] \t\r\n"


@dataclass(frozen=True)
class Rule:
    """One wish about style."""

    name: str
    instruction: str
    """What an assistant should do: a sentence for a prompt, or for a hint."""
    complaint: str
    """What the person says where a reply does not; ends with the instruction."""
    score: Callable[[str], float]
    """How far a reply keeps to it, in [0, 1]."""


def words_in(text: str) -> int:
    """How many words: what stands between blanks and has a letter or a digit in it."""
    return sum(any(c.isalnum() for c in word) for word in text.split())


def _short(text: str) -> float:
    """1 up to :data:`LONGEST` words, then the share that may stay."""
    return min(1.0, LONGEST / max(1, words_in(text)))


def _exact(text: str) -> float:
    """The share of numbers with the symbol of a unit behind them; 1 without numbers."""
    units = [found["unit"] for found in _NUMBER.finditer(text)]
    return sum(unit in UNITS for unit in units) / len(units) if units else 1.0


def _rule(name: str, reproach: str, instruction: str, score: Callable[[str], float]) -> Rule:
    return Rule(name, instruction, f"{reproach} {instruction}", score)


RULES: Mapping[str, Rule] = {
    rule.name: rule
    for rule in (
        _rule("short", "That is too long.", f"Use at most {LONGEST} words.", _short),
        _rule("no-bullets", "I do not like lists.", "Write no bullet points.", lambda t: float(not _BULLET.search(t))),
        _rule("no-bold", "Do not shout.", "Write nothing in bold.", lambda t: float(not _BOLD.search(t))),
        _rule("polite", "That is rude.", "Say something polite first.", lambda t: float(bool(_POLITE.search(t)))),
        _rule("exact-units", "That is sloppy.", "Write units as symbols.", _exact),
        _rule("question", "You just stop.", "End with a question.", lambda t: float(t.rstrip(_CLOSING).endswith("?"))),
    )
}
"""Every rule by its name."""
