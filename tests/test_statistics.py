from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawgym.statistics import bootstrap, krippendorff_alpha, mean, pass_at_k, pass_hat_k, rate, student_t, wilson

from .conftest import benchmark

simulation = benchmark("statistics_check")

unit = st.floats(0, 1)
score_groups = st.lists(st.lists(unit, min_size=1, max_size=5), min_size=1, max_size=20)
pass_groups = st.lists(st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=5), min_size=1, max_size=20)


@pytest.mark.parametrize(
    ("df", "value"),
    [(1, 12.7062), (2, 4.30265), (3, 3.18245), (4, 2.77645), (10, 2.22814), (29, 2.04523), (199, 1.97196)],
)
def test_t_quantiles_match_tables(df: int, value: float):
    assert student_t(0.975, df) == pytest.approx(value, rel=2e-3 if df < 5 else 1e-5)
    assert student_t(0.025, df) == pytest.approx(-value, rel=2e-3 if df < 5 else 1e-5)


def test_wilson_matches_published_values():
    # Newcombe 1998, table I, method 3.
    assert wilson(81 / 263, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson(15 / 148, 148) == pytest.approx((0.0624, 0.1605), abs=5e-5)
    assert wilson(0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)
    assert wilson(1 / 29, 29) == pytest.approx((0.0061, 0.1718), abs=5e-5)


def test_no_estimate_without_tasks():
    assert rate([]) is None
    assert mean([[]]) is None


_OBSERVERS = (
    (1, 2, 3, 3, 2, 1, 4, 1, 2, None, None, None),
    (1, 2, 3, 3, 2, 2, 4, 1, 2, 5, None, 3),
    (None, 3, 3, 3, 2, 3, 4, 2, 2, 5, 1, None),
    (1, 2, 3, 3, 2, 4, 4, 1, 2, 5, 1, None),
)
"""The example of Krippendorff (2011), section C: 12 units, of which the last has one rating."""


def test_alpha_of_the_published_example():
    units = [[rating for rating in unit if rating is not None] for unit in zip(*_OBSERVERS, strict=True)]
    assert krippendorff_alpha(units) == pytest.approx(0.849, abs=5e-4)


def test_alpha_is_one_for_equal_ratings_and_undefined_without_differences():
    assert krippendorff_alpha([[0, 0], [1, 1, 1]]) == 1.0
    assert krippendorff_alpha([[0, 1], [1, 0]]) == pytest.approx(-0.5)
    assert krippendorff_alpha([[1, 1], [1]]) is krippendorff_alpha([]) is None


@given(pass_groups)
def test_rate_is_inside_its_interval(groups):
    estimate = rate(groups)
    assert estimate is not None
    assert 0 <= estimate.low <= estimate.value <= estimate.high <= 1
    assert estimate.low < estimate.high
    assert estimate.tasks == len(groups)


@given(score_groups)
def test_mean_is_inside_its_interval(groups):
    estimate = mean(groups)
    assert estimate is not None
    assert 0 <= estimate.low <= estimate.value <= estimate.high <= 1
    assert estimate.value == pytest.approx(sum(sum(g) / len(g) for g in groups) / len(groups))


@given(pass_groups, st.randoms())
def test_estimates_do_not_depend_on_order(groups, random):
    shuffled = [list(group) for group in groups]
    random.shuffle(shuffled)
    for group in shuffled:
        random.shuffle(group)
    for estimator in (rate, mean):
        a, b = estimator(groups), estimator(shuffled)
        assert a is not None
        assert b is not None
        assert (a.value, a.low, a.high) == pytest.approx((b.value, b.low, b.high))


@given(st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=40))
def test_one_sample_per_task_gives_wilson_interval(results):
    estimate = rate([[r] for r in results])
    assert estimate is not None
    assert (estimate.low, estimate.high) == wilson(sum(results) / len(results), len(results))
    assert estimate.method == "wilson"


@given(st.lists(st.sampled_from([0.0, 1.0]), min_size=2, max_size=30), st.integers(2, 6))
def test_identical_samples_do_not_narrow_the_interval(results, k):
    """Perfectly correlated samples: the interval must be that of the tasks alone."""
    once, repeated = rate([[r] for r in results]), rate([[r] * k for r in results])
    assert once is not None
    assert repeated is not None
    assert (repeated.low, repeated.high) == pytest.approx((once.low, once.high))


def test_independent_samples_narrow_the_interval():
    generator = np.random.default_rng(0)
    draws = (generator.random((100, 8)) < 0.5).astype(float)
    few, many = rate(draws[:, :1].tolist()), rate(draws.tolist())
    assert few is not None
    assert many is not None
    assert many.high - many.low < 0.5 * (few.high - few.low)


