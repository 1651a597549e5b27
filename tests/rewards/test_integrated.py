from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clawgym.rewards.integrated import TurnReward, majority, outcome_of, process_of, turn_reward, turn_rewards

VOTES = st.lists(st.sampled_from([-1, 0, 1, None]), max_size=7)
SCORES = st.floats(0, 1)


@pytest.mark.parametrize(
    ("votes", "mean", "without_zeros", "most"),
    [
        ((1, 0, 0), 1 / 3, 1.0, 0),
        ((1, 1, -1), 1 / 3, 1 / 3, 1),
        ((1, None, -1), 0.0, 0.0, 0),
        ((None, None, -1), -1.0, -1.0, -1),
        ((0, 0, None), 0.0, None, 0),
        ((None, None), None, None, None),
        ((), None, None, None),
        ((1, 1, -1, -1, 0), 0.0, 0.0, 0),
    ],
)
def test_votes_become_a_mean_or_a_majority(votes, mean, without_zeros, most) -> None:
    assert process_of(votes) == pytest.approx(mean)
    assert process_of(votes, count_zeros=False) == pytest.approx(without_zeros)
    assert majority(votes) == most


def test_the_parts_stay_beside_the_sum() -> None:
    got = turn_reward(0.75, (1, 0, None), penalties={"malformed": -0.1, "length": -0.25})
    assert got == TurnReward(0.5, (1, 0, None), 0.5, 1.0, {"malformed": -0.1, "length": -0.25})
    assert got.total == pytest.approx(0.65)


def test_without_a_valid_vote_the_outcome_is_the_reward() -> None:
    for votes in ((), (None, None)):
        got = turn_reward(0.25, votes)
        assert (got.process, got.integrated, got.total) == (None, -0.5, -0.5)
    assert turn_reward(1.0, (0, 0), count_zeros=False).integrated == 1.0


def test_turns_are_known_by_their_index() -> None:
    got = turn_rewards(1.0, [0, 3, 4], {3: (-1, -1), 4: (None,)}, penalties={"length": -0.5})
    assert {turn: reward.integrated for turn, reward in got.items()} == {0: 1.0, 3: 0.0, 4: 1.0}
    assert {reward.total for reward in got.values()} == {0.5, -0.5}
    with pytest.raises(ValueError, match="votes on turn 2"):
        turn_rewards(1.0, [0, 3, 4], {2: (1,)})


@settings(deadline=None)
@given(SCORES, VOTES, st.booleans())
def test_what_always_holds(score: float, votes: list, zeros: bool) -> None:
    got = turn_reward(score, votes, count_zeros=zeros)
    assert -1 <= got.outcome <= 1
    assert abs(got.integrated - got.outcome) <= 1 + 1e-12
    assert got.total == got.integrated
    valid = [vote for vote in votes if vote is not None]
    assert process_of(valid, count_zeros=zeros) == got.process  # an invalid vote changes nothing
    assert process_of(votes[::-1], count_zeros=zeros) == got.process
    if (mean := process_of(valid)) is not None:
        assert mean == pytest.approx(sum(valid) / len(valid))
        assert majority([-v if v else v for v in votes]) == -(majority(votes) or 0)


@settings(deadline=None)
@given(st.lists(st.sampled_from([-1, 0, 1]), min_size=1, max_size=6))
def test_a_zero_more_moves_the_mean_towards_zero(votes: list) -> None:
    before, after = process_of(votes), process_of([*votes, 0])
    assert before is not None
    assert after is not None
    assert abs(after) < abs(before) or before == after == 0
    assert process_of([*votes, 0], count_zeros=False) == process_of(votes, count_zeros=False)


@pytest.mark.parametrize("score", [-0.01, 1.01, math.nan, math.inf])
def test_invalid_scores_are_refused(score: float) -> None:
    with pytest.raises(ValueError, match="leave out an episode"):
        outcome_of(score)


@pytest.mark.parametrize("vote", [2, 0.5, True, "1"])
def test_invalid_votes_are_refused(vote) -> None:
    for call in (process_of, majority):
        with pytest.raises(ValueError, match="correct the judge"):
            call([1, vote])


@pytest.mark.parametrize("value", [0.1, math.nan])
def test_positive_penalties_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match="0 or less"):
        turn_reward(0.5, penalties={"length": value})
