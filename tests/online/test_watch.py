"""Rollbacks from live signals, and attacks on them."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clawgym.online.betting import log_evidence
from clawgym.online.watch import LiveSignal, WatchDecision, watch

SOURCES = ("judge:a", "judge:b", "user:1", "user:2")
START = 100
"""The first period after the promotion."""


def signals(value: int, start: int, periods: int = 40, sources=SOURCES, sessions: int = 1) -> list[LiveSignal]:
    """The same signal of each source on each session."""
    return [
        LiveSignal(source, f"{period}-{n}", f"{period}-{n}", value, period)
        for period in range(start, start + periods)
        for n in range(sessions)
        for source in sources
    ]


def mixed(good: float, start: int, seed: int, periods: int = 60) -> list[LiveSignal]:
    """Sessions that go well with chance ``good``; the sources agree on them in nine of ten cases."""
    chance, made = random.Random(seed), []
    for period in range(start, start + periods):
        well = chance.random() < good
        for source in SOURCES:
            right = chance.random() < 0.9
            made.append(LiveSignal(source, str(period), str(period), 1 if well == right else -1, period))
    return made


BEFORE = signals(1, 0)


def watched(after: list[LiveSignal], before: list[LiveSignal] = BEFORE) -> WatchDecision:
    return watch(before, after, now=10_000)


def test_drop_of_all_sources_is_rolled_back():
    decision = watched(signals(-1, START))
    assert decision.verdict == "rollback"
    assert decision.change == -2
    assert (decision.periods, decision.sources, decision.sessions) == (40, 4, 40)
    assert decision.weakest is not None
    assert decision.needed == 20 <= decision.weakest <= decision.evidence
    assert "dropped by 2.00" in decision.reason


def test_equal_signals_are_kept():
    decision = watched(signals(1, START))
    assert (decision.verdict, decision.change, decision.evidence) == ("keep", 0, 1)


def test_rise_is_kept():
    decision = watched(signals(1, START), before=signals(-1, 0))
    assert (decision.verdict, decision.change) == ("keep", 2)
    assert decision.evidence < 1


def test_few_periods_are_not_enough():
    assert watched(signals(-1, START, periods=4)).verdict == "keep"


def test_tolerance_is_accepted():
    after = mixed(0.5, START, seed=1)
    assert watch(mixed(0.9, 0, seed=2), after, now=1000).verdict == "rollback"
    assert watch(mixed(0.9, 0, seed=2), after, now=1000, tolerance=1.0).verdict == "keep"
    quiet = watch(BEFORE, signals(1, START), now=1000, tolerance=0.5)
    assert quiet.evidence < 1  # no change is evidence against a drop by more than 0.5


def test_evidence_by_hand():
    """One period with changes of -2 and 0: the mean is -1, or -2 or 0 without one of the two sources."""
    two = SOURCES[:2]
    after = signals(-1, START, 1, two[:1]) + signals(1, START, 1, two[1:])
    views = [np.exp(log_evidence([drop])) for drop in (0.5, 0.0, 1.0)]
    assert watched(after, signals(1, 0, 1, two)).evidence == pytest.approx(np.mean(views))


def test_alpha_decides_how_much_evidence_is_needed():
    after = signals(-1, START, periods=12)
    assert watch(BEFORE, after, now=1000).verdict == "rollback"
    assert watch(BEFORE, after, now=1000, alpha=1e-4).verdict == "keep"


def test_present_period_does_not_count():
    after = signals(-1, START)
    assert watch(BEFORE, after, now=START).periods == 0
    assert watch(BEFORE, after, now=START + 3).periods == 3


def test_first_period_after_is_compared_with_the_last_before():
    """The version before became worse in its last half, so the first periods after it are no drop."""
    before = signals(1, 0, periods=20) + signals(-1, 20, periods=20)
    assert watched(signals(-1, START, periods=20), before).change == 0
    assert watched(signals(-1, START, periods=40), before).change == -1


# Attacks


@pytest.mark.parametrize("source", SOURCES)
def test_no_single_source_causes_a_rollback(source: str):
    """It votes -1 on everything, in every period and 50 sessions in each; the others see no difference."""
    others = [one for one in SOURCES if one != source]
    after = signals(1, START, sources=others) + [
        LiveSignal(source, f"flood-{period}-{n}", f"flood-{period}-{n}", -1, period)
        for period in range(START, START + 40)
        for n in range(50)
    ]
    decision = watched(after)
    assert decision.verdict == "keep"
    assert decision.change == pytest.approx(-0.5)


def test_one_source_with_enough_evidence_of_its_own_is_kept():
    """A judge that says -1 to everything new, beside one other: the evidence suffices only with it."""
    pair = SOURCES[:2]
    after = signals(1, START, sources=pair[:1]) + signals(-1, START, sources=pair[1:])
    decision = watched(after, before=signals(1, 0, sources=pair))
    assert decision.evidence >= decision.needed
    assert decision.verdict == "keep"
    assert "without one source or session" in decision.reason


def test_no_single_session_causes_a_rollback():
    """One session with -1 of all sources in all periods, beside good sessions of others."""
    after = signals(1, START) + [
        LiveSignal(source, "angry", f"angry-{period}", -1, period)
        for period in range(START, START + 40)
        for source in SOURCES
    ]
    decision = watched(after)
    assert decision.evidence >= decision.needed
    assert decision.verdict == "keep"
    assert decision.weakest == pytest.approx(1)


def test_flood_of_signals_in_a_session_weighs_as_one():
    quiet = signals(1, START)
    flood = quiet + [LiveSignal("user:1", f"{START}-0", f"more-{n}", -1, START) for n in range(1000)]
    assert watched(flood).change == pytest.approx(-2 / 4 / 40, rel=0.01)


def test_new_sources_have_no_influence():
    """Fifty accounts that are made after the promotion, also active in periods without other signals."""
    after = signals(-1, START + 60, periods=8)
    crowd = [
        LiveSignal(f"new:{n}", f"new-{n}-{period}", f"new-{n}-{period}", -1, period)
        for n in range(50)
        for period in range(START, START + 80)
    ]
    assert watched(after + crowd) == watched(after)
    assert watched(after + crowd).sources == 4


def test_judge_that_likes_every_new_version_does_not_hide_a_drop():
    likes, others = SOURCES[:1], SOURCES[1:3]
    before = signals(-1, 0, sources=likes) + signals(0, 0, sources=others)
    after = signals(1, START, sources=likes) + signals(-1, START, sources=others)
    decision = watched(after, before)
    assert (decision.verdict, decision.change) == ("rollback", 0)


def test_source_cannot_use_up_the_periods_before():
    """A source alone in many periods: they do not count, so the drop that the others show is found."""
    flood = [LiveSignal("user:1", f"f{p}", f"f{p}", 1, p) for p in range(START, START + 400)]
    drop = signals(-1, START + 400, sources=SOURCES[:2] + SOURCES[3:])
    assert watched(flood + drop).verdict == "rollback"


def test_one_source_alone_is_never_rolled_back():
    one = SOURCES[:1]
    decision = watched(signals(-1, START, sources=one), before=signals(1, 0, sources=one))
    assert (decision.verdict, decision.periods, decision.evidence) == ("keep", 0, 1)
    assert "two sources" in decision.reason


@pytest.mark.parametrize("value", [2, -2, 0.5, float("nan")])
def test_wrong_signal_is_refused(value):
    with pytest.raises(ValueError, match="give -1, 0 or 1"):
        LiveSignal("user:1", "s", "t", value, 1)


def test_second_signal_on_a_turn_is_refused():
    with pytest.raises(ValueError, match="two signals on turn 100-0"):
        watched([*signals(1, START), LiveSignal("user:1", "another", "100-0", -1, 105)])


def test_periods_before_and_after_may_not_overlap():
    with pytest.raises(ValueError, match="begin a new period"):
        watched(signals(1, 39))


def test_wrong_settings_are_refused():
    for wrong in ({"alpha": 0.0}, {"alpha": 1.0}, {"tolerance": -0.1}, {"tolerance": 2.0}):
        with pytest.raises(ValueError, match="0 < alpha < 1"):
            watch([], [], 0, **wrong)


def test_no_signals_decide_nothing():
    decision = watch([], [], now=5)
    assert (decision.verdict, decision.evidence, decision.change, decision.periods) == ("keep", 1, None, 0)


def test_false_alarms_are_rare():
    """80 services without a drop, looked at in every period: about 5 % at most."""
    found = 0
    for seed in range(80):
        before, after = mixed(0.8, 0, seed), mixed(0.8, START, seed + 10_000)
        found += any(watch(before, after, now).verdict == "rollback" for now in range(START + 5, START + 61, 5))
    assert found <= 8


def test_most_large_drops_are_found():
    found = sum(
        watch(mixed(0.9, 0, seed), mixed(0.4, START, seed + 10_000), START + 60).verdict == "rollback"
        for seed in range(20)
    )
    assert found >= 18


@settings(max_examples=60)
@given(st.data())
def test_rollback_needs_more_than_any_one_source(data):
    """Whatever one source says: without a drop of the others, there is no rollback."""
    source = data.draw(st.sampled_from(SOURCES))
    others = [one for one in SOURCES if one != source]
    votes = data.draw(st.lists(st.sampled_from([-1, 0, 1]), min_size=80, max_size=80))
    own = [
        LiveSignal(source, f"own-{p}", f"own-{p}", v, p) for p, v in zip(range(START, START + 80), votes, strict=True)
    ]
    assert watched(signals(1, START, sources=others) + own).verdict == "keep"
