"""Process rewards from the verifier's checks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawgym.rewards.milestones import milestone_rewards

PROGRESS = st.lists(st.floats(0, 1), min_size=1, max_size=9)


def test_turn_is_rewarded_for_the_checks_that_it_makes_pass() -> None:
    progress = (0.0, 0.5, 0.5, 0.25, 1.0)
    assert milestone_rewards(progress) == {0: 0.5, 1: 0.0, 2: -0.25, 3: 0.75}
    assert milestone_rewards(progress, credit="return-to-go") == {0: 1.0, 1: 0.5, 2: 0.5, 3: 0.75}


def test_turns_with_unknown_progress_are_left_out() -> None:
    assert milestone_rewards((0.0, None, 0.5, 1.0)) == {2: 0.5}
    assert milestone_rewards(()) == milestone_rewards((0.5,)) == {}


@given(PROGRESS)
def test_potential_sums_to_the_same_whatever_was_done(progress: list[float]) -> None:
    turns = len(progress) - 1
    total = sum(milestone_rewards(progress, potential=True).values())
    assert total == pytest.approx(-progress[0] if turns else 0.0)
    assert sum(milestone_rewards(progress).values()) == pytest.approx(progress[-1] - progress[0])


@given(PROGRESS, st.booleans())
def test_return_to_go_is_the_sum_of_what_follows(progress: list[float], potential: bool) -> None:
    single = milestone_rewards(progress, potential=potential)
    for turn, value in milestone_rewards(progress, credit="return-to-go", potential=potential).items():
        assert value == pytest.approx(sum(reward for later, reward in single.items() if later >= turn))
