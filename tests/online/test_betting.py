"""Bounds that hold at any time, and levels that sum to alpha."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawgym.online.betting import FRACTIONS, SPREAD, log_evidence, lower_bound, spend, upper_bound, within_reach

differences = st.lists(st.floats(-1, 1), min_size=1, max_size=60)
alphas = st.floats(1e-6, 0.5)


@given(differences, alphas)
def test_bounds_contain_the_mean(values, alpha):
    mean = sum(values) / len(values)
    assert -1 <= lower_bound(values, alpha) <= mean + 1e-12
    assert mean - 1e-12 <= upper_bound(values, alpha) <= 1


@given(differences, alphas, st.data())
def test_bounds_rise_with_every_value(values, alpha, data):
    index = data.draw(st.integers(0, len(values) - 1))
    raised = list(values)
    raised[index] = data.draw(st.floats(values[index], 1))
    assert lower_bound(raised, alpha) >= lower_bound(values, alpha) - 1e-12
    assert upper_bound(raised, alpha) >= upper_bound(values, alpha) - 1e-12


@given(differences, alphas, alphas)
def test_smaller_alpha_gives_wider_bounds(values, one, other):
    small, large = sorted((one, other))
    assert lower_bound(values, small) <= lower_bound(values, large) + 1e-12
    assert upper_bound(values, small) >= upper_bound(values, large) - 1e-12


@given(differences, alphas, st.randoms(use_true_random=False))
def test_bounds_do_not_depend_on_the_order(values, alpha, random):
    shuffled = list(values)
    random.shuffle(shuffled)
    assert lower_bound(shuffled, alpha) == pytest.approx(lower_bound(values, alpha), abs=1e-9)


@given(differences, alphas)
def test_upper_bound_mirrors_lower_bound(values, alpha):
    assert upper_bound(values, alpha) == pytest.approx(-lower_bound([-v for v in values], alpha), abs=1e-12)


@given(differences, st.integers(1, 20), st.floats(-0.9, 0.9), alphas)
def test_what_would_pass_with_more_of_the_same_is_within_reach(values, times, mean, alpha):
    if lower_bound(values * times, alpha) > mean:
        assert within_reach(values, mean, alpha, len(values) * times)


def test_a_loss_beyond_the_margin_is_out_of_reach():
    assert not within_reach([-0.2, -0.1] * 20, -0.1, 0.05, 100_000)
    assert within_reach([-0.2, 0.1] * 20, -0.1, 0.05, 400)
    assert not within_reach([-0.2, 0.1] * 20, -0.1, 0.05, 40), "forty values are too few"
    assert within_reach([-1.0], -0.1, 0.05, 40), "one value says nothing"
    with pytest.raises(ValueError, match="shape"):
        within_reach([[0.1], [0.2]], 0.0, 0.05, 40)


@given(differences, st.floats(-0.9, 1))
def test_evidence_and_bound_agree(values, mean):
    """The bound is above a mean exactly if there is evidence of 1 / alpha against it."""
    found = log_evidence(values, mean)
    assert isinstance(found, float)
    bound = lower_bound(values, 0.05)
    if abs(found + math.log(0.05)) > 1e-6:
        assert (bound > mean) == (found > -math.log(0.05))


def test_evidence_by_hand():
    wealth = [(1 + 0.5 * f) * (1 - 0.25 * f) for f in FRACTIONS]
    assert log_evidence([0.5, -0.25]) == pytest.approx(math.log(sum(wealth) / len(wealth)))
    about_a_loss = [1 + f * (1 / 0.9 - 1) for f in FRACTIONS]  # a value of 0, against a mean of -0.1
    assert log_evidence([0.0], -0.1) == pytest.approx(math.log(sum(about_a_loss) / len(about_a_loss)))
    assert log_evidence([]) == 0
    assert np.allclose(log_evidence([[0.5, -0.25], [0, 0]]), [log_evidence([0.5, -0.25]), 0])


def test_no_values_bound_nothing():
    assert (lower_bound([], 0.05), upper_bound([], 0.05)) == (-1, 1)


def test_bounds_of_extreme_values_are_finite():
    assert lower_bound([-1.0] * 50, 0.05) == -1
    assert 0.7 < lower_bound([1.0] * 50, 0.05) < 1
    assert lower_bound([1.0] * 100_000, 0.05) <= 1


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.01, 1.01])
def test_wrong_values_are_refused(value: float):
    for refuse in (
        lambda: log_evidence([0.0, value]),
        lambda: lower_bound([value], 0.05),
        lambda: upper_bound([value], 0.05),
    ):
        with pytest.raises(ValueError, match=r"not a number in \[-1, 1\]"):
            refuse()


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="give a list"):
        lower_bound([[0.1]], 0.05)
    with pytest.raises(ValueError, match="between 0 and 1"):
        lower_bound([0.1], 1.0)
    with pytest.raises(ValueError, match="above -1"):
        log_evidence([0.1], -1)
    for number, alpha in ((0, 0.05), (1, 0.0), (1, 1.0)):
        with pytest.raises(ValueError, match="number from 1 on"):
            spend(number, alpha)


@given(st.integers(1, 2000), st.floats(0.001, 0.5))
def test_levels_sum_to_less_than_alpha(count, alpha):
    total = math.fsum(spend(number, alpha) for number in range(1, count + 1))
    assert total == pytest.approx(alpha * count / (count + SPREAD))
    assert total < alpha


@given(st.integers(1, 10**9))
def test_levels_fall_and_stay_positive(number):
    assert spend(number, 0.05) > spend(number + 1, 0.05) > 0


@pytest.mark.parametrize("kind", ["skewed", "votes"])
def test_bound_is_rarely_ever_above_the_mean(kind: str):
    """2,000 sequences of 300 values with mean 0, looked at after each value: at most 10 % ever have evidence of 10."""
    generator = np.random.default_rng(7)
    u = generator.random((2000, 300))
    values = np.where(u < 0.1, -0.9, 0.1) if kind == "skewed" else np.where(u < 0.3, 1.0, np.where(u < 0.6, -1.0, 0.0))
    wealth = np.mean([np.cumprod(1 + f * values, axis=1) for f in FRACTIONS], axis=0)
    assert np.allclose(np.log(wealth[:5, -1]), log_evidence(values[:5]))
    ever = (wealth >= 10).any(axis=1).mean()
    assert 0.02 < ever <= 0.1 + 3 * math.sqrt(0.1 * 0.9 / 2000)


def test_bound_is_above_zero_soon_with_a_gain():
    generator = np.random.default_rng(3)
    values = np.clip(generator.normal(0.1, 0.3, (200, 250)), -1, 1)
    assert np.mean([lower_bound(row, 0.05) > 0 for row in values]) > 0.85
