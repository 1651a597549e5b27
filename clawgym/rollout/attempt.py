"""One attempt at one task: set-up, agent, verify and teardown. Shared by ``run_episode`` and the environments.

Each phase has a time budget from the task's limits and a hard deadline. Anything that the agent can cause ends the
episode as ``failed`` with a cause. The outcome ``infra`` is reserved for failures of the host, the endpoint, or the
task itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Literal

from clawgym import live
from clawgym.agents.protocol import ResidentAgent
from clawgym.errors import (
    AgentError,
    BudgetExceeded,
    ClawGymError,
    EngineError,
    GradingError,
    InfraError,
    SandboxDied,
    SandboxError,
    SandboxUnavailable,
    SnapshotRefused,
    TaskError,
    TreeTooLarge,
    UnsupportedTask,
    traceback_of,
)
from clawgym.offload import offloaded
from clawgym.records import (
    DialogueUser,
    Episode,
    Fault,
    GradingMode,
    Outcome,
    Phase,
    Step,
    Task,
    Turn,
    Usage,
    VerifierResult,
    executed_step,
)
from clawgym.registry import agents, users
from clawgym.rollout.milestones import Milestones, MilestonesState, can_measure
from clawgym.rollout.request import Ended, EpisodeRequest, reward_of
from clawgym.rollout.shown import WatchedAttempt
from clawgym.sandbox.protocol import Archive, Backend, Sandbox, Snapshot
from clawgym.tools import Tools, open_tools, program_spec, sandbox_spec
from clawgym.verifiers.diff import DIFF_FILE, submission_diff
from clawgym.verifiers.grading import Subject, empty_archive, grade
from clawgym.verifiers.scores import plain_mean

__all__ = ["Attempt", "SavedAttempt", "Stop", "fault_of", "transcript_payload"]

_MAX_WORKSPACE = 256 * 2**20
_TRANSFER_SECONDS = 120.0
"""Time for the transfer of the workspace to the grading sandboxes, in addition to the grading itself."""
_CHUNK = 1 << 20
"""Bytes that are compressed at a time: other tasks of the event loop run between two chunks."""
_HOST_ERRORS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC})
"""Errors of a host without free descriptors, memory or disk space. They are never the agent's failure."""


