"""Small versions of the simulations of ``benchmarks/promotion.py``."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from clawgym.online.betting import log_evidence, lower_bound, spend
from clawgym.online.watch import watch

from ..conftest import benchmark

simulation = benchmark("promotion")


def test_wealth_is_the_evidence_of_the_library():
    values = np.random.default_rng(0).uniform(-1, 1, (5, 30))
    wealth = simulation.Wealth((5,))
    for n in range(30):
        found = wealth.add(values[:, n].astype(np.float32))
    assert np.log(found) == pytest.approx(log_evidence(values), abs=1e-3)
    assert np.log(simulation._paths(values)[:, -1]) == pytest.approx(log_evidence(values))


def test_levels_and_crossings_are_those_of_the_gate():
    assert simulation.levels()[9] == pytest.approx(1 / spend(10, 0.05))
    values = np.full((4, 200), 0.2)
    found = simulation.first_crossing(simulation._paths(values), 1 / spend(1, 0.05))
    assert lower_bound(values[0, :found], spend(1, 0.05)) > 0
    assert lower_bound(values[0, : found - 1], spend(1, 0.05)) <= 0
    assert simulation.first_crossing(simulation._paths(-values), 20) is None


@pytest.mark.parametrize("kind", ["graded", "votes", "skewed"])
def test_few_lifetimes_have_a_false_promotion(kind: str):
    gate, alone = simulation.false_promotions(kind, lifetimes=200)
    assert gate <= 0.05
    assert alone > 0.1  # without spending, the same simulation finds too many


@pytest.mark.parametrize("kind", ["graded", "votes", "skewed"])
def test_versions_of_the_null_are_equally_good(kind: str):
    drawn = simulation.NULLS[kind](np.random.default_rng(1), 2000, 100)
    assert abs(drawn.mean()) < 0.01
    assert np.abs(drawn).max() <= 1


def test_z_test_with_many_looks_fails():
    assert simulation.fixed_test("skewed", lifetimes=20, turns=60) > 0.5


def test_one_value_for_a_session_is_needed():
    by_turn, by_session = simulation.correlated(lifetimes=60)
    assert by_session <= 0.05 < by_turn


def test_training_must_not_see_scores():
    seeing, blind = simulation.hill_climb(lifetimes=40, turns=200)
    assert blind <= 0.05 < 0.3 < seeing


def test_better_candidates_are_promoted():
    wrong, good, promotions = simulation.improving(lifetimes=5, turns=250)
    assert wrong == 0
    assert good > 0.7
    assert promotions > 5


def test_power_falls_with_the_number_of_the_candidate():
    for _, turns in simulation.power_rows(runs=50):
        assert all(one < later for one, later in pairwise(turns))


def test_false_alarms_stay_below_the_level():
    assert 0 < simulation.false_alarms(1000) <= 0.05


def test_large_drop_is_found_soon():
    enough, share, delay = simulation.detection(4, drop=0.6, periods=80, sessions=1)
    assert enough == share == 1
    assert delay is not None
    assert delay < 60


def test_simulated_signals_are_accepted():
    generator = np.random.default_rng(0)
    before = simulation.signals(generator, 0.8, 0, 20, 3)
    after = simulation.signals(generator, 0.8, 20, 20, 3)
    assert {one.source for one in before} == {"judge:a", "judge:b", "user"}
    assert watch(before, after, 40).periods == 20
