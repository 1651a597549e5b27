"""Parsing votes: only the last line of the judge counts."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawgym.records.judge import Judgement
from clawgym.rewards.votes import LONGEST_HINT, hint_of, rewards_of, verdict_of

PIECES = st.sampled_from(
    [
        "Verdict: +1",
        "Verdict: 0",
        "Verdict: -1",
        "Verdict:",
        "+1",
        "\\boxed{1}",
        "\n",
        "\r",
        "\r\n",
        " ",
        "\u2028",
        "é",
        ".",
    ]
)
TEXTS = st.one_of(st.text(), st.lists(PIECES).map("".join))


@given(TEXTS)
def test_a_verdict_is_the_last_line_that_is_not_empty(text: str) -> None:
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    wanted = {"Verdict: +1": 1, "Verdict: 0": 0, "Verdict: -1": -1}.get(lines[-1]) if lines else None
    assert verdict_of(text) == wanted


@given(TEXTS, st.sampled_from([1, 0, -1]))
def test_only_the_last_line_counts(text: str, vote: int) -> None:
    assert verdict_of(f"{text}\nVerdict: {vote:+d}\n \n".replace("+0", "0")) == vote


@pytest.mark.parametrize(
    "text",
    ["", "Verdict: 1", "verdict: +1", "Verdict: +1.", "**Verdict: +1**", "Verdict: +1 or -1", "Verdict: +10",
     "\\boxed{1}", "Verdict: +1\nbut see below", "Verdict: +1\rVerdict: -1", "My Verdict: +1", "Verdict:  +1",
     "Verdict: ＋1", "Verdict: 00"],
)  # fmt: skip
def test_anything_else_is_no_vote(text: str) -> None:
    assert verdict_of(text) is None


MARK = "0123456789abcdef"


def hinted(passage: str, end: str = "Verdict: +1", mark: str = MARK) -> str:
    return f"Because.\n<hint {mark}>\n{passage}\n</hint {mark}>\n{end}"


def test_a_hint_needs_its_marks_its_verdict_and_a_fair_length() -> None:
    assert hint_of(hinted("Read the file first."), MARK) == "Read the file first."
    assert hint_of(hinted("x" * LONGEST_HINT), MARK) is not None
    for refused in (
        hinted("x" * (LONGEST_HINT + 1)),
        hinted("too short"),
        hinted("Read the file first.", end="Verdict: 0"),
        hinted("Read the file first.", end="Verdict: -1"),
        hinted("Read the file first.", end="Verdict: +1\nor so"),
        hinted("Read the file first.", mark="fedcba9876543210"),
        hinted("Read the file first.", end=hinted("And another hint.")),
        hinted(f"Read <hint {MARK}> the file first."),
        "Verdict: +1",
        f"<hint {MARK}>\nRead the file first.\nVerdict: +1",
        f"</hint {MARK}>\nRead the file first.\n<hint {MARK}>\nVerdict: +1",
    ):
        assert hint_of(refused, MARK) is None


@given(TEXTS)
def test_reading_a_hint_never_raises(text: str) -> None:
    found = hint_of(text, MARK)
    assert found is None or verdict_of(text) == 1


@given(st.lists(st.tuples(st.sampled_from([1, 0, -1, None]), st.text()), max_size=6))
def test_a_judgement_is_kept_whole_and_its_score_is_the_mean_of_valid_votes(
    votes: list[tuple[int | None, str]],
) -> None:
    judgement = Judgement(tuple(v for v, _ in votes), tuple(t for _, t in votes), "model", "9f", hints=("Look.",))  # type: ignore[arg-type]
    assert Judgement.from_about(json.loads(json.dumps(judgement.about()))) == judgement
    valid = [vote for vote, _ in votes if vote is not None]
    assert judgement.score == (sum(valid) / len(valid) if valid else None)
    values, about = rewards_of({4: judgement})
    assert values == ({4: judgement.score} if valid else {})
    assert about.keys() == values.keys()


def test_a_judgement_holds_votes_only() -> None:
    for votes in ((2,), (True,), (0.5,)):
        with pytest.raises(ValueError, match="not one of"):
            Judgement(votes, ("",), "x", "y")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="one text for each vote"):
        Judgement((1, 0), ("",), "x", "y")
    with pytest.raises(ValueError, match="not a judgement"):
        Judgement.from_about({"vote": 1})


def test_importing_rewards_imports_no_torch() -> None:
    names = ("judge", "model", "hints", "scoring", "rules", "prm", "quality")
    modules = ", ".join(f"clawgym.rewards.{name}" for name in names)
    code = f"import sys, {modules}; print(*{{m.partition('.')[0] for m in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not set(done.stdout.split()) & {"torch", "transformers", "aiohttp", "openai", "sqlalchemy", "orjson"}