def utc_now() -> str:
    """Return the current time in ISO 8601 with milliseconds, UTC."""
    seconds, milliseconds = divmod(time.time_ns() // 1_000_000, 1000)
    return f"{_second(seconds)}.{milliseconds:03}+00:00"


@lru_cache(maxsize=2)
def _second(seconds: int) -> str:  # cached: most steps of a batch fall into the same second
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")


def fault_of(error: BaseException) -> Fault:
    """Return where an infrastructure error came from (host, endpoint or task), by its type."""
    if isinstance(error, EngineError):
        return Fault.ENDPOINT
    # A GradingError means that the verifier also fails on the unchanged workspace.
    return Fault.TASK if isinstance(error, TaskError | GradingError) else Fault.HOST


@dataclass(frozen=True, slots=True)
class Stop:
    """Why the work of an attempt ended."""

    kind: Literal["submitted", "budget", "error", "infra"]
    """``submitted``: the agent finished. ``budget``: a budget of the task was used up. ``error``: the agent failed or
    broke its sandbox; the score is 0. ``infra``: an infrastructure error; there is no score."""
    cause: str | None = None
    """A short word: which budget, or what failed."""
    error: str = ""
    """The whole message of an infrastructure error, or the traceback of the agent's exception."""
    fault: Fault | None = None
    """Where an infrastructure error came from."""


@dataclass(frozen=True)
class SavedAttempt:
    """The state of an attempt (:meth:`Attempt.save`), from which any number of attempts can continue."""

    task: Task
    """The task, with all files in memory."""
    snapshot: Snapshot | None
    """The files of the agent's sandbox, if they were asked for."""
    steps: tuple[Step, ...]
    turns: tuple[Turn, ...]
    usage: Usage
    final_message: str
    seconds: Mapping[str, float]
    milestones: MilestonesState | None


class Attempt:
    """One attempt: call :meth:`open`, :meth:`work`, then :meth:`finish` or :meth:`abandon`. Used once.

    Args:
        request: the task, the seed, and how the episode is rewarded and recorded.
        backend: makes the sandboxes.
        agent: the agent's name.
        resident: the agent, if it creates its own sandbox.

    Raises:
        UnsupportedTask: the task cannot run here.
        AgentError: the agent runs its tools itself, and the task brings others that it cannot call, or the request asks
            for milestones.
    """

    def __init__(
        self,
        request: EpisodeRequest,
        backend: Backend,
        agent: str,
        *,
        resident: ResidentAgent | None = None,
    ) -> None:
        task = request.task
        if task.unsupported:
            raise UnsupportedTask(f"task {task.id} cannot run here ({task.unsupported}): choose another task")
        for layer in task.layers.values():
            if not layer.folder.is_dir():
                raise UnsupportedTask(
                    f"task {task.id} cannot run here: its layer {layer.name} is missing from {layer.folder}: prepare "
                    "it again (`clawgym tasks prepare`), and load the task again"
                )
        self._apart = task.brings_tools and resident is not None
        if self._apart and (task.desktop is not None or not getattr(resident, "takes_tools", False)):
            able = ", ".join(name for name, thing in agents.things() if getattr(thing, "takes_tools", False))
            program = f", or a program that calls them by MCP ({able})" if task.desktop is None else ""
            raise AgentError(
                f"agent {agent!r} has tools of its own, and task {task.id} brings others: use tool-loop (or oracle, "
                f"replay, script, noop){program}"
            )
        if request.milestones and resident is not None:
            raise AgentError(
                f"agent {agent!r} runs its tools itself, so the progress after its turns cannot be measured: use "
                "tool-loop, or leave milestones out"
            )
        self.request = request
        self.task = task
        """The task; from :meth:`open` on, a copy with all files in memory."""
        self.backend = backend
        self.user: DialogueUser | None = None
        """Who answers in the task's dialogue; made anew for each attempt."""
        if task.dialogue is not None and task.dialogue.user:
            self.user = users.make(task.dialogue.user, **task.dialogue.options)
        self.agent = agent
        self.resident = resident
        self.steps: list[Step] = [Step("user", task.instruction, utc_now())]
        self.turns: list[Turn] = []
        self.usage = Usage()
        self.final_message = ""
        self.seconds: dict[str, float] = {}
        self.stop: Stop | None = None
        """Why the work ended; ``None`` before that."""
        self._sandbox: Sandbox | None = None
        self._program: Sandbox | None = None
        self._tools: Tools | None = None
        self._milestones: Milestones | None = None
        self._watched: WatchedAttempt | None = None
        self._live = 0

    @property
    def opened(self) -> Sandbox | None:
        """The agent's sandbox, or ``None`` if it was never created.

        It is the task's, which is graded, unless a program calls tools that the task brings. Such a program has a
        shell, and therefore a sandbox of its own, with nothing of the task's.
        """
        return self._program if self._apart else self._sandbox

    @property
    def sandbox(self) -> Sandbox:
        """The task's sandbox. Raises SandboxError before :meth:`open`."""
        if self._sandbox is None:
            raise SandboxError("this attempt has no sandbox: call open() first")
        return self._sandbox

    @property
    def tools(self) -> Tools:
        """The tools of the task. Raises SandboxError before :meth:`open`."""
        if self._tools is None:
            raise SandboxError("this attempt has no tools: call open() first")
        return self._tools

    @property
    def _verify_seconds(self) -> float:
        """Two gradings, a control run on the unchanged workspace, and two measurements for milestones."""
        runs = 3 if self._milestones is None else 5
        return runs * self.task.limits.verify_seconds + _TRANSFER_SECONDS

    @contextlib.asynccontextmanager
    async def phase(self, phase: Phase) -> AsyncIterator[None]:
        """Measure a phase and enforce its time budget. Raises TimeoutError when it is used up."""
        budget = {
            Phase.SETUP: self.task.limits.setup_seconds,
            Phase.AGENT: self.task.limits.agent_seconds,
            Phase.VERIFY: self._verify_seconds,
            Phase.TEARDOWN: self.task.limits.teardown_seconds,
        }[phase]
        started = time.monotonic()
        try:
            async with asyncio.timeout(budget):
                yield
        finally:
            self.seconds[phase.value] = self.seconds.get(phase.value, 0.0) + time.monotonic() - started

    async def save(self, *, files: bool) -> SavedAttempt:
        """Save the state of this attempt, which continues. ``files``: with a snapshot of the agent's sandbox.

        The caller drops the snapshot. Not saved: running programs, and what ``tools`` hold.

        Raises:
            SandboxError: the files cannot be copied.
        """
        if self.resident is not None:
            raise SnapshotRefused(f"agent {self.agent!r} is a running program, which cannot be saved: use tool-loop")
        return SavedAttempt(
            task=self.task,
            snapshot=await self.sandbox.snapshot() if files else None,
            steps=tuple(self.steps),
            turns=tuple(self.turns),
            usage=self.usage,
            final_message=self.final_message,
            seconds=dict(self.seconds),
            milestones=None if self._milestones is None else await self._milestones.save(),
        )

    async def open(self, saved: SavedAttempt | None = None) -> None:
        """Create the sandbox, copy the inputs into it, start the tools.

        With ``saved``, continue from there: in a fork of its snapshot, or without one in a sandbox as at the start.

        Raises:
            InfraError: set-up failed, or its time budget is used up.
            TaskError: files of the task are missing or do not match its hash, or its tools cannot be started.
            SandboxUnavailable: the backend cannot work on this host.
        """
        task = self.task
        try:
            async with self.phase(Phase.SETUP):
                # Nothing is read from the task's folder after this, so the hashed files are the graded ones.
                task = self.task = saved.task if saved else await asyncio.to_thread(task.frozen)
                spec = sandbox_spec(task)
                await self.backend.probe()
                if saved is not None and saved.snapshot is not None:
                    self._sandbox = await self.backend.fork(saved.snapshot)
                elif self.resident is None or self._apart:
                    self._sandbox = await self.backend.create(spec)
            if self.resident is not None:  # outside the budget: programs wait for each other to start
                started = time.monotonic()
                if self._apart:
                    self._program = await self.resident.open_sandbox(self.backend, program_spec(task), tools=True)
                else:
                    self._sandbox = await self.resident.open_sandbox(self.backend, spec)
                self.seconds["boot"] = time.monotonic() - started
            async with self.phase(Phase.SETUP):
                if task.inputs and (saved is None or saved.snapshot is None):
                    await self.sandbox.put(task.inputs, task.workspace)
                self._tools = await open_tools(task, self.sandbox, self.backend)
                if self.request.milestones and can_measure(task):
                    self._milestones = Milestones(task, self.sandbox, self.backend, self.request.grades)
                    if saved is not None and saved.milestones is not None:
                        self._milestones.load(saved.milestones)
                    else:
                        await self._milestones.take()
                    self._tools = self._milestones.measured(self._tools)
            if saved is not None:
                self.steps[:] = saved.steps
                self.turns[:] = saved.turns
                self.usage, self.final_message, self.seconds = saved.usage, saved.final_message, dict(saved.seconds)
            self._watched = WatchedAttempt(task, self.agent, self.steps, self._tools)  # live holds it weakly
            self._live = live.add(self._watched)
        except TimeoutError:
            await self._close()
            raise InfraError(
                f"task {task.id}: set-up took over {task.limits.setup_seconds} s: lower --concurrency"
            ) from None
        except SandboxUnavailable:
            await self._close()
            raise
        except SandboxError as error:
            await self._close()
            raise InfraError(f"task {task.id}: set-up failed ({error}): check the task's limits") from error
        except BaseException:
            await self._close()
            raise

    async def work(self, agent: Callable[[], Awaitable[Stop]]) -> None:
        """Run ``agent`` within its budget and set :attr:`stop`.

        An exception of the agent's own code fails the episode, with the traceback in :attr:`Episode.error`.
        Cancellation, :class:`~clawgym.errors.ClawGymError` and errors of a host that is out of memory, disk space or
        descriptors pass through.
        """
        try:
            async with self.phase(Phase.AGENT):
                self.stop = await agent()
        except TimeoutError:
            self.stop = Stop("budget", "time")
        except BudgetExceeded as error:
            self.stop = Stop("budget", error.cause)
        except SandboxDied as error:
            self.stop = Stop("error", error.cause)
        except ClawGymError:
            raise
        except Exception as error:
            if isinstance(error, MemoryError) or getattr(error, "errno", None) in _HOST_ERRORS:
                raise
            self.stop = Stop("error", "agent-exception", traceback_of(error))

    async def finish(self) -> Ended:
        """Stop the sandbox, grade the workspace and close everything.

        An attempt whose :attr:`stop` is not set counts as submitted. Nothing that the agent did raises here.
        """
        if self.stop is None:
            self.stop = Stop("submitted")
        result: VerifierResult | None = None
        workspace: Archive | None = None
        snapshot: Snapshot | None = None
        unstable = False
        try:
            async with self.phase(Phase.VERIFY):
                if self.stop.kind != "error" and self.task.desktop is not None and self.task.desktop.closing:
                    await self._finish_desktop()
                await self._end_tools()  # what a server keeps is at rest before it is graded
                mode = self.task.verifier.mode
                broken = self.stop.kind == "error"
                if mode is not GradingMode.LIVE or broken:
                    await self.sandbox.stop()  # InfraError if the sandbox died because its host process did
                else:
                    await self.sandbox.exec(["true"])  # SandboxDied if the agent broke the sandbox that is graded
                if broken:
                    result = self._zero(self.stop.cause or "error")
                workspace, cause = await self._take()
                if result is None and cause is None and mode is GradingMode.FORK:
                    try:
                        snapshot = await self.sandbox.snapshot()
                    except TreeTooLarge as error:
                        cause = f"layer-{error.bound}"
                if result is None and cause is not None:
                    self.stop, result = Stop("error", cause), self._zero(cause)
                if result is None:
                    subject = Subject(
                        workspace,
                        snapshot,
                        self.sandbox if mode is GradingMode.LIVE else None,
                        self.final_message,
                        transcript_payload(self.steps),
                    )
                    result = await grade(
                        self.task,
                        subject,
                        self.backend,
                        baseline=self.request.baseline,
                        grades=self.request.grades,
                    )
                    if self._milestones is not None:
                        unstable = await self._milestones.unstable(Subject(workspace, snapshot))
        except TimeoutError:
            self.fail_infra(
                "verify-deadline",
                f"task {self.task.id}: grading took over {self._verify_seconds:g} s: lower --concurrency, "
                "or raise limits.verify_seconds of the task",
                fault=Fault.HOST,
            )
        except GradingError as error:
            self.fail_infra(error.cause, str(error), fault=fault_of(error))
        except (EngineError, InfraError) as error:
            self.fail_by(error)
        except SandboxUnavailable:
            raise
        except SandboxDied as error:  # between the last command and stop()
            self.stop, result = Stop("error", error.cause), self._zero(error.cause)
        except SandboxError:  # its files cannot be read
            self.stop, result = Stop("error", "workspace"), self._zero("workspace")
        finally:
            if snapshot is not None:
                with contextlib.suppress(InfraError):  # closing the backend removes it
                    await self.backend.drop(snapshot)
            await self._close()
        progress = () if self._milestones is None or unstable else await self._milestones.values()
        if progress and result is not None:  # the grade also sees the final message and the state of tool servers
            progress = (*progress[:-1], plain_mean(result.checks))
        if self.request.keep_workspace and workspace is not None:
            ended = self._ended(result, await _compressed(workspace.tar), workspace.dropped)
        else:
            ended = self._ended(result)
        ended = replace(ended, progress=progress, unstable=unstable)
        if workspace is None or result is None or not self.task.verifier.protected:
            return ended
        submission = await offloaded(submission_diff, self.task, workspace.tar)
        files = {**ended.episode.files, DIFF_FILE: submission}
        return replace(ended, episode=replace(ended.episode, files=files))

    def fail_infra(self, cause: str, error: str = "", *, fault: Fault) -> None:
        """Record an infrastructure error: the episode ends as ``infra``.

        ``error`` is the whole message, if ``cause`` is only a short word.
        """
        self.stop = Stop("infra", cause, error or cause, fault)

    def fail_by(self, error: EngineError | InfraError | SandboxDied | TaskError, host: str = "host") -> None:
        """Record ``error`` as an infrastructure error. Its cause begins with ``engine``, ``task`` or else ``host``."""
        fault = fault_of(error)
        word = {Fault.ENDPOINT: "engine", Fault.TASK: "task", Fault.HOST: host}[fault]
        self.fail_infra(f"{word}: {error}", fault=fault)

    async def abandon(self) -> Ended:
        """Close without grading; the episode ends as ``infra``."""
        if self._milestones is not None:
            await self._milestones.aclose()
        await self._close()
        if self.stop is None or self.stop.kind != "infra":
            self.stop = Stop("infra", "abandoned", "" if self.stop is None else self.stop.error)
        return self._ended(None)

    async def _take(self) -> tuple[Archive, str | None]:
        """Return the workspace as an archive, or an empty one if there is no such folder; and why it cannot be graded,
        if it cannot."""
        try:
            return await self.sandbox.get_archive(self.task.workspace, max_bytes=_MAX_WORKSPACE), None
        except SandboxDied:
            raise
        except SandboxError as error:
            empty = Archive(empty_archive().tar, (f"{self.task.workspace}: {error}",))
            return empty, f"workspace-{error.bound}" if isinstance(error, TreeTooLarge) else None

    def _zero(self, cause: str) -> VerifierResult:
        spec = self.task.verifier
        return VerifierResult({}, 0.0, 0.0, 0.0, spec.mode, spec.digest, cause=cause)

    async def _finish_desktop(self) -> None:
        """Take the task's closing steps, if its desktop still stands."""
        finish = getattr(self._tools, "finish", None)
        if finish is not None:
            await finish()

    async def _end_tools(self) -> None:
        if self._tools is not None:
            await self._tools.aclose()

    async def _close(self) -> None:
        live.drop(self._live)
        if self._sandbox is not None:
            try:
                async with self.phase(Phase.TEARDOWN):
                    try:
                        await self._end_tools()
                    finally:
                        try:
                            if self.resident is not None and self.opened is not None:
                                await self.resident.close_sandbox(self.opened)
                        finally:
                            if self.resident is None or self._apart:
                                await self._sandbox.close()
            except (TimeoutError, InfraError):
                pass  # the supervisor keeps the sandbox and removes it when this process ends

    def _ended(
        self, result: VerifierResult | None, workspace: bytes | None = None, dropped: tuple[str, ...] = ()
    ) -> Ended:
        assert self.stop is not None
        stop = self.stop
        if stop.kind == "infra" or result is None:
            outcome, cause, result = Outcome.INFRA, stop.cause if stop.kind == "infra" else "abandoned", None
        elif stop.kind == "error":
            outcome, cause = Outcome.FAILED, stop.cause
        elif result.strict >= 1.0:
            outcome, cause = Outcome.SOLVED, None
        elif stop.kind == "budget":
            outcome, cause = Outcome.TRUNCATED, stop.cause
        else:
            outcome, cause = Outcome.FAILED, result.cause
        episode = Episode(
            task_id=self.task.id,
            task_hash=self.task.content_hash,
            sample=self.request.sample,
            seed=self.request.seed,
            agent=self.agent,
            outcome=outcome,
            cause=cause,
            fault=stop.fault,
            error=stop.error,
            result=result,
            steps=tuple(self.steps),
            turns=tuple(self.turns),
            usage=self.usage,
            final_message=self.final_message,
            seconds=dict(self.seconds),
            isolation=self._sandbox.isolation.as_dict() if self._sandbox is not None else {},
            workspace=workspace,
            dropped=dropped,
        )
        return Ended(
            episode=episode,
            reward=reward_of(result, self.request.reward),
            truncated=stop.kind in ("budget", "infra"),
        )


async def _compressed(data: bytes) -> bytes:
    """Compress ``data`` with gzip, without a timestamp; in chunks, so that other episodes are not blocked."""
    compressor = zlib.compressobj(6, zlib.DEFLATED, 31)
    chunks = [await offloaded(compressor.compress, data[at : at + _CHUNK]) for at in range(0, len(data), _CHUNK)]
    return await offloaded(b"".join, (*chunks, compressor.flush()))


def transcript_payload(steps: Iterable[Step]) -> tuple[Mapping[str, Any], ...]:
    """Return the transcript for verifiers (``transcript`` of the reward payload), as JSON-like messages.

    Of programs that called the task's tools by MCP, it has the calls that were executed, by the names of the task.
    """
    return tuple(_message(executed_step(step)) for step in steps)


def _message(step: Step) -> Mapping[str, Any]:
    body: dict[str, Any] = {"role": "assistant" if step.source == "agent" else step.source, "content": step.message}
    if step.tool_calls:
        body["tool_calls"] = [{"id": c.id, "name": c.name, "arguments": dict(c.arguments)} for c in step.tool_calls]
    if step.observations:
        body["results"] = [{"id": o.call_id, "content": o.content} for o in step.observations]
    return body
