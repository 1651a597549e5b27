"""The process reward of a turn: the mean or the majority of the judge's votes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clawgym.rewards.votes import majority, process_of

VOTES = st.lists(st.sampled_from([-1, 0, 1, None]), max_size=7)


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


@settings(deadline=None)
@given(VOTES, st.booleans())
def test_invalid_votes_and_their_order_change_nothing(votes: list, zeros: bool) -> None:
    got = process_of(votes, count_zeros=zeros)
    valid = [vote for vote in votes if vote is not None]
    assert process_of(valid, count_zeros=zeros) == got == process_of(votes[::-1], count_zeros=zeros)
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


@pytest.mark.parametrize("vote", [2, 0.5, True, "1"])
def test_invalid_votes_are_refused(vote) -> None:
    for call in (process_of, majority):
        with pytest.raises(ValueError, match="correct the judge"):
            call([1, vote])
