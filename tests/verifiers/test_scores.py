"""The numbers: the stock aggregation to the bit, and the arithmetic around it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawgym.verifiers.protocols.reward_sh import standard_reward_sh
from clawgym.verifiers.scores import (
    baseline_adjusted,
    checks_of,
    last_line_score,
    plain_mean,
    standard_score,
    without_composites,
)

# The one-liner that the stock script pipes the checker's output into.
AGGREGATE = standard_reward_sh().decode().partition("python3 -c '")[2].rpartition("'")[0]


def shipped(stdout: str) -> str | None:
    """What the shipped aggregation prints, None if it fails."""
    done = subprocess.run([sys.executable, "-c", AGGREGATE], input=stdout, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


@pytest.mark.parametrize(
    "stdout",
    [
        '{"a": 1, "b": 0}',
        '{"a": 0.1, "b": 0.2, "c": 0.7}',
        '{"reward": 0.5, "a": 1.0, "b": 0.0}',
        '{"a": true, "b": false}',
        '{"a": "0.25"}',
        '{"a": "x"}',
        '{"a": null}',
        '{"a": [1]}',
        "{}",
        "[]",
        "[0.5]",
        "0.75",
        "true",
        '"0.5"',
        "null",
        "",
        "not json",
        '  {"a": 1}\n\n',
        '{"a": 1} trailing',
        '{"a": 1, "a": 0}',
        '{"a": NaN, "b": 1}',
        '{"a": 1e400}',
        '{"a": -2, "b": 5}',
        '{"\\u00e9": 0.3333333333333333, "b": 0.1}',
    ],
)
def test_standard_score_matches_standard_script(stdout: str) -> None:
    expected = shipped(stdout)
    try:
        got: str | None = str(standard_score(stdout)[0])
    except (ValueError, TypeError):
        got = None
    assert got == expected


@given(st.dictionaries(st.text(max_size=8), st.floats(0, 1), min_size=1, max_size=20))
def test_standard_score_keeps_every_check(values: dict[str, float]) -> None:
    score, checks = standard_score(json.dumps(values))
    assert checks == values
    assert score == sum(values.values()) / len(values)


@pytest.mark.parametrize(
    ("stdout", "score"),
    [("0.5\n", 0.5), ("noise\n0.25\n\n", 0.25), ("0.5\nnoise", 0.0), ("", 0.0), ("1e-1", 0.1), ("\n \n", 0.0)],
)
def test_last_line(stdout: str, score: float) -> None:
    assert last_line_score(stdout) == score


@given(st.dictionaries(st.text(max_size=4), st.floats(allow_nan=True, allow_infinity=True), max_size=9))
def test_checks_are_clipped_to_unit_interval(values: dict[str, float]) -> None:
    assert all(0.0 <= v <= 1.0 for v in checks_of(values).values())


def test_composite_keys_are_excluded_unless_alone() -> None:
    assert without_composites({"reward": 0.5, "a": 1.0}) == {"a": 1.0}
    assert plain_mean({"reward": 0.0, "a": 1.0, "b": 0.5}) == 0.75
    assert plain_mean({"score": 0.5}) == 0.5
    assert plain_mean({}) == 0.0


@given(st.floats(0, 1), st.floats(0, 1))
def test_baseline_adjusted_is_zero_at_baseline_and_one_at_top(score: float, baseline: float) -> None:
    value = baseline_adjusted(score, baseline)
    assert 0.0 <= value <= 1.0
    if score <= baseline:
        assert value == 0.0
    if score == 1.0 and baseline < 1.0:
        assert value == 1.0
