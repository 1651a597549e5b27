"""Which replies are imitated, and after which prompts."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawgym.online.corrections import accepted_replies
from clawgym.records import Turn, prompt_ids

FIRST = Turn(context_ids=(1, 2), sampled_ids=(3, 9), logprobs=(-0.1, -0.1))
SECOND = Turn(context_ids=(4,), sampled_ids=(5, 9), logprobs=(-0.1, -0.1), parent=0)
THIRD = Turn(context_ids=(6,), sampled_ids=(7, 8, 9), logprobs=(-0.1,) * 3, parent=1)


def imitated(turns: list[Turn], rewards: dict[int, float]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(prompt, reply) of each sequence."""
    found = []
    for row in accepted_replies(turns, rewards):
        start = row.mask.index(1)
        assert row.mask == (0,) * start + (1,) * (len(row.ids) - start)
        found.append((tuple(row.ids[:start]), tuple(row.ids[start:])))
    return found


def test_an_accepted_reply_answers_the_prompts_of_the_wrong_ones_before_it() -> None:
    turns = [FIRST, SECOND, THIRD]
    assert imitated(turns, {0: -1, 1: -1, 2: 1}) == [
        ((1, 2, 3, 9, 4, 5, 9, 6), (7, 8, 9)),
        ((1, 2, 3, 9, 4), (7, 8, 9)),
        ((1, 2), (7, 8, 9)),
    ]


def test_a_chain_ends_at_a_reply_that_was_not_wrong() -> None:
    turns = [FIRST, SECOND, THIRD]
    last = ((1, 2, 3, 9, 4, 5, 9, 6), (7, 8, 9))
    assert imitated(turns, {0: -1, 2: 1}) == [last], "nobody said that the second reply was wrong"
    assert imitated(turns, {0: -1, 1: 1, 2: 1}) == [((1, 2, 3, 9, 4), (5, 9)), ((1, 2), (5, 9)), last]
    assert imitated(turns, {0: -1, 1: -1}) == [], "nothing was accepted"


@pytest.mark.parametrize(
    "change", [{"flaw": "redacted"}, {"images": ("aa",)}, {"finish_reason": "length"}, {"finish_reason": "tool_calls"}]
)
def test_replies_that_are_not_exact_or_not_whole_are_left_out(change: dict[str, object]) -> None:
    changed = dataclasses.replace(SECOND, **change)
    assert imitated([FIRST, changed], {0: -1, 1: 1}) == []
    assert imitated([FIRST, SECOND], {0: -1, 1: 1}) != []


@given(st.lists(st.tuples(st.sampled_from((-1, 0, 1)), st.booleans()), max_size=8))
def test_what_is_imitated_was_accepted_and_follows_only_wrong_replies(said: list[tuple[int, bool]]) -> None:
    turns = [
        Turn((2 * n,), (2 * n + 1,), (-0.5,), parent=n - 1 if n and linked else None)
        for n, (_, linked) in enumerate(said)
    ]
    rewards = {n: float(score) for n, (score, _) in enumerate(said)}
    for prompt, (reply,) in imitated(turns, rewards):
        by = reply // 2
        assert rewards[by] > 0
        at = next(n for n in range(len(turns)) if prompt_ids(turns, n) == prompt)
        assert all(rewards[n] < 0 for n in range(at, by))
        assert by == at or prompt_ids(turns, by)[: len(prompt)] == prompt
