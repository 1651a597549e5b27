"""run_episode: the outcome and fault of each kind of failure."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import gc
import gzip
import io
import tarfile
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from clawgym import live
from clawgym.agents import NoopAgent, OracleAgent, ScriptAgent
from clawgym.agents.protocol import AgentContext, AgentReport
from clawgym.errors import BudgetExceeded, EngineError, InfraError, SandboxError, TaskError, UnsupportedTask
from clawgym.records import Fault, GradingMode, Limits, Outcome, Submission, TaskFile, VerifierSpec
from clawgym.registry import graders
from clawgym.sandbox import Backend

from ..rollouts import episode_of
from ..verifiers.tasks_for_tests import task, with_mode

SOLVE = b"mkdir -p output; echo 6 > output/sum.txt"


class FunctionAgent:
    """An agent whose run() is a given coroutine function."""

    name, version = "custom", "1"

    def __init__(self, run: Any) -> None:
        self._run = run

    async def run(self, context: AgentContext) -> AgentReport:
        return await self._run(context) or AgentReport()

    def identity(self) -> dict[str, Any]:
        return {}

    async def aclose(self) -> None: ...


def sandboxes(backend: Backend) -> list[str]:
    return list(backend.sandboxes)  # type: ignore[attr-defined]


async def test_solved_and_failed_episode_records(backend: Backend) -> None:
    made = task(solution=(TaskFile("solve.sh", SOLVE),))
    solved = await episode_of(made, OracleAgent(), backend, seed=7, sample=3, baseline=0.5)
    assert solved.outcome is Outcome.SOLVED
    assert solved.result is not None
    assert solved.result.corrected == 1.0
    assert (solved.seed, solved.sample, solved.key) == (7, 3, "sum#3")
    assert set(solved.seconds) == {"setup", "agent", "verify", "teardown"}
    assert solved.isolation["backend"] == "namespace"
    assert solved.workspace is not None
    with tarfile.open(fileobj=io.BytesIO(gzip.decompress(solved.workspace))) as tar:
        assert {"input/numbers.txt", "output/sum.txt"} <= set(tar.getnames())
    failed = await episode_of(made, NoopAgent(), backend, keep_workspace=False)
    assert (failed.outcome, failed.cause, failed.workspace) == (Outcome.FAILED, None, None)
    assert not sandboxes(backend)


async def test_running_attempt_is_shown_live(backend: Backend) -> None:
    shown: list[list[str]] = []

    async def look(context: AgentContext) -> None:
        gc.collect()
        shown.append([entry["task"] for entry in live.ThisProcess().all()])

    await episode_of(task(), FunctionAgent(look), backend)
    assert shown == [["sum"]]
    assert live.ThisProcess().all() == []


async def test_time_budget_truncates_and_is_graded(backend: Backend) -> None:
    made = task(limits=Limits(agent_seconds=1, verify_seconds=10))

    async def slow_agent(context: AgentContext) -> None:
        await context.sandbox.exec(["bash", "-c", "mkdir output; touch output/sum.txt"])
        await asyncio.sleep(60)

    episode = await episode_of(made, FunctionAgent(slow_agent), backend)
    assert (episode.outcome, episode.cause) == (Outcome.TRUNCATED, "time")
    assert episode.result is not None
    assert episode.result.official == 0.5


async def test_token_budget_truncates(backend: Backend) -> None:
    async def expensive_agent(context: AgentContext) -> None:
        raise BudgetExceeded("no tokens are left: raise the budget", cause="tokens")

    episode = await episode_of(task(), FunctionAgent(expensive_agent), backend)
    assert (episode.outcome, episode.cause) == (Outcome.TRUNCATED, "tokens")


async def test_engine_error_is_infra_without_score(backend: Backend) -> None:
    async def failing_agent(context: AgentContext) -> None:
        raise EngineError("503 for ten minutes: try later", retryable=True)

    episode = await episode_of(task(), FunctionAgent(failing_agent), backend)
    assert (episode.outcome, episode.result) == (Outcome.INFRA, None)
    assert "engine" in str(episode.cause)


async def test_agent_that_breaks_sandbox_fails(backend: Backend) -> None:
    small = task(limits=Limits(memory_mb=128, disk_mb=32, pids=32, verify_seconds=10, agent_seconds=30))

    async def memory_agent(context: AgentContext) -> None:
        for _ in range(3):
            await context.sandbox.exec(["python3", "-c", "x = []\nwhile 1: x.append(bytearray(2**24))"])

    episode = await episode_of(small, FunctionAgent(memory_agent), backend)
    assert episode.outcome is Outcome.FAILED
    assert episode.result is not None
    assert episode.result.strict == 0.0


async def test_dead_sandbox_in_live_grading_fails(backend: Backend) -> None:
    """Not ``infra``: an agent must not avoid a low score by breaking its sandbox."""

    async def killing_agent(context: AgentContext) -> None:
        await backend.supervised.ask("kill", context.sandbox.id)  # type: ignore[attr-defined]

    episode = await episode_of(with_mode(task(), GradingMode.LIVE), FunctionAgent(killing_agent), backend)
    assert (episode.outcome, episode.cause) == (Outcome.FAILED, "died")
    assert episode.result is not None
    assert episode.result.official == 0.0


async def test_too_large_workspace_fails(backend: Backend) -> None:
    script = b"for i in 1 2 3; do truncate -s 255M big$i; done"
    episode = await episode_of(task(), ScriptAgent(script, "sparse"), backend)
    assert (episode.outcome, episode.cause) == (Outcome.FAILED, "workspace-size")
    assert episode.result is not None
    assert episode.result.official == 0.0


@pytest.mark.parametrize(
    "script", [b'cd /; mv "$OLDPWD" /tmp/gone; echo x > "$OLDPWD"', b'cd /; mv "$OLDPWD" /tmp/gone']
)
@pytest.mark.parametrize("mode", list(GradingMode))
async def test_workspace_that_is_no_folder_is_graded_as_empty(
    backend: Backend, script: bytes, mode: GradingMode
) -> None:
    episode = await episode_of(with_mode(task(), mode), ScriptAgent(script, "moves"), backend)
    assert (episode.outcome, episode.cause) == (Outcome.FAILED, None)
    assert episode.result is not None
    assert episode.result.official == 0.0
    assert not sandboxes(backend)


class FailingSnapshots:
    """A real backend or sandbox whose snapshots fail because of the files in it."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def create(self, spec: Any) -> Any:
        return FailingSnapshots(await self._inner.create(spec))

    async def snapshot(self) -> Any:
        raise SandboxError("no such snapshot")


