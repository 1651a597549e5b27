from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clawgym.records import Role, Turn
from clawgym.rewards.penalties import malformed_share, overlong, penalties


def turn(sampled: int, malformed: int = 0, role: Role = "main") -> Turn:
    return Turn(sampled_ids=(7,) * sampled, logprobs=(-1.0,) * sampled, malformed_calls=malformed, role=role)


TURNS = [turn(40, 2), turn(30), turn(20, 1), turn(10), turn(500, 9, "subagent")]


def test_off_by_default() -> None:
    assert penalties(TURNS) == {}


def test_the_share_counts_turns_of_the_agent_itself() -> None:
    assert malformed_share(TURNS) == 0.5
    assert malformed_share([]) == malformed_share([turn(5, 1, "subagent")]) == 0
    assert penalties(TURNS, malformed=0.2) == {"malformed": pytest.approx(-0.1)}


@pytest.mark.parametrize(("length", "wanted"), [(0, 0), (80, 0), (85, -0.25), (90, -0.5), (100, -1), (9999, -1)])
def test_soft_overlong_punishment(length: int, wanted: float) -> None:
    assert overlong(length, longest=100, slack=20) == pytest.approx(wanted)


def test_length_is_of_all_that_the_agent_sampled() -> None:
    assert penalties(TURNS, length=0.5, longest=110, slack=20) == {"length": pytest.approx(-0.25)}
    both = penalties(TURNS, malformed=1, length=1, longest=110, slack=20)
    assert sum(both.values()) == pytest.approx(-1)


@settings(deadline=None)
@given(st.integers(0, 300), st.integers(0, 300), st.integers(1, 200), st.integers(1, 200))
def test_longer_is_never_better(a: int, b: int, longest: int, slack: int) -> None:
    slack = min(slack, longest)
    a, b = sorted((a, b))
    assert -1 <= overlong(b, longest=longest, slack=slack) <= overlong(a, longest=longest, slack=slack) <= 0


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ({"malformed": -1.0}, "malformed=-1.0"),
        ({"length": float("nan")}, "length=nan"),
        ({"length": 1.0, "longest": 10}, "longest and slack"),
        ({"length": 1.0, "longest": 10, "slack": 11}, "1 to 10"),
        ({"length": 1.0, "longest": 10, "slack": 0}, "1 to 10"),
    ],
)
def test_what_does_not_fit_is_said(weights: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        penalties(TURNS, **weights)
