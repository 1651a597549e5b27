"""Simulated users: their requests, and their answers to a reply."""

from __future__ import annotations

import random
from dataclasses import FrozenInstanceError
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clawgym.simulation.corpus import conversations, write
from clawgym.simulation.rules import RULES
from clawgym.simulation.users import MISSING, MISSING_INSTRUCTION, THANKS, User, UserRequest, requests, user_of

ASKED = UserRequest("The apple has 42 kg, the pear has 7 kg. What do they weigh?", (("apple", 42), ("pear", 7)), "kg")
USER = User("u", ("polite", "short", "question"))


@settings(max_examples=20)
@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_heldout_requests_are_not_in_the_training_split(one: int, other: int) -> None:
    heldout = {r.text for r in islice(requests(one, heldout=True), 20)}
    assert len(heldout) == 20
    assert not heldout & {r.text for r in islice(requests(other), 60)}
    said = {message["content"] for talk in islice(conversations(other), 20) for message in talk}
    assert not any(text in words for text in heldout for words in said)


@given(st.integers(0, 10**6))
def test_seed_determines_user_and_requests(seed: int) -> None:
    assert user_of(seed) == user_of(seed)
    assert len(set(user_of(seed).rules)) in (2, 3)
    assert list(islice(requests(seed), 5)) == list(islice(requests(seed), 5))


def test_users_differ() -> None:
    assert len({user_of(seed).rules for seed in range(20)}) > 10


@given(st.sampled_from(["Hello! Anything else?", "Thanks. Is that so?", "", "Please?"]), st.sampled_from(range(20)))
def test_style_without_content_scores_0(reply: str, seed: int) -> None:
    assert user_of(seed).score(ASKED, reply).total == 0
    assert user_of(seed).answer(ASKED, reply) == MISSING


def test_content_is_each_thing_with_its_own_number() -> None:
    for reply, content in (
        ("The apple: 42 kg, the pear: 7 kg.", 1),
        ("- **pear**: 7 kg\n- **Apple**: 42 kilos", 1),
        ("The apple: 7 kg, the pear: 42 kg.", 0),
        ("The apple: 42 kg.", 0.5),
        ("The apple: 142 kg, the pear: 7.5 kg.", 0),
        ("The pineapple: 42 kg, the pears: 7 kg.", 0),
        ("apple pear 42 7", 0.5),
    ):
        assert ASKED.content(reply) == content, reply


@settings(deadline=None)
@given(st.sets(st.sampled_from(sorted(RULES))), st.integers(0, 1000), st.integers(0, 50))
def test_users_thank_for_kept_rules_and_name_the_first_broken_ones(kept: set[str], seed: int, person: int) -> None:
    user, reply = user_of(person), write(ASKED, kept, random.Random(seed))
    broken = [RULES[name].complaint for name in user.rules if name not in kept]
    assert user.answer(ASKED, reply) == (" ".join(broken[:2]) or THANKS)
    assert user.score(ASKED, reply).right == (not broken)


@given(st.text(max_size=60))
def test_a_score_is_never_above_the_content(reply: str) -> None:
    score = USER.score(ASKED, reply)
    assert 0 <= score.total <= score.content <= 1


@pytest.mark.parametrize("seed", range(5))
def test_share_of_conversations_without_style_instructions(seed: int) -> None:
    said = {rule.instruction for rule in RULES.values()} | {MISSING_INSTRUCTION}
    for number, talk in enumerate(islice(conversations(seed), 40)):
        assert talk[-1]["role"] == "assistant"
        before = " ".join(message["content"] for message in talk[:-1])
        assert any(words in before for words in said) == (number % 4 != 0)


def test_shared_constants_are_immutable() -> None:
    with pytest.raises(FrozenInstanceError):
        RULES["polite"].complaint = ""  # type: ignore[misc]
