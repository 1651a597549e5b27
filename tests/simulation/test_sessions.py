"""Conversations."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawgym.engines.protocol import Completion, Sampling
from clawgym.records import Turn
from clawgym.rewards.judge import JudgePool
from clawgym.simulation.judge import ComplaintJudge
from clawgym.simulation.rules import RULES
from clawgym.simulation.sessions import SimulatedSession, sessions_to_stable, talk
from clawgym.simulation.users import MISSING, THANKS, User, UserRequest

ASKED = UserRequest("The apple has 42 kg. What does it weigh?", (("apple", 42),), "kg")
USER = User("u", ("polite", "no-bold"))
RUDE_AND_BOLD, RUDE, RIGHT = "The apple: **42 kg**.", "The apple: 42 kg.", "Hello! The apple: 42 kg."


class Says:
    """An engine that gives its replies one after the other, and keeps what it was asked."""

    name = "says"

    def __init__(self, *replies: str) -> None:
        self._replies = list(replies)
        self.asked: list[list[Mapping[str, Any]]] = []
        self.seeds: list[int | None] = []

    async def complete(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Any] = (), sampling: Sampling
    ) -> Completion:
        self.asked.append(list(messages))
        self.seeds.append(sampling.seed)
        return Completion(self._replies.pop(0))

    def identity(self) -> dict[str, Any]:
        return {}

    async def aclose(self) -> None: ...


def play(*replies: str, turns: int = 3) -> tuple[SimulatedSession, Says]:
    engine = Says(*replies)
    return asyncio.run(talk(engine, USER, ASKED, turns=turns, sampling=Sampling(), seed=lambda n: 10 + n)), engine


def test_a_person_complains_until_content() -> None:
    session, engine = play(RUDE_AND_BOLD, RUDE, RIGHT, "never said", turns=5)
    both = f"{RULES['polite'].complaint} {RULES['no-bold'].complaint}"
    assert session.answers == (both, RULES["polite"].complaint, THANKS)
    assert session.content
    assert [score.total for score in session.scores] == [0, 0.5, 1]
    assert [message["content"] for message in engine.asked[-1]] == [
        *(ASKED.text, RUDE_AND_BOLD, both, RUDE, RULES["polite"].complaint)
    ]
    assert engine.seeds == [10, 11, 12]


def test_what_was_said_cannot_be_changed_later() -> None:
    session, _ = play(RUDE, RIGHT)
    with pytest.raises(FrozenInstanceError):
        session.answers = ()  # type: ignore[misc]
    assert session.content


def test_conversation_ends_after_the_last_turn() -> None:
    session, _ = play(RUDE, "No idea.", turns=2)
    assert session.answers == (RULES["polite"].complaint, MISSING)
    assert not session.content
    with pytest.raises(ValueError, match="give 1 or more"):
        play(turns=0)


def test_judge_sees_every_answer_including_the_last() -> None:
    session, engine = play(RUDE, RIGHT)
    turns, fresh = [], 0
    for number, (asked, reply) in enumerate(zip(engine.asked, session.replies, strict=True)):
        message = {"role": "assistant", "content": reply}
        turns.append(
            Turn(flaw="text-only", parent=number - 1 if number else None, messages=tuple(asked[fresh:]), reply=message)
        )
        fresh = len(asked) + 1
    episode = replace(session.episode(), turns=tuple(turns))

    async def judge() -> dict[int, tuple[Any, ...]]:
        async with JudgePool(ComplaintJudge()) as judges:
            found = await judges.judge_episode("", episode)
        return {turn: (judgement.votes, judgement.hints) for turn, judgement in found.items()}

    assert asyncio.run(judge()) == {0: ((-1,), (RULES["polite"].instruction,)), 1: ((1,), ())}


@given(st.lists(st.sampled_from([0.0, 0.5, 0.8, 1.0]), max_size=20), st.integers(1, 4))
def test_stable_is_the_first_session_from_which_the_mean_stays_high(scores: list[float], window: int) -> None:
    def high(end: int) -> bool:
        return sum(scores[end - window : end]) >= 0.8 * window - 1e-9

    ends = range(window, len(scores) + 1)
    expected = next((end for end in ends if all(high(later) for later in ends if later >= end)), None)
    assert sessions_to_stable(scores, threshold=0.8, window=window) == expected
