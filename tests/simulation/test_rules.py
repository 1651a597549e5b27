"""Rules of style."""

from __future__ import annotations

import random
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clawgym.simulation.corpus import write
from clawgym.simulation.rules import LONGEST, RULES, words_in
from clawgym.simulation.users import requests

SOME = list(islice(requests(0), 30))
TEXTS = st.text(max_size=80) | st.lists(
    st.sampled_from(["-", "*", "**", "1.", "42", "kg", "kilos", "Hello", "?", "\n", " ", "_", "3,5"]), max_size=20
).map("".join)


@given(TEXTS)
def test_every_scorer_takes_every_text(text: str) -> None:
    for rule in RULES.values():
        assert 0 <= rule.score(text) <= 1
        assert rule.score(text) == rule.score(text)


@settings(deadline=None)
@given(st.sampled_from(SOME), st.sets(st.sampled_from(sorted(RULES))), st.integers(0, 10**6))
def test_generated_replies_score_as_generated(request_: object, kept: set[str], seed: int) -> None:
    reply = write(request_, kept, random.Random(seed))  # type: ignore[arg-type]
    assert request_.content(reply) == 1  # type: ignore[attr-defined]
    assert {name for name, rule in RULES.items() if rule.score(reply) == 1} == kept


@given(st.integers(1, 200))
def test_short_score_falls_with_length(count: int) -> None:
    score = RULES["short"].score("word " * count)
    assert score == min(1, LONGEST / count)
    assert words_in("word " * count) == count


@pytest.mark.parametrize(
    ("name", "kept", "broken"),
    [
        ("no-bullets", ["a - b", "3.5 kg", "-5 degrees", "*so* it is"], ["- a", "x\n* a", "  1. a", "• a", "2) b"]),
        ("no-bold", ["2 ** 3 ** 4", "a * b", "snake__case__name"], ["**a**", "so **it is**.", "__it__", "<b>x</b>"]),
        ("polite", ["Thanks!", "You are welcome.", "HELLO there", "thank you"], ["Pleased", "this is history", ""]),
        ("exact-units", ["42 kg", "**42 kg**", "**7** cm", "no number", "3,5 min."], ["42 kilos", "42", "5 minutes"]),
        ("question", ["More?", "More?**", 'He said "why?"', "More? \n"], ["More? Yes.", "More", "?!."]),
    ],
)
def test_kept_and_broken(name: str, kept: list[str], broken: list[str]) -> None:
    assert [RULES[name].score(text) for text in kept] == [1] * len(kept)
    assert all(RULES[name].score(text) < 1 for text in broken)


def test_a_complaint_says_what_to_do_and_is_no_other_complaint() -> None:
    said = [rule.complaint for rule in RULES.values()]
    assert all(rule.complaint.endswith(rule.instruction) for rule in RULES.values())
    assert not any(a != b and a in b for a in said for b in said)
