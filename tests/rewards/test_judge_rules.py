"""Judges without a model: rules, a trained head, and a degraded judge."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawgym.records.judge import Judge, Judgeable, Judgement, NextState
from clawgym.rewards.head import HeadJudge, TrainedOn, train_head
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


def examples(family: str, count: int, seed: int) -> list[tuple[Judgeable, bool]]:
    """Other words in each family, and the same marks of failure in all."""
    dice = random.Random(seed)
    made = []
    for n in range(count):
        good = dice.random() < 0.2
        words = " ".join(f"{family}{dice.randrange(40)}" for _ in range(30))
        trouble = dice.random() < (0.1 if good else 0.9)
        end = "Traceback: error\n[exit code 1; cwd /]" if trouble else "written\n[exit code 0; cwd /]"
        made.append((asked(f"{words}\n{end}", turn=n, said=words, family=family), good))
    return made


async def test_head_generalises_to_other_families(tmp_path: Path) -> None:
    learnt = [*examples("sort", 150, 1), *examples("count", 150, 2)]
    head = train_head(learnt)
    new = examples("rename", 200, 3)
    found = auc([head.probability(one) for one, _ in new], [good for _, good in new])
    assert found > 0.85  # trouble alone gives 0.9
    # Good ones are 1 in 5 of what it learnt from: a probability of 1/2 lies between the two kinds all the same.
    of_kind = [np.mean([head.probability(one) for one, good in new if good is want]) for want in (True, False)]
    assert sum(of_kind) == pytest.approx(1.0, abs=0.15)
    votes = {(await head.judge(one)).votes[0] for one, _ in new}
    assert votes >= {1, -1}
    with pytest.raises(TrainedOn, match="'sort'"):
        await head.judge(learnt[0][0])

    head.save(tmp_path / "head.npz")
    back = HeadJudge.load(tmp_path / "head.npz")
    assert back.version == head.version == train_head(learnt).version
    assert [await back.judge(one) for one, _ in new[:5]] == [await head.judge(one) for one, _ in new[:5]]
    assert train_head(learnt[:200]).version != head.version
    assert [path.name for path in tmp_path.iterdir()] == ["head.npz"]


def test_a_head_of_bad_files_or_examples_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="examples of both"):
        train_head([(asked(), True)])
    (tmp_path / "x").write_bytes(b"junk")
    np.savez(tmp_path / "other.npz", weights=np.zeros(3), about=np.array("{}"))
    np.save(tmp_path / "array.npy", np.zeros(3))
    for name in ("x", "other.npz", "array.npy", "missing"):
        with pytest.raises(ValueError, match="train it again"):
            HeadJudge.load(tmp_path / name)
    train_head([(asked("good"), True), (asked("bad"), False)]).save(tmp_path / "head.npz")
    with np.load(tmp_path / "head.npz") as file:
        changed = {name: file[name] for name in file.files}
    changed["weights"][7] += 1
    np.savez(tmp_path / "changed.npz", **changed)
    with pytest.raises(ValueError, match="changed since"):
        HeadJudge.load(tmp_path / "changed.npz")
