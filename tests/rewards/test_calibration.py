from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clawgym.rewards.calibration import (
    CLEAR,
    Judged,
    auc,
    auc_interval,
    calibrate,
    canary,
    pearson,
    risen,
    spearman,
    weight,
)

SCORE = st.integers(-3, 3).map(float)
ROWS = st.lists(st.tuples(SCORE, st.booleans()), min_size=1, max_size=25)
COUNT = st.integers(1, 60)
AREA = st.floats(0, 1)


def judged(process: float, score: float, setting: str = "terminal") -> Judged:
    return Judged(setting, process, score, score == 1)


# --- the area


def test_an_area_by_hand() -> None:
    # pairs (3, 1) (3, 2) (2, 1) in the right order, (2, 2) a tie
    assert auc([3, 2, 1, 2], [True, True, False, False]) == pytest.approx(3.5 / 4)
    assert auc([1, 2], [True, True]) is None
    assert auc([], []) is None


@settings(deadline=None)
@given(ROWS)
def test_the_area_is_the_share_of_pairs(rows: list[tuple[float, bool]]) -> None:
    scores, solved = [s for s, _ in rows], [o for _, o in rows]
    pairs = [(s, f) for s, a in rows if a for f, b in rows if not b]
    wanted = sum((s > f) + (s == f) / 2 for s, f in pairs) / len(pairs) if pairs else None
    assert auc(scores, solved) == pytest.approx(wanted)
    if pairs:
        assert auc([-s for s in scores], solved) == pytest.approx(1 - wanted)  # type: ignore[operator]
        assert auc([math.exp(s) for s in scores], solved) == pytest.approx(wanted)  # only the order counts


@settings(deadline=None)
@given(AREA, COUNT, COUNT)
def test_an_interval_holds_its_area_and_mirrors(area: float, solved: int, failed: int) -> None:
    low, high = auc_interval(area, solved, failed)
    assert 0 <= low <= area <= high <= 1
    assert auc_interval(1 - area, failed, solved) == pytest.approx((1 - high, 1 - low), abs=1e-9)
    nearer = auc_interval(area, 4 * solved, 4 * failed)
    assert nearer[1] - nearer[0] <= high - low + 1e-9


def test_a_pair_in_the_right_order_does_not_prove_a_judge() -> None:
    z2 = 1.959964**2
    assert auc_interval(1.0, 1, 1) == pytest.approx((1 / (1 + z2), 1.0), abs=1e-6)
    assert auc_interval(1.0, 50, 50)[0] > 0.9


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    """Normal scores one deviation apart: the true area is Phi(1 / sqrt 2)."""
    draw, truth, held = random.Random(5), 0.5 * math.erfc(-0.5), 0
    for _ in range(400):
        solved = [draw.gauss(1, 1) for _ in range(15)]
        failed = [draw.gauss(0, 1) for _ in range(25)]
        area = auc(solved + failed, [True] * 15 + [False] * 25)
        assert area is not None
        low, high = auc_interval(area, 15, 25)
        held += low <= truth <= high
    assert 0.92 <= held / 400 <= 0.99


# --- what it is worth


@settings(deadline=None)
@given(st.tuples(AREA, AREA), st.tuples(AREA, AREA))
def test_a_weight_rises_with_either_end(a: tuple[float, float], b: tuple[float, float]) -> None:
    (low, high), other = sorted(a), sorted(b)
    here = weight((low, high))
    assert 0 <= here <= 1
    above = weight((max(low, other[0]), max(high, other[1])))
    assert above >= here - 1e-7
    if high <= 0.5:
        assert here == 0
    if low >= CLEAR:
        assert here == pytest.approx(1)


def test_weights_of_note() -> None:
    assert weight((0.0, 1.0)) == pytest.approx(0.45)
    assert weight((0.5, 0.6)) == pytest.approx(0.5)
    assert weight((0.49, 0.51)) == pytest.approx(0.025)
    assert weight((0.55, 0.55)) == pytest.approx(0.5)
    widths = [weight((0.5 - w, 0.5 + w)) for w in (0.3, 0.1, 0.03, 0.01)]
    assert widths == sorted(widths, reverse=True)  # the surer that it is chance, the less
    with pytest.raises(ValueError, match="within"):
        weight((0.7, 0.6))


# --- correlation