@pytest.mark.parametrize(("k", "spread"), [(1, 0.0), (4, 0.2), (4, 1.0)])
def test_intervals_have_their_nominal_coverage(k: int, spread: float):
    """Tasks differ in difficulty; the true rate must lie in about 95% of the intervals."""
    generator = np.random.default_rng(1)
    covered = {"rate": 0, "mean": 0}
    runs, tasks, truth = 600, 60, 0.3
    for _ in range(runs):
        a = truth / max(spread, 1e-3)
        difficulty = generator.beta(a, (1 - truth) / max(spread, 1e-3), tasks)
        groups = (generator.random((tasks, k)) < difficulty[:, None]).astype(float).tolist()
        for name, estimator in (("rate", rate), ("mean", mean)):
            estimate = estimator(groups)
            assert estimate is not None
            covered[name] += estimate.low <= truth <= estimate.high
    for name, hits in covered.items():
        assert 0.92 <= hits / runs <= 0.985, (name, hits / runs)


@given(st.integers(1, 7).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_k_equals_enumeration(case):
    n, c, k = case
    subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))
    assert pass_hat_k(n, c, k) == pytest.approx(sum(map(all, subsets)) / len(subsets))


@given(st.integers(1, 200).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))))
def test_pass_k_is_monotonic_in_k(case):
    n, c = case
    at = [pass_at_k(n, c, k) for k in range(1, n + 1)]
    hat = [pass_hat_k(n, c, k) for k in range(1, n + 1)]
    assert at[0] == pytest.approx(c / n)
    assert hat[0] == pytest.approx(c / n)
    assert all(x <= y + 1e-12 for x, y in itertools.pairwise(at))
    assert all(x >= y - 1e-12 for x, y in itertools.pairwise(hat))
    assert all(math.isfinite(x) and 0 <= x <= 1 for x in at + hat)


@pytest.mark.parametrize("bad", [(3, 4, 1), (3, 1, 0), (3, 1, 4), (0, 0, 1), (3, -1, 1)])
def test_invalid_counts_are_refused(bad):
    with pytest.raises(ValueError, match="give 0 <= c <= n"):
        pass_at_k(*bad)
    with pytest.raises(ValueError, match="give 0 <= c <= n"):
        pass_hat_k(*bad)


@given(st.integers(1, 40).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))))
def test_pass_hat_k_is_at_most_pass_at_k(case):
    n, c = case
    assert all(pass_hat_k(n, c, k) <= pass_at_k(n, c, k) + 1e-12 for k in range(1, n + 1))


@given(st.lists(unit, min_size=2, max_size=30), st.randoms())
def test_bootstrap_does_not_depend_on_the_order(values, random):
    shuffled = values[:]
    random.shuffle(shuffled)
    assert bootstrap(values) == bootstrap(shuffled)
    low, high = bootstrap(values)
    slack = 1e-9
    assert min(values) - slack <= low <= high <= max(values) + slack


def test_bootstrap_is_close_to_the_t_interval():
    """For many values near the normal distribution, Student's t."""
    values = np.random.default_rng(0).normal(0.5, 0.1, 400)
    low, high = bootstrap(values.tolist())
    half = student_t(0.975, 399) * values.std(ddof=1) / 20
    assert (low, high) == pytest.approx((values.mean() - half, values.mean() + half), abs=0.05 * half)


def test_small_samples_get_wider_intervals_than_plain_percentiles():
    values = [0.1, 0.4, 0.5, 0.6, 0.9]
    generator = np.random.default_rng(0)
    plain = np.quantile(generator.choice(values, (20_000, 5)).mean(axis=1), [0.025, 0.975])
    low, high = bootstrap(values)
    assert low < plain[0]
    assert high > plain[1]
    with pytest.raises(ValueError, match="two or more"):
        bootstrap([0.5])


# What simulated runs with a known truth say; benchmarks/statistics_check.py prints the same at full length. Seeded:
# these are no chance tests, and the bounds are three standard errors wide.


@pytest.mark.parametrize(("tasks", "k"), [(40, 1), (40, 4), (200, 1)])
def test_wilson_interval_coverage(tasks: int, k: int):
    assert 0.91 <= simulation.coverage_of_rates(400, tasks, k, 0.3) <= 0.985


@pytest.mark.parametrize("tasks", [10, 40])
def test_bootstrap_interval_coverage(tasks: int):
    assert 0.91 <= simulation.coverage_of_means(400, tasks, simulation.partial_scores, 0.5) <= 0.985


@pytest.mark.parametrize(("n", "k"), [(4, 2), (8, 4)])
def test_pass_k_is_unbiased(n: int, k: int):
    at, hat = simulation.bias_of_pass_k(20_000, n, k, 0.3)
    assert abs(at) < 0.01
    assert abs(hat) < 0.01
    naive = float(np.mean(1 - (1 - np.random.default_rng(0).binomial(n, 0.3, 20_000) / n) ** k)) - (1 - 0.7**k)
    assert abs(naive) > 3 * abs(at), "the plug-in estimate is the biased one"


@pytest.mark.parametrize(("tasks", "k", "spread"), [(40, 1, 1.0), (40, 4, 0.5), (100, 1, 0.0)])
def test_equal_runs_rarely_differ_significantly(tasks: int, k: int, spread: float):
    assert simulation.false_positives(400, tasks, k, 0.4, spread) <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 400)


def test_detectable_difference_is_found_with_80_percent_power():
    assert 0.70 <= simulation.power(300, 100, 0.3)[1] <= 0.88
    assert 0.70 <= simulation.power_partial(300, 40)[1] <= 0.88
