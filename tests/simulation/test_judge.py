"""The judge of users' answers."""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from clawgym.records.judge import Judge, Judgement, NextState
from clawgym.simulation.judge import ComplaintJudge
from clawgym.simulation.rules import RULES
from clawgym.simulation.users import MISSING, MISSING_INSTRUCTION, THANKS


class OnlyAfter:
    """A turn of which nothing but the next state may be read."""

    def __init__(self, *said: dict[str, Any]) -> None:
        self.after = NextState(0, said)

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"the judge reads {name}")


def judged(*said: str, role: str = "user") -> Judgement:
    asked: Any = OnlyAfter(*({"role": role, "content": text} for text in said))
    return asyncio.run(ComplaintJudge().judge(asked))


def test_complaint_judge_reads_only_the_next_state() -> None:
    assert judged(THANKS).votes == (1,)
    assert judged(MISSING).votes == (-1,)
    assert judged(MISSING).hints == (MISSING_INSTRUCTION,)
    assert judged("And what about the plum?").votes == (0,)
    assert judged(THANKS, role="tool").votes == (0,)
    assert isinstance(ComplaintJudge(), Judge)
    assert len(ComplaintJudge().version) == 64


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from(sorted(RULES)), min_size=1, max_size=3, unique=True), st.text(max_size=20))
def test_a_complaint_is_a_hint_in_the_order_in_which_it_was_said(names: list[str], more: str) -> None:
    found = judged(" ".join(RULES[name].complaint for name in names) + more)
    assert found.votes == (-1,)
    assert found.hints == (" ".join(RULES[name].instruction for name in names),)
