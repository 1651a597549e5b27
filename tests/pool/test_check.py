"""The exactness check: ClawGym's own turns are exact, and manipulations are detected."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import ClassVar

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from clawgym.pool.check import RUN, TraceTurn, check, trace_of
from clawgym.records import Turn

from .histories import chain, histories


def undeclared(turns: list[TraceTurn]) -> list[TraceTurn]:
    """As somebody writes who records calls only, not which continues which."""
    return [replace(turn, declared=False, parent=None) for turn in turns]


def linear(draw_seed: int, length: int) -> list[TraceTurn]:
    return trace_of(chain(draw_seed, length))


@settings(deadline=None, max_examples=500)
@given(turns=histories(flaws=False))
def test_recorded_histories_are_exact(turns: list[Turn]) -> None:
    verdict = check("e", trace_of(turns))
    assert verdict.status == ("exact" if turns else "empty"), verdict.findings
    assert verdict.sampled == sum(len(turn.sampled_ids) for turn in turns)


def test_an_episode_without_turns_is_empty() -> None:
    verdict = check("e", [])
    assert (verdict.status, [finding.text for finding in verdict.findings]) == ("empty", ["no turn was recorded"])


@settings(deadline=None, max_examples=200)
@given(turns=histories())
def test_episode_is_exact_exactly_without_flaws(turns: list[Turn]) -> None:
    verdict = check("e", trace_of(turns))
    assert (verdict.status in ("exact", "empty")) == all(turn.flaw is None for turn in turns)
    assert verdict.status != "broken"


@settings(deadline=None, max_examples=200)
@given(seed=st.integers(0, 2**32), length=st.integers(1, 6))
def test_linear_foreign_trace_is_exact(seed: int, length: int) -> None:
    verdict = check("e", undeclared(linear(seed, length)))
    assert verdict.status == "exact", verdict.findings
    assert verdict.branches == 1


seeds = st.integers(0, 2**32)


@st.composite
def victims(draw: st.DrawFn) -> tuple[random.Random, list[TraceTurn], int]:
    """A trace, and the turn that something is done to: not the last, and long enough."""
    seed = draw(seeds)
    turns = linear(seed, draw(st.integers(2, 6)))
    index = draw(st.integers(0, len(turns) - 2))
    assume(len(turns[index].response or ()) > 3)
    assume(len(turns[index].prompt or ()) > RUN)
    return random.Random(seed), turns, index


MUTATIONS = {}


def mutation(function):  # type: ignore[no-untyped-def]
    MUTATIONS[function.__name__] = function
    return function


@mutation
def an_id_is_dropped(dice: random.Random, turn: TraceTurn) -> TraceTurn:
    ids = list(turn.response or ())
    del ids[dice.randrange(len(ids))]
    return replace(turn, response=ids)


@mutation
def a_logprob_is_dropped(dice: random.Random, turn: TraceTurn) -> TraceTurn:
    return replace(turn, logprobs=list(turn.logprobs or ())[:-1])


@mutation
def logprobs_are_cut_and_padded_with_zeros(dice: random.Random, turn: TraceTurn) -> TraceTurn:
    kept = list(turn.logprobs or ())
    cut = dice.randrange(2, len(kept))
    return replace(turn, logprobs=kept[:-cut] + [0.0] * cut)


@mutation
def logprobs_are_one_value(dice: random.Random, turn: TraceTurn) -> TraceTurn:
    return replace(turn, logprobs=[dice.choice([0.0, -1.0])] * len(turn.response or ()))


@mutation
def a_logprob_is_positive_or_no_number(dice: random.Random, turn: TraceTurn) -> TraceTurn:
    logprobs = list(turn.logprobs or ())
    logprobs[dice.randrange(len(logprobs))] = dice.choice([0.25, float("nan"), float("-inf"), "x", None])
    return replace(turn, logprobs=logprobs)


@mutation
def a_sampled_id_becomes_two(dice: random.Random, turn: TraceTurn) -> TraceTurn:
    """What re-encoding does most: other ids, another length."""
    ids = list(turn.response or ())
    place = dice.randrange(len(ids))
    return replace(turn, response=[*ids[:place], 50_001, 50_002, *ids[place + 1 :]])


@mutation
def a_sampled_id_becomes_another(dice: random.Random, turn: TraceTurn) -> TraceTurn:
    ids = list(turn.response or ())
    ids[dice.randrange(len(ids))] = 50_003
    return replace(turn, response=ids)


@mutation
def the_sample_is_shifted(dice: random.Random, turn: TraceTurn) -> TraceTurn:
    return replace(turn, response=[50_004, *list(turn.response or ())[:-1]])


@mutation
def an_id_is_no_id(dice: random.Random, turn: TraceTurn) -> TraceTurn:
    wrong = dice.choice([-1, 2**31, 1.5, "x", None, True])
    return replace(turn, response=[wrong, *list(turn.response or ())[1:]])


@mutation
def the_prompt_is_padded(dice: random.Random, turn: TraceTurn) -> TraceTurn:
    return replace(turn, prompt=[7] * RUN + list(turn.prompt or ()))


@mutation
def a_mask_covers_something_else(dice: random.Random, turn: TraceTurn) -> TraceTurn:
    wrong = dice.choice([[1] * (len(turn.response or ()) - 1), [2] * len(turn.response or ())])
    return replace(turn, mask=wrong)


@mutation
def two_versions_sampled_it(dice: random.Random, turn: TraceTurn) -> TraceTurn:
    return replace(turn, versions=[1] + [2] * (len(turn.response or ()) - 1))


@mutation
def its_role_is_not_known(dice: random.Random, turn: TraceTurn) -> TraceTurn:
    return replace(turn, role="judge")


@mutation
def its_ids_are_missing(dice: random.Random, turn: TraceTurn) -> TraceTurn:
    return replace(turn, **{dice.choice(["prompt", "response", "logprobs"]): None})


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize("name", MUTATIONS)
@settings(deadline=None, max_examples=30)
@given(victim=victims())
def test_manipulated_traces_are_detected(name: str, declared: bool, victim) -> None:  # type: ignore[no-untyped-def]
    dice, turns, index = victim
    turns = list(turns) if declared else undeclared(turns)
    if name in ("logprobs_are_cut_and_padded_with_zeros", "logprobs_are_one_value"):
        assume(sum(len(turn.logprobs or ()) for turn in turns) - len(turns[index].logprobs or ()) >= 2 * RUN)
    turns[index] = MUTATIONS[name](dice, turns[index])
    assert check("e", turns).status != "exact"


def test_reencoded_ids_in_a_history_are_counted() -> None:
    first, second = linear(1, 2)
    sample = list(first.response or ())
    rewritten = [*(first.prompt or ()), *sample[:2], 50_001, 50_002, *(second.prompt or ())[len(first.prompt or ()) :]]
    again = replace(second, prompt=rewritten, parent=None)
    declared = check("e", [first, again])
    assert (declared.status, declared.branches, declared.reencoded) == ("exact", 2, len(sample) - 2)
    assert [f.code for f in declared.findings] == ["re-encoded"]
    assert check("e", undeclared([first, again])).status == "unproved"


def test_a_fresh_prompt_is_a_branch_and_no_more() -> None:
    verdict = check("e", undeclared([*linear(1, 2), *linear(99, 1)]))
    assert (verdict.status, verdict.branches, verdict.reencoded) == ("exact", 2, 0)


def test_a_greedy_sample_may_be_certain() -> None:
    turn = replace(linear(1, 1)[0], response=list(range(20)), logprobs=[0.0] * 20)
    assert check("e", [turn]).status == "unproved"
    assert check("e", [replace(turn, greedy=True)]).status == "exact"


def test_log_probs_of_0_in_the_middle_are_not_padding() -> None:
    turn = replace(linear(1, 1)[0], response=list(range(30)), logprobs=[-0.5, *[0.0] * 4, -0.7] * 5)
    assert check("e", [turn]).status == "exact"


@pytest.mark.parametrize(("count", "status"), [(1, "exact"), (2, "exact"), (3, "unproved"), (4, "unproved")])
def test_only_log_probs_of_0_are_padding(count: int, status: str) -> None:
    turn = replace(linear(1, 1)[0], response=list(range(count)), logprobs=[0.0] * count)
    assert check("e", [turn]).status == status


def test_unsampled_positions_are_detected_by_their_zeros() -> None:
    inside = [-0.5] * 2 + [-0.4] + [0.0] * 12 + [-0.3, -0.2] + [0.0] * 9 + [-0.1]
    row = TraceTurn(prompt=list(range(20)), response=list(range(len(inside))), logprobs=inside, versions=(1,))
    assert check("e", [row]).status == "unproved"
    told = replace(row, mask=[int(p < 0) for p in inside])
    assert check("e", [told]).status == "exact"


def test_a_row_of_several_turns_has_logprobs_for_its_mask() -> None:
    row = TraceTurn(prompt=[1, 2], response=[3, 4, 5, 6], mask=[1, 0, 0, 1], logprobs=[-0.1, -0.2], versions=(1, 2))
    assert check("e", [row]).status == "exact"
    assert check("e", [replace(row, logprobs=[-0.1, 0.0, 0.0, -0.2])]).status == "exact"
    assert check("e", [replace(row, logprobs=[-0.1, -0.2, -0.3])]).status == "broken"
    assert check("e", [replace(row, mask=[1, 0, 0])]).status == "broken"
    assert check("e", [replace(row, mask=[1, 0, 0, 2])]).status == "broken"
    assert check("e", [replace(row, versions=[1, 2, 2, 2])]).status == "exact"
    assert check("e", [replace(row, mask=None, logprobs=[-0.1] * 2 + [-0.2] * 2)]).status == "broken"


class Letters:
    """A tokenizer of one letter an id, that would rather write ``ab`` as one."""

    size = 128
    special: ClassVar = {ord("<"): "<", ord(">"): ">"}

    def decode(self, ids) -> str:  # type: ignore[no-untyped-def]
        return "".join("ab" if i == 1 else chr(i) for i in ids)

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text.replace("ab", "\1")]


def test_with_a_tokenizer_texts_and_ids_must_agree() -> None:
    turn = TraceTurn([ord("q")], [ord("a"), ord("b"), ord("c")], None, [-0.1, -0.2, -0.3], versions=(1,), text=["abc"])
    assert check("e", [turn], Letters()).status == "exact"
    assert check("e", [replace(turn, text=["abd"])], Letters()).status == "broken"
    assert check("e", [replace(turn, response=[ord("a"), 200, 99])], Letters()).status == "broken"


def test_text_may_leave_out_sampled_special_tokens() -> None:
    ids = [ord(letter) for letter in "a<c>"]
    turn = TraceTurn([ord("q")], ids, None, [-0.1, -0.2, -0.3, -0.4], versions=(1,))
    for text, status in (("ac", "exact"), ("a<c>", "exact"), ("a<c", "exact"), ("abc", "broken")):
        assert check("e", [replace(turn, text=[text])], Letters()).status == status


def test_canonical_encodings_get_a_note() -> None:
    dice = random.Random(1)
    long = [dice.choice([1, ord("c"), ord("d")]) for _ in range(1200)]
    turn = TraceTurn([ord("q")], long, None, [-dice.random() for _ in long], versions=(1,))
    verdict = check("e", [turn], Letters())
    assert verdict.status == "exact"
    assert "canonical" in {finding.code for finding in verdict.findings}
    other = replace(turn, response=[ord("a"), ord("b"), *long[2:]])
    assert "canonical" not in {finding.code for finding in check("e", [other], Letters()).findings}
