"""GEPA on our tasks: an agent that does what its prompt says, and a scripted reflection model.

Needs the package ``gepa``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gepa", reason="needs GEPA: clawgym interop check gepa")

import gepa

import clawgym
from clawgym.agents.protocol import AgentContext, AgentReport
from clawgym.errors import ClawGymError, InfraError
from clawgym.interop.gepa import SYSTEM_PROMPT, ClawGymAdapter
from clawgym.records import Step, ToolCall

TASKS = list(clawgym.load(Path(__file__).with_name("write_words.py")).tasks)
GOOD = "Write exactly the word that is asked for."
SKILL = "skills/words/SKILL.md"


class Follows:
    """Writes the word if its prompt or a skill file says so, and another word otherwise."""

    name, version = "follows", "1"

    def __init__(self, prompt: str | None) -> None:
        self._prompt = prompt or ""

    async def run(self, context: AgentContext) -> AgentReport:
        words = context.task.instruction.split()
        (read,) = await context.tools.call_all([ToolCall("1", "bash", {"command": f"cat {SKILL} 2>/dev/null; true"})])
        word = words[3] if "exactly" in self._prompt + read.content else "nothing " + "x" * 9000
        call = ToolCall("2", "bash", {"command": f"echo {word} > {words[-1].rstrip('.')}"})
        (seen,) = await context.tools.call_all([call])
        context.record(Step("agent", "done", "2026-01-01T00:00:00Z", tool_calls=(call,), observations=(seen,)))
        return AgentReport(final_message="done")

    def identity(self) -> dict[str, Any]:
        return {}

    async def aclose(self) -> None: ...


class Scripted:
    """A reflection model: its replies are given, and it notes what it was shown."""

    def __init__(self, *replies: str) -> None:
        self.replies, self.shown = list(replies), list[str]()

    def __call__(self, prompt: Any) -> str:
        self.shown.append(prompt if isinstance(prompt, str) else json.dumps(prompt))
        return f"```\n{self.replies.pop(0)}\n```"


@pytest.fixture(scope="module")
def adapter() -> Iterator[ClawGymAdapter]:
    made = ClawGymAdapter(Follows)
    yield made
    made.close()


def test_optimises_a_prompt(adapter: ClawGymAdapter, record_property: Callable[..., None]) -> None:
    reflection = Scripted("Write something.", GOOD)
    before = adapter.episodes
    found = gepa.optimize(
        {SYSTEM_PROMPT: "Work."},
        TASKS,
        TASKS,
        adapter=adapter,
        reflection_lm=reflection,
        reflection_minibatch_size=2,
        max_metric_calls=14,
        seed=0,
    )
    assert found.best_candidate == {SYSTEM_PROMPT: GOOD}
    assert found.val_aggregate_scores[0] == 0.0
    assert max(found.val_aggregate_scores) == 1.0
    assert "Failed checks: word" in reflection.shown[0]
    assert "Write the word camel to the file cider.txt." in "".join(reflection.shown)
    count = adapter.episodes - before
    record_property(
        "held", f"`gepa.optimize` finds a prompt on our tasks in {count} episodes, with a scripted reflection model"
    )


def test_optimises_a_skill_file(adapter: ClawGymAdapter, record_property: Callable[..., None]) -> None:
    found = gepa.optimize(
        {SKILL: "Nothing yet."},
        TASKS,
        TASKS,
        adapter=adapter,
        reflection_lm=Scripted(GOOD, GOOD),
        reflection_minibatch_size=2,
        max_metric_calls=8,
    )
    assert found.best_candidate == {SKILL: GOOD}
    record_property("held", "a skill file is a text of the candidate: the sandbox has it before the agent starts")


def test_scores_are_those_of_the_verifier(adapter: ClawGymAdapter, record_property: Callable[..., None]) -> None:
    failed = adapter.evaluate(TASKS, {SYSTEM_PROMPT: "Work."}, capture_traces=True)
    solved = adapter.evaluate(TASKS, {SYSTEM_PROMPT: GOOD})
    assert (failed.scores, solved.scores) == ([0.0, 0.0], [1.0, 1.0])
    assert solved.trajectories is None
    assert [episode.result.official for episode in failed.trajectories] == failed.scores
    shown = adapter.make_reflective_dataset({SYSTEM_PROMPT: "Work."}, failed, [SYSTEM_PROMPT])
    assert list(shown) == [SYSTEM_PROMPT]
    for task, record in zip(TASKS, shown[SYSTEM_PROMPT], strict=True):
        assert record["Inputs"] == {"task": task.instruction}
        assert "Failed checks: word." in record["Feedback"]
        assert "[...]" in record["Generated Outputs"]
        assert len(json.dumps(record)) < 10_000
    record_property("held", "scores are those of the verifiers; the reflective data set has the failed checks, bounded")


def test_unknown_text(adapter: ClawGymAdapter) -> None:
    with pytest.raises(ClawGymError, match="'tools': name it system_prompt"):
        adapter.evaluate(TASKS, {"tools": "x"})


def test_infrastructure_errors_are_no_scores(
    adapter: ClawGymAdapter, monkeypatch: pytest.MonkeyPatch, record_property: Callable[..., None]
) -> None:
    class Broken(Follows):
        async def run(self, context: AgentContext) -> AgentReport:
            raise InfraError("no memory: free some")

    monkeypatch.setattr(adapter, "_make_agent", Broken)
    with pytest.raises(InfraError, match="clawgym doctor"):
        adapter.evaluate(TASKS[:1], {SYSTEM_PROMPT: "Work."})
    record_property("held", "an infrastructure error is raised, never scored")
