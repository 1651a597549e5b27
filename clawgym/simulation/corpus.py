"""Generated conversations for supervised training: an assistant that follows instructions about style.

Invariant: a reply keeps the rules that it was told to keep, and always has the content.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator
from typing import Any

from clawgym.rewards.hints import with_hint
from clawgym.simulation.rules import RULES, UNITS
from clawgym.simulation.users import MISSING, MISSING_INSTRUCTION, UserRequest, requests

__all__ = ["HABIT", "conversations", "habits", "write"]

HABIT = 0.15
"""Probability that a reply keeps a rule without being told: low, so that users start with many complaints."""
_SPARE = 0.15
"""Probability of an instruction about the content only."""
_GREETINGS = ("Thanks for asking!", "Happy to help!", "Hello there!")
_QUESTIONS = ("Anything else?", "More figures?")
_FILLERS = (
    "These figures are the very ones that stand in what you wrote to me just now.",
    "As far as I can see, there is not much more to be said about all this.",
)


def write(request: UserRequest, kept: Collection[str], rng: random.Random) -> str:
    """A reply to ``request`` that keeps the rules ``kept`` (names) and breaks every other one."""
    unit = request.unit if "exact-units" in kept else UNITS[request.unit]
    bold = "" if "no-bold" in kept else "**"
    facts = [f" {thing}: {bold}{number} {unit}{bold}" for thing, number in request.facts]
    lines: list[str] = []
    if "polite" in kept:
        lines.append(rng.choice(_GREETINGS))
    if "no-bullets" in kept:
        lines.append("The" + ", the".join(facts) + ".")
    else:
        lines += [f"-{one}" for one in facts]
    if "short" not in kept:
        lines.append(rng.choice(_FILLERS))
    if "question" in kept:
        lines.append(rng.choice(_QUESTIONS))
    return "\n".join(lines)


def habits(rng: random.Random) -> frozenset[str]:
    """The rules that a reply keeps without an instruction."""
    return frozenset(name for name in RULES if rng.random() < HABIT)


def conversations(seed: int) -> Iterator[list[dict[str, Any]]]:
    """Yield endless conversations as chat messages, about requests of the training split.

    Of every four, one has no instructions about style, one has them in the system prompt, one in a hint; in one the
    user complains once or twice and the assistant corrects exactly that.
    """
    rng = random.Random(f"conversations {seed}")
    for number, request in enumerate(requests(seed)):
        named = rng.sample(sorted(RULES), rng.choice((1, 1, 2, 2, 3)))
        orders = " ".join(RULES[name].instruction for name in named)
        if rng.random() < _SPARE:
            orders = f"{MISSING_INSTRUCTION} {orders}" if rng.random() < 0.5 else MISSING_INSTRUCTION
        kept = habits(rng) | {name for name in named if RULES[name].instruction in orders}
        asked = {"role": "user", "content": request.text}
        match number % 4:
            case 0:
                yield [asked, _said(request, habits(rng), rng)]
            case 1:
                yield [{"role": "system", "content": orders}, asked, _said(request, kept, rng)]
            case 2:
                yield [with_hint(asked, orders), _said(request, kept, rng)]
            case _:
                yield _complained(request, rng)


def _complained(request: UserRequest, rng: random.Random) -> list[dict[str, Any]]:
    kept = habits(rng)
    talk = [{"role": "user", "content": request.text}, _said(request, kept, rng)]
    for _ in range(rng.choice((1, 2))):
        broken = sorted(set(RULES) - kept)
        named = rng.sample(broken, min(len(broken), rng.choice((1, 2))))
        if not named or rng.random() < _SPARE:
            named, complaint_text, orders = [], MISSING, MISSING_INSTRUCTION
        else:
            complaint_text, orders = (
                " ".join(getattr(RULES[n], part) for n in named) for part in ("complaint", "instruction")
            )
        complaint: dict[str, Any] = {"role": "user", "content": complaint_text}
        if rng.random() < 0.3:
            complaint = with_hint(complaint, orders)
        kept = kept | set(named)
        talk += [complaint, _said(request, kept, rng)]
    return talk


def _said(request: UserRequest, kept: Collection[str], rng: random.Random) -> dict[str, Any]:
    return {"role": "assistant", "content": write(request, kept, rng)}
