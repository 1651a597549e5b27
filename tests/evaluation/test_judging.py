"""Votes of models that judge: their agreement and cost, from stored rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clawgym.evaluation.judging import judging_of
from clawgym.evaluation.summary import summarize_rows
from clawgym.evaluation.terminal import _lines

from .test_summary import manifest, row

VOTES = {"asked": 3, "votes": {"clear": [1, 1, 0.5], "short": [0, 0, 0]}, "prompt_tokens": 30, "completion_tokens": 6}


def test_votes_are_summed_up_with_their_agreement_and_cost():
    found = judging_of([VOTES | {"cost_usd": 0.25}, {"asked": 3, "votes": {}, "prompt_tokens": 10, "cost_usd": 0.25}])
    assert found is not None
    assert (found.episodes, found.asked, found.read) == (2, 6, 3)
    assert (found.prompt_tokens, found.completion_tokens, found.cost_usd) == (40, 6, 0.5)
    # By hand: 5 votes of clear and short, D_o = (2 / 12) / 6, D_e = 2 * (2 * 1 + 2.25 - 2.5 ** 2 / 6) / 30
    assert found.alpha == pytest.approx(1 - (1 / 2 / 6) / (2 * (6 * 2.25 - 6.25) / 30))
    assert found.same_verdict == pytest.approx(4 / 6)
    assert "3 of 6 votes read" in str(found)
    assert "66.7% of pairs" in str(found)
    assert "$0.5000" in str(found)


@pytest.mark.parametrize(
    "odd",
    [7, [], {"votes": 3}, {"votes": {"a": "x", "b": [True, None, "1", 10**400]}}, {"asked": "x", "cost_usd": "y"}],
)
def test_rows_of_another_form_do_no_harm(odd: Any):
    found = judging_of([odd, VOTES])
    assert found is not None
    assert (found.read, found.cost_usd) == (3, None)


def test_many_votes_take_no_time():
    found = judging_of([{"votes": {"a": [0, 1] * 100_000}}])
    assert found is not None
    assert found.same_verdict == pytest.approx(0.5, abs=1e-3)


def test_summary_reports_the_votes_of_each_judge(tmp_path: Path):
    by = {"result": {"strict": 1.0, "official": 1.0, "judged_by": "rubric (judge-1)", "judgement": VOTES}}
    summary = summarize_rows(manifest(3), [row("t0") | by, row("t1") | by, row("t2")])
    assert list(summary.judging) == ["rubric (judge-1)"]
    lines = _lines(summary)
    place = next(n for n, line in enumerate(lines) if line.startswith("judged by a model"))
    assert "6 of 6 votes read" in lines[place + 1]
    assert summary.to_dict()["judging"]["rubric (judge-1)"]["asked"] == 6
    assert judging_of([]) is None
