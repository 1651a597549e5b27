"""Judges without a model: rules, and a degraded judge."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawgym.records.judge import Judge, Judgeable, Judgement, NextState
from clawgym.rewards.rules import DegradedJudge, RuleJudge, went_wrong


def asked(*results: str, turn: int = 0, said: str = "I act.", **more: object) -> Judgeable:
    messages = tuple({"role": "tool", "tool_call_id": f"c{n}", "content": text} for n, text in enumerate(results))
    made = Judgeable("e", turn, "terminal", "t", (), {"role": "assistant", "content": said}, NextState(turn, messages))
    return replace(made, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("a b\n[exit code 0; cwd /root]", False),
        ("[exit code 1; cwd /root]", True),
        ("no such file\n[exit code 127; cwd /root; timed out and was killed]", True),
        ("[exit code 1; cwd /fake]\n[exit code 0; cwd /root]", False),  # printed by the command itself
        ("[exit code 0; cwd /fake]\n[exit code 2; cwd /root]", True),
        ("[error: there is no tool 'x': use bash]", True),
        ("[error: printed] and more", False),
        ("boom\n\nCommand exited with code 2", True),
        ("boom\n(Command exited with code 0)", False),
        ('{"status": "error", "tool": "exec", "error": "x"}', True),
        ('{"status": "ok"}', False),
        ('{"isError": true}', True),
        ("{not json}", False),
        ("", False),
    ],
)
def test_failed_results_are_recognised(text: str, wrong: bool) -> None:
    assert went_wrong({"role": "tool", "content": text}) is wrong
    assert went_wrong({"role": "tool", "content": [{"type": "text", "text": text}]}) is wrong


@given(st.text())
def test_reading_a_result_never_raises(text: str) -> None:
    went_wrong({"role": "tool", "content": text})


async def test_one_failed_call_of_several_is_enough() -> None:
    good, bad = "x\n[exit code 0; cwd /]", "x\n[exit code 1; cwd /]"
    rule = RuleJudge()
    assert (await rule.judge(asked(good, good))).votes == (0,)
    for results in ((bad, good), (good, bad), (bad, bad)):
        assert (await rule.judge(asked(*results))).votes == (-1,)
    assert (await rule.judge(asked(good, malformed_calls=1))).votes == (-1,)
    shown = NextState(0, ({"role": "user", "content": bad},))
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "c"}]}
    for one, vote in (
        (asked(after=shown), -1),  # an agent that writes its commands as text
        (asked(after=shown, setting="chat"), 0),  # a person who shows what a command said
        (asked(after=shown, action=call), 0),
    ):
        assert (await rule.judge(one)).votes == (vote,)
    ahead = RuleJudge(lambda one: 1 if one.turn > 3 else None, rule="late is good")
    assert (await ahead.judge(asked(good, turn=4))).votes == (1,)
    assert (await ahead.judge(asked(good, turn=1))).votes == (None,)
    assert (await ahead.judge(asked(bad, turn=4))).votes == (-1,)
    assert ahead.version != rule.version
    with pytest.raises(ValueError, match="go together"):
        RuleJudge(lambda one: 1)
    assert isinstance(rule, Judge)


class Truth:
    """An exact judge: even turns are good."""

    name, version = "truth", "0"

    async def judge(self, one: Judgeable) -> Judgement:
        return Judgement((1 - 2 * (one.turn % 2),), ("",), self.name, self.version)  # type: ignore[arg-type]


def auc(scores: list[float], good: list[bool]) -> float:
    high, low = ([s for s, g in zip(scores, good, strict=True) if g is want] for want in (True, False))
    return float(np.mean([(a > b) + 0.5 * (a == b) for a in high for b in low]))


@pytest.mark.parametrize("wanted", [1.0, 0.9, 0.7, 0.5, 0.2, 0.0])
async def test_a_degraded_judge_has_the_auc_that_was_asked_for(wanted: float) -> None:
    turns = [asked(turn=n) for n in range(2000)]
    worse = DegradedJudge(Truth(), wanted, seed=3)
    votes = [(await worse.judge(one)).votes[0] for one in turns]
    # Standard deviation of the share that is flipped: below 0.012.
    assert auc([float(v or 0) for v in votes], [n % 2 == 0 for n in range(2000)]) == pytest.approx(wanted, abs=0.045)
    again = DegradedJudge(Truth(), wanted, seed=3)
    assert [(await again.judge(one)).votes[0] for one in reversed(turns)] == votes[::-1]
    if wanted not in (0.0, 1.0):
        other = DegradedJudge(Truth(), wanted, seed=4)
        assert [(await other.judge(one)).votes[0] for one in turns] != votes
        assert other.version != worse.version == again.version


async def test_inverting_keeps_zeros_and_invalid_votes() -> None:
    class Unsure:
        name, version = "unsure", "0"

        async def judge(self, one: Judgeable) -> Judgement:
            return Judgement((0, None, 1), ("", "", ""), self.name, self.version)

    judgement = await DegradedJudge(Unsure(), 0.0).judge(asked())
    assert judgement.votes == (0, None, -1)
    with pytest.raises(ValueError, match="between 0 and 1"):
        DegradedJudge(Unsure(), 1.1)
