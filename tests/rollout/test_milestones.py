"""The progress of an episode after each turn, by its verifier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from clawgym.agents.tool_loop import ToolLoopAgent
from clawgym.engines.protocol import Completion
from clawgym.engines.replay import ReplayEngine
from clawgym.errors import AgentError, InfraError, TreeTooLarge
from clawgym.records import GradingMode, Outcome, ToolCall
from clawgym.rollout import Attempt, Ended, EpisodeRequest, milestones, run_episode
from clawgym.sandbox import Backend
from clawgym.sandbox.namespace.backend import NamespaceSandbox
from clawgym.sandbox.protocol import Sandbox, Snapshot

from ..verifiers.tasks_for_tests import CHECK, task, with_mode

COMMANDS = ("ls", "mkdir output; echo 5 > output/sum.txt", "ls /tmp", "echo 6 > output/sum.txt", "rm -r output")


async def played(
    commands: Sequence[str], backend: Backend, mode: GradingMode = GradingMode.CLEAN, check: bytes = CHECK
) -> Ended:
    answers = [Completion("", (ToolCall(f"c{n}", "bash", {"command": c}),)) for n, c in enumerate(commands)]
    answers.append(Completion("", (ToolCall("end", "submit", {"message": ""}),)))
    request = EpisodeRequest(task=with_mode(task(check), mode), seed=0, milestones=True)
    return await run_episode(request, ToolLoopAgent(ReplayEngine(answers)), backend)


@pytest.mark.parametrize("mode", [GradingMode.CLEAN, GradingMode.FORK])
async def test_progress_is_measured_after_each_turn(backend: Backend, mode: GradingMode) -> None:
    ended = await played(COMMANDS, backend, mode)
    assert ended.progress == (0.0, 0.0, 0.5, 0.5, 1.0, 0.0, 0.0)
    assert ended.episode.outcome is Outcome.FAILED
    assert not list(backend.sandboxes)  # type: ignore[attr-defined]


async def test_last_progress_agrees_with_the_grade(backend: Backend) -> None:
    ended = await played(COMMANDS[:4], backend)
    assert ended.episode.result is not None
    assert ended.progress[-1] == ended.episode.result.strict == 1.0


async def test_files_that_cannot_be_copied_have_no_progress(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent can make its files too large; the episode goes on."""

    async def too_large(self: Sandbox) -> Snapshot:
        raise TreeTooLarge("the layer has too many files: leave fewer", bound="entries")

    monkeypatch.setattr(NamespaceSandbox, "snapshot", too_large)
    ended = await played(COMMANDS[:2], backend, GradingMode.FORK)
    assert set(ended.progress[:-1]) == {None}
    assert ended.episode.outcome is Outcome.FAILED


@pytest.mark.parametrize("mode", [GradingMode.CLEAN, GradingMode.FORK])
async def test_verifier_with_two_results_on_one_workspace_gives_no_progress(
    backend: Backend, mode: GradingMode
) -> None:
    lucky = (
        b"import json, random\nprint(json.dumps({f'c{n}': float(n == 0) for n in range(random.randrange(1, 3000))}))"
    )
    ended = await played(COMMANDS[:1], backend, mode, lucky)
    assert (ended.unstable, ended.progress) == (True, ())
    assert ended.episode.outcome is Outcome.FAILED
    assert not (await played(COMMANDS[:1], backend, mode)).unstable


async def test_failed_measurement_does_not_make_a_verifier_unstable(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0

    async def fails_once(*_: Any, **__: Any) -> float:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise InfraError("no memory")
        return 0.5

    monkeypatch.setattr(milestones, "progress", fails_once)
    monkeypatch.setattr(milestones, "is_pure", lambda _: False)
    ended = await played(COMMANDS[:1], backend)
    assert not ended.unstable
    assert set(ended.progress[:-1]) == {None}


async def test_agent_that_runs_its_own_tools_has_no_milestones(backend: Backend) -> None:
    request = EpisodeRequest(task=task(), seed=0, milestones=True)
    resident: Any = object()
    with pytest.raises(AgentError, match="use tool-loop, or leave milestones out"):
        Attempt(request, backend, "openclaw", resident=resident)


async def test_live_tasks_and_unasked_episodes_have_no_progress(backend: Backend) -> None:
    assert (await played((), backend, GradingMode.LIVE)).progress == ()
    plain = EpisodeRequest(task=task(), seed=0)
    ended = await run_episode(plain, ToolLoopAgent(ReplayEngine([Completion("done")])), backend)
    assert ended.progress == ()


async def test_agent_sees_nothing_of_the_measurements(backend: Backend) -> None:
    """Neither files nor processes; and its own stay as they are."""
    processes = 'seen=$(ps -e -o args=); sort <<< "$seen"'  # ps beside sort may show it before it is executed
    look = f"{processes}; find / -xdev -newer /etc/hostname -name '*check*' 2>/dev/null; jobs"
    start = "sleep 100 & until grep -q sleep /proc/$!/comm; do :; done; mkdir output; exec 9> output/sum.txt"
    shown = []
    for asked in (False, True):
        answers = [Completion("", (ToolCall(f"c{n}", "bash", {"command": c}),)) for n, c in enumerate((start, look))]
        request = EpisodeRequest(task=task(), seed=0, milestones=asked)
        agent = ToolLoopAgent(ReplayEngine([*answers, Completion("done")]))
        ended = await run_episode(request, agent, backend)
        shown.append([o.content for step in ended.episode.steps for o in step.observations])
    assert shown[0] == shown[1]
    assert "sleep 100" in shown[1][1]