async def test_unreadable_sandbox_files_fail(backend: Backend) -> None:
    made = with_mode(task(), GradingMode.FORK)
    episode = await episode_of(made, ScriptAgent(SOLVE), FailingSnapshots(backend))  # type: ignore[arg-type]
    assert (episode.outcome, episode.cause) == (Outcome.FAILED, "workspace")
    assert episode.result is not None
    assert (episode.result.official, episode.result.cause) == (0.0, "workspace")
    assert not sandboxes(backend)


async def test_unsupported_task_is_refused(backend: Backend) -> None:
    with pytest.raises(UnsupportedTask, match="needs the network"):
        await episode_of(dataclasses.replace(task(), unsupported="it needs the network"), NoopAgent(), backend)


async def test_broken_verifier_is_infra(backend: Backend) -> None:
    episode = await episode_of(task(b"raise SystemExit(9)"), NoopAgent(), backend)
    assert (episode.outcome, episode.cause, episode.fault) == (Outcome.INFRA, "control-crash", Fault.TASK)


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (EngineError("refused: start it"), Fault.ENDPOINT),
        (InfraError("no memory: free some"), Fault.HOST),
        (TaskError("gone: put it back"), Fault.TASK),
    ],
)
async def test_fault_of_infrastructure_error_by_type(backend: Backend, error: Exception, fault: Fault) -> None:
    async def fails(context: AgentContext) -> None:
        raise error

    episode = await episode_of(task(), FunctionAgent(fails), backend)
    assert (episode.outcome, episode.fault) == (Outcome.INFRA, fault)


async def test_other_outcomes_have_no_fault(backend: Backend) -> None:
    assert (await episode_of(task(), NoopAgent(), backend)).fault is None


async def test_exception_in_agent_code_fails_with_traceback(backend: Backend) -> None:
    async def buggy_agent(context: AgentContext) -> None:
        raise ZeroDivisionError("a bug of the agent")

    episode = await episode_of(task(), FunctionAgent(buggy_agent), backend)
    assert (episode.outcome, episode.cause) == (Outcome.FAILED, "agent-exception")
    assert "in buggy" in episode.error
    assert episode.error.endswith("ZeroDivisionError: a bug of the agent\n")
    assert not sandboxes(backend)


async def test_full_host_error_is_raised(backend: Backend) -> None:
    async def failing_agent(context: AgentContext) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with pytest.raises(OSError, match="Too many open files"):
        await episode_of(task(), FunctionAgent(failing_agent), backend)
    assert not sandboxes(backend)


class WithoutSandbox(FunctionAgent):
    """A resident agent whose sandbox cannot be created."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(None)
        self.settled: list[Any] = []
        self._error = error

    async def open_sandbox(self, backend: Backend, spec: Any) -> Any:
        raise self._error

    async def close_sandbox(self, sandbox: Any) -> None: ...

    def session_of(self, sandbox: Any) -> str | None:
        return None

    async def close_session(self, sandbox: Any, end: Any) -> Any:
        self.settled.append(sandbox)


async def test_resident_agent_without_sandbox_gets_no_close(backend: Backend) -> None:
    fails, breaks = WithoutSandbox(InfraError("no memory")), WithoutSandbox(ZeroDivisionError())
    episode = await episode_of(task(), fails, backend)
    assert (episode.outcome, episode.error) == (Outcome.INFRA, "setup: no memory")
    with pytest.raises(ZeroDivisionError):
        await episode_of(task(), breaks, backend)
    assert fails.settled == breaks.settled == []


async def test_episode_has_timestamps(backend: Backend) -> None:
    before = datetime.now(UTC) - timedelta(milliseconds=1)
    episode = await episode_of(task(), NoopAgent(), backend)
    assert before <= datetime.fromisoformat(episode.steps[0].timestamp) <= datetime.now(UTC)
    assert episode.sample == 0


async def test_cancellation_closes_sandbox(backend: Backend) -> None:
    async def endless_agent(context: AgentContext) -> None:
        await asyncio.sleep(60)

    running = asyncio.create_task(episode_of(task(), FunctionAgent(endless_agent), backend))
    await asyncio.sleep(0.5)
    assert sandboxes(backend)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not sandboxes(backend)


async def test_grader_engine_error_has_fault_endpoint(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone:
        name, version, model = "gone", "1", "judge-1"

        async def grade(self, submission: Submission) -> dict[str, float]:
            raise EngineError("connection refused: start the endpoint")

    monkeypatch.setitem(graders._here, "gone", Gone)
    made = task(verifier=VerifierSpec("grader", grader="gone"))
    episode = await episode_of(made, NoopAgent(), backend)
    assert (episode.outcome, episode.fault, episode.result) == (Outcome.INFRA, Fault.ENDPOINT, None)
    assert "start the endpoint" in episode.error
