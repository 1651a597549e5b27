"""Style rules: what a user wants of every reply, a score for it, and the complaint if it is broken.

Invariant: a scorer is a pure function of the reply's text, returns a value in [0, 1] (1: the rule is kept), and never
raises.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

__all__ = ["LONGEST", "RULES", "UNITS", "Rule", "words_in"]

LONGEST = 14
"""Most words of a short reply."""
UNITS: Mapping[str, str] = {"kg": "kilos", "cm": "centimetres", "min": "minutes"}
"""Symbol of a unit -> the word for it."""

_BULLET = re.compile(r"^\s*(?:[-*+•‣◦–—]|\d{1,3}[.)])\s+\S", re.MULTILINE)
_BOLD = re.compile(r"\*\*(?=\S)[^*\n]*\S\*\*|\*\*\S\*\*|(?<!\w)__(?=\S)[^_\n]+__(?!\w)|<(?:b|strong)\b", re.IGNORECASE)
_POLITE = re.compile(
    r"\b(?:please|thanks?|thank you|welcome|glad(?:ly)?|happy|pleasure|hello|hi|dear|kindly|of course)\b", re.IGNORECASE
)
_NUMBER = re.compile(r"(?<![\w.])\d+(?:[.,]\d+)*\**\s*(?P<unit>[^\W\d_]*)")
_CLOSING = "*_~`\"'”’)] \t\r\n"


@dataclass(frozen=True)
class Rule:
    """One style rule."""

    name: str
    instruction: str
    """The instruction for the assistant: a sentence for a prompt or a hint."""
    complaint: str
    """What the user says when a reply breaks the rule; ends with the instruction."""
    score: Callable[[str], float]
    """Scores a reply in [0, 1]."""


def words_in(text: str) -> int:
    """The number of words: parts between blanks that contain a letter or digit."""
    return sum(any(c.isalnum() for c in word) for word in text.split())


def _short(text: str) -> float:
    """1 up to :data:`LONGEST` words, then :data:`LONGEST` divided by the number of words."""
    return min(1.0, LONGEST / max(1, words_in(text)))


def _exact(text: str) -> float:
    """The share of numbers that are followed by the symbol of a unit; 1 without numbers."""
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
"""All rules, by name."""
