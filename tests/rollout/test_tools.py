"""run_episode with tasks that have tools of their own: outcomes, faults and leaks."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from clawgym.agents import NoopAgent, OracleAgent, ReplayAgent, ScriptAgent, SloppyAgent, ToolLoopAgent
from clawgym.agents.protocol import AgentContext, AgentReport
from clawgym.engines import Completion, ReplayEngine
from clawgym.errors import AgentError
from clawgym.evaluation.validate import validate_task
from clawgym.records import GradingMode, Outcome, TaskFile, ToolCall, ToolServer
from clawgym.records.atif import episode_to_atif, steps_from_atif
from clawgym.sandbox import Backend

from ..rollouts import episode_of
from ..tools.conftest import leaves_nothing, sandboxes
from ..tools.tasks_with_tools import LIMITS, RIGHT, call, noting, tiny
from .test_run_episode import FunctionAgent

pytest.importorskip("mcp")
TASK = noting()


def said(*calls: ToolCall, text: str = "") -> Completion:
    return Completion(text, calls)


async def test_validate_task_with_tools(backend: Backend) -> None:
    found = await validate_task(noting(tiny("two", "b_")), backend)
    assert [(f.rule, f.status) for f in found if f.status != "pass"] == []
    assert {"oracle", "noop", "wrong/wrong.json"} <= {f.rule for f in found}
    assert not sandboxes(backend)


async def test_model_uses_tools_of_task(backend: Backend) -> None:
    engine = ReplayEngine(
        [
            said(call("add", "a", a="1"), call("bash", "b", command="ls"), text="Hm."),
            said(call("note", "a", line="42"), call("echo", "b", text="x"), call("add", "c", a=1, b=2)),
            said(call("submit", "a", message="forty-two"), text="Done."),
        ]
    )
    episode = await episode_of(TASK, ToolLoopAgent(engine), backend)
    assert (episode.outcome, episode.final_message) == (Outcome.SOLVED, "forty-two")
    system, *work = [step for step in episode.steps if step.source != "user"]
    assert "tools you are given" in system.message
    assert "shell" not in system.message
    assert [[o.content.split(":")[0] for o in s.observations] for s in work] == [
        ["[error", "[error"],
        ["noted", "x", "3"],
        ["submitted"],
    ]
    assert [[o.call_id for o in s.observations] == [c.id for c in s.tool_calls] for s in work] == [True] * 3
    document = json.loads(json.dumps(episode_to_atif(episode)))
    for ours, theirs in zip(episode.steps, steps_from_atif(document), strict=True):
        assert theirs.tool_calls == ours.tool_calls
        assert [(o.content, o.call_id) for o in theirs.observations] == [
            (o.content, o.call_id) for o in ours.observations
        ]

    again = await episode_of(TASK, ReplayAgent({TASK.id: [[c for s in episode.steps for c in s.tool_calls]]}), backend)
    assert again.outcome is Outcome.FAILED  # the call of bash was not replayed, as the final message says
    assert again.final_message == "forty-two\nNot replayed: calls of bash."


async def test_repeated_invalid_calls_end_episode(backend: Backend) -> None:
    engine = ReplayEngine([said(call("fly", "x"))] * 3)
    episode = await episode_of(TASK, ToolLoopAgent(engine), backend)
    assert (episode.outcome, episode.cause) == (Outcome.FAILED, "malformed")


async def test_agents_refuse_unsuitable_tasks(backend: Backend) -> None:
    with pytest.raises(AgentError, match="use protocol 'tools'"):
        await episode_of(TASK, ToolLoopAgent(ReplayEngine([]), protocol="text"), backend)
    with pytest.raises(AgentError, match=r"solve\.json"):
        await episode_of(dataclasses.replace(TASK, solution=()), OracleAgent(), backend)
    with pytest.raises(AgentError, match="no JSON list of calls"):
        await episode_of(TASK, ScriptAgent(b"echo 42 > notes.txt"), backend)
    assert not sandboxes(backend)


async def test_agents_without_model(backend: Backend) -> None:
    noop = await episode_of(TASK, NoopAgent(), backend)
    assert noop.outcome is Outcome.FAILED
    outcomes = {(await episode_of(TASK, SloppyAgent(), backend, seed=seed)).outcome for seed in range(6)}
    assert outcomes == {Outcome.SOLVED, Outcome.FAILED}
    stops = [*RIGHT, {"name": "note", "arguments": {"line": "after the end"}}]
    script = await episode_of(TASK, ScriptAgent(json.dumps(stops).encode()), backend)
    assert script.outcome is Outcome.SOLVED
    assert len(script.steps) == 3


async def test_broken_files_are_graded_as_they_are(backend: Backend) -> None:
    calls = [{"name": "note", "arguments": {"line": "42"}}, {"name": "do", "arguments": {"what": "die"}}, RIGHT[-1]]
    episode = await episode_of(TASK, ScriptAgent(json.dumps(calls).encode()), backend)
    assert (episode.outcome, episode.cause) == (Outcome.FAILED, None)
    assert episode.result is not None
    assert episode.result.checks == {"noted": 1.0, "rest": 0.0, "said": 1.0}


async def test_dead_tool_sandbox_has_cause(backend: Backend) -> None:
    made = noting(tiny("two", "b_"), limits=dataclasses.replace(LIMITS, memory_mb=64, command_seconds=20))
    eat = [{"name": "b_do", "arguments": {"what": "eat memory"}}, {"name": "b_echo", "arguments": {"text": "x"}}]
    episode = await episode_of(made, ScriptAgent(json.dumps(eat).encode()), backend)
    assert episode.outcome is Outcome.FAILED
    assert not sandboxes(backend)


async def test_server_that_cannot_start_is_infra_and_named(backend: Backend) -> None:
    made = noting(tools=(tiny(), ToolServer("x", ("sh", "-c", "echo no licence >&2"))))
    episode = await episode_of(made, OracleAgent(), backend)
    assert (episode.outcome, episode.result) == (Outcome.INFRA, None)
    assert "tool server 'x'" in episode.error
    assert "no licence" in episode.error
    clash = await episode_of(noting(tiny("two")), OracleAgent(), backend)
    assert clash.outcome is Outcome.INFRA
    assert "called like a tool of 'one'" in clash.error
    assert not sandboxes(backend)


async def test_cancellation_at_any_moment_leaks_nothing(backend: Backend) -> None:
    made = noting(tiny("two", "b_"))
    slow = [{"name": "sleep", "arguments": {"seconds": 1}}, *RIGHT]
    agent = ScriptAgent(json.dumps(slow).encode())
    await leaves_nothing(backend, lambda: episode_of(made, agent, backend), 0.05, 0.15, 0.3, 0.6, 1.2, 1.6)


async def test_time_budget_ends_during_call(backend: Backend) -> None:
    made = noting(limits=dataclasses.replace(LIMITS, agent_seconds=1, command_seconds=30))

    async def late(context: AgentContext) -> AgentReport:
        await context.tools.call_all([call("note", "1", line="42"), call("sleep", "2", seconds=20)])
        return AgentReport()

    episode = await episode_of(made, FunctionAgent(late), backend)
    assert (episode.outcome, episode.cause) == (Outcome.TRUNCATED, "time")
    assert episode.result is not None
    assert episode.result.checks["noted"] == 1.0


@pytest.mark.parametrize("mode", [GradingMode.FORK, GradingMode.LIVE])
async def test_other_grading_modes(backend: Backend, mode: GradingMode) -> None:
    if mode is GradingMode.LIVE and not (await backend.probe()).features.get("network", True):
        pytest.skip("no network to share")
    made: Any = noting(verifier=dataclasses.replace(TASK.verifier, mode=mode))
    if mode is GradingMode.LIVE:
        check = b'import json\nprint(json.dumps({"x": 1.0}))'
        files = tuple(TaskFile(f.path, check) if f.path == "check.py" else f for f in TASK.verifier.files)
        made = noting(verifier=dataclasses.replace(TASK.verifier, mode=mode, files=files))
    episode = await episode_of(made, OracleAgent(), backend)
    assert (episode.outcome, episode.error) == (Outcome.SOLVED, "")