def test_correlation_by_hand() -> None:
    assert pearson([1, 2, 3], [2, 4, 6]) == pytest.approx(1)
    assert pearson([1, 2, 3, 4], [1, 3, 2, 4]) == pytest.approx(0.8)
    assert spearman([1, 2, 3, 400], [10, 30, 20, 40]) == pytest.approx(0.8)
    assert spearman([1, 1, 2], [5, 5, 9]) == pytest.approx(1)
    assert pearson([1, 1], [1, 2]) is spearman([1], [2]) is pearson([], []) is None


@settings(deadline=None)
@given(st.lists(st.tuples(SCORE, SCORE), min_size=2, max_size=20), st.floats(0.1, 9), st.floats(-9, 9))
def test_correlation_is_blind_to_scale(rows: list[tuple[float, float]], scale: float, shift: float) -> None:
    a, b = [x for x, _ in rows], [y for _, y in rows]
    for correlation in (pearson, spearman):
        here = correlation(a, b)
        assert here == pytest.approx(correlation(b, a))
        if here is not None:
            assert -1 <= here <= 1
            assert correlation([scale * x + shift for x in a], b) == pytest.approx(here, abs=1e-6)
            assert correlation([-x for x in a], b) == pytest.approx(-here, abs=1e-9)


# --- by setting, over a window


def test_settings_are_not_mixed_and_only_the_last_episodes_count() -> None:
    old = [judged(-1, 1.0), judged(1, 0.0)] * 10  # it was wrong once
    new = [judged(1, 1.0), judged(-1, 0.5)] * 10
    gui = [judged(0, 0.0, "gui")] * 3
    seen = calibrate([*old, *gui, *new], window=20)
    assert seen["terminal"].auc == 1
    assert (seen["terminal"].episodes, seen["terminal"].solved) == (20, 10)
    assert seen["terminal"].weight == 1
    assert seen["terminal"].pearson == pytest.approx(1)
    assert seen["gui"].auc is seen["gui"].pearson is seen["gui"].spearman is None
    assert seen["gui"].interval == (0, 1)
    assert calibrate([*new, *old], window=20)["terminal"].weight == 0
    assert calibrate(old + new, window=40)["terminal"].auc == 0.5
    assert calibrate([]) == {}


def test_weight_falls_with_evidence_for_a_random_judge() -> None:
    guesses = [judged(process, score) for process in (-1, 1) for score in (0.0, 1.0)]
    weights = [calibrate(guesses * n, window=4000)["terminal"].weight for n in (1, 5, 50, 1000)]
    assert weights == sorted(weights, reverse=True)
    assert weights[0] > 0.35
    assert weights[-1] < 0.05


# --- canary


def scores(by: float, tasks: int = 20) -> dict[str, float]:
    return {f"task-{i}": 0.1 + by * (i % 4) / 4 for i in range(tasks)}


def test_canary_finds_policies_that_earn_more_than_before() -> None:
    before = {"echo": scores(0), "touch": scores(0), "plant": scores(0.5)}
    now = {"echo": scores(0.5), "touch": scores(0), "plant": scores(0.0)}
    moved = canary(before, now)
    assert risen(moved) == ("echo",)
    assert moved["echo"].value == pytest.approx(0.1875)
    assert moved["plant"].value < 0
    assert risen(canary(now, before)) == ("plant",)
    assert risen(canary(before, before)) == ()


def test_one_more_solved_task_is_not_significant() -> None:
    before = {"echo": scores(0)}
    assert risen(canary(before, {"echo": {**scores(0), "task-3": 1.0}})) == ()


def test_many_policies_need_more_evidence() -> None:
    """Seven tasks that all rise give p = 2 / 2**7 = 0.016: enough for one policy, not for the best of ten."""
    before = {f"p{i}": scores(0, 7) for i in range(10)}
    now = {**before, "p0": {task: score + 0.5 for task, score in before["p0"].items()}}
    assert risen(canary({"p0": before["p0"]}, {"p0": now["p0"]})) == ("p0",)
    assert risen(canary(before, now)) == ()


@pytest.mark.parametrize(
    ("now", "said"),
    [({}, "echo"), ({"echo": scores(0, 19)}, "task-19"), ({"echo": {**scores(0), "more": 1.0}}, "more")],
)
def test_only_the_same_tasks_are_compared(now: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        canary({"echo": scores(0)}, now)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: auc([1, math.nan], [True, False]), "not finite"),
        (lambda: auc([1], [True, False]), "one length"),
        (lambda: auc_interval(0.5, 0, 3), "one of each"),
        (lambda: auc_interval(1.5, 1, 3), "one of each"),
    ],
)
def test_what_does_not_fit_is_said(call, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        call()
