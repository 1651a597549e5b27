"""One attempt at one task: the phases every face of the rollout shares (``run_episode``, the environments).

Set-up, agent, verify and teardown each have a budget of the task and a hard deadline here. What the agent can
cause is ``failed`` with a cause; only what also fails without it, or the host, is ``infra``.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import time
import zlib
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

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
    TaskError,
    TreeTooLarge,
    UnsupportedTask,
    traceback_of,
)
from clawgym.offload import offloaded
from clawgym.records import Episode, Fault, GradingMode, Outcome, Phase, Step, Task, Turn, Usage, VerifierResult
from clawgym.rollout.shown import Shown
from clawgym.sandbox.protocol import Archive, Backend, Sandbox, Snapshot
from clawgym.tools import Tools, open_tools, sandbox_spec
from clawgym.verifiers.diff import DIFF_FILE, submission_diff
from clawgym.verifiers.grading import Subject, empty_archive, grade

__all__ = ["Attempt", "fault_of", "transcript_payload"]

_MAX_WORKSPACE = 256 * 2**20
_TAKING = 120.0
"""Seconds that taking the workspace, and putting it into the boxes that grade it, may take beside the grading."""
_PIECE = 1 << 20
"""Bytes that are compressed before others have their turn."""
_HOST_ERRORS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC})
"""Errors that say that the host is full, whoever meets them."""


def utc_now() -> str:
    """ISO 8601 with milliseconds, UTC."""
    seconds, milliseconds = divmod(time.time_ns() // 1_000_000, 1000)
    return f"{_second(seconds)}.{milliseconds:03}+00:00"


@lru_cache(maxsize=2)
def _second(seconds: int) -> str:  # every step of every environment has a time: most share their second
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")


def fault_of(error: BaseException) -> Fault:
    """Where an infrastructure error came from, by its type."""
    if isinstance(error, EngineError):
        return Fault.ENDPOINT
    # A GradingError says that the verifier fails on the untouched workspace too.
    return Fault.TASK if isinstance(error, TaskError | GradingError) else Fault.HOST


class Attempt:
    """Open, work, :meth:`finish`. Not to be used twice."""

    def __init__(
        self,
        task: Task,
        backend: Backend,
        agent: str,
        *,
        seed: int,
        sample: int,
        resident: ResidentAgent | None = None,
    ) -> None:
        if task.unsupported:
            raise UnsupportedTask(f"task {task.id} cannot run here: {task.unsupported}")
        for layer in task.layers.values():
            if not layer.folder.is_dir():
                raise UnsupportedTask(
                    f"task {task.id} cannot run here: its layer {layer.name} is gone from {layer.folder}: prepare it "
                    "again (`clawgym tasks prepare`), and read the task again"
                )
        if task.brings_tools and resident is not None:
            raise AgentError(
                f"agent {agent!r} has tools of its own, and task {task.id} brings others: use tool-loop (or oracle, "
                "replay, script, noop)"
            )
        self.task = task
        self.backend = backend
        self.agent = agent
        self.resident = resident
        self.seed = seed
        self.sample = sample
        self.steps: list[Step] = [Step("user", task.instruction, utc_now())]
        self.turns: list[Turn] = []
        self.usage = Usage()
        self.final_message = ""
        self.seconds: dict[str, float] = {}
        self.stop: str = "submitted"
        """``submitted``, ``budget`` or ``error``."""
        self.cause: str | None = None
        self._box: Sandbox | None = None
        self._tools: Tools | None = None
        self._infra: str | None = None
        self._fault: Fault | None = None
        self._error = ""
        self._shown = Shown(self)
        self._live = 0

    @property
    def opened(self) -> Sandbox | None:
        """The agent's box, if there was one."""
        return self._box

    @property
    def box(self) -> Sandbox:
        """The agent's box; opened by :meth:`open`."""
        if self._box is None:
            raise SandboxError("this attempt has no box: call open() first")
        return self._box

    @property
    def tools(self) -> Tools:
        """What the agent acts with; opened by :meth:`open`."""
        if self._tools is None:
            raise SandboxError("this attempt has no tools: call open() first")
        return self._tools

    @contextlib.asynccontextmanager
    async def phase(self, phase: Phase) -> AsyncIterator[None]:
        """Time a phase and hold it to its budget. Raises TimeoutError past it."""
        budget = {
            Phase.SETUP: self.task.limits.setup_seconds,
            Phase.AGENT: self.task.limits.agent_seconds,
            # Two gradings and a control.
            Phase.VERIFY: 3 * self.task.limits.verify_seconds + _TAKING,
            Phase.TEARDOWN: self.task.limits.teardown_seconds,
        }[phase]
        started = time.monotonic()
        try:
            async with asyncio.timeout(budget):
                yield
        finally:
            self.seconds[phase.value] = self.seconds.get(phase.value, 0.0) + time.monotonic() - started

    async def open(self) -> None:
        """Create the box, put the inputs in, start the tools. Raises :class:`InfraError` (also past the set-up budget),
        and :class:`TaskError` if the task's files are gone or are not what its hash was taken of, or its tools cannot
        be offered; a backend that cannot work here at all is :class:`SandboxUnavailable`."""
        task = self.task
        try:
            async with self.phase(Phase.SETUP):
                # From here on nothing is read from the task's folder: what is graded is what was pinned.
                task = self.task = await asyncio.to_thread(task.frozen)
                spec = sandbox_spec(task)
                await self.backend.probe()
                if self.resident is None:
                    self._box = await self.backend.create(spec)
            if self.resident is not None:  # programs start a few at a time, however many episodes do
                asked = time.monotonic()
                self._box = await self.resident.open_box(self.backend, spec)
                self.seconds["boot"] = time.monotonic() - asked
            async with self.phase(Phase.SETUP):
                if task.inputs:
                    await self.box.put(task.inputs, task.workspace)
                self._tools = await open_tools(task, self.box, self.backend)
            self._live = live.add(self._shown)
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

    async def work(self, agent: Callable[[], Any]) -> None:
        """Run the agent within its budget and note how it ended.

        An exception of the agent's own code fails the episode, with the traceback in :attr:`Episode.error`.
        Cancellation, :class:`~clawgym.errors.ClawGymError` and errors of a host that is out of memory, disk space or
        descriptors pass through.
        """
        try:
            async with self.phase(Phase.AGENT):
                await agent()
        except TimeoutError:
            self.stop, self.cause = "budget", "time"
        except BudgetExceeded as error:
            self.stop, self.cause = "budget", error.cause
        except SandboxDied as error:
            self.stop, self.cause = "error", error.cause
        except ClawGymError:
            raise
        except Exception as error:
            if isinstance(error, MemoryError) or getattr(error, "errno", None) in _HOST_ERRORS:
                raise
            self.stop, self.cause = "error", "agent-exception"
            self._error = traceback_of(error)

    async def finish(self, *, floor: float | None = None, keep_workspace: bool = True) -> Episode:
        """Stop the box, grade what is left, close everything; never raises for what the agent did."""
        result: VerifierResult | None = None
        workspace: Archive | None = None
        snapshot: Snapshot | None = None
        try:
            async with self.phase(Phase.VERIFY):
                await self._end_tools()  # what a server keeps is at rest before it is graded
                mode = self.task.verifier.mode
                if mode is not GradingMode.LIVE or self.stop == "error":
                    await self.box.stop()  # InfraError where the box died with what keeps it: then nobody is to blame
                else:
                    await self.box.exec(["true"])  # a box that the agent has broken serves nothing: SandboxDied
                if self.stop == "error":
                    result = self._zero(self.cause or "error")
                workspace, cause = await self._take()
                if result is None and cause is None and mode is GradingMode.FORK:
                    try:
                        snapshot = await self.box.snapshot()
                    except TreeTooLarge as error:
                        cause = f"layer-{error.bound}"
                if result is None and cause is not None:
                    self.stop, self.cause, result = "error", cause, self._zero(cause)
                if result is None:
                    subject = Subject(
                        workspace,
                        snapshot,
                        self.box if mode is GradingMode.LIVE else None,
                        self.final_message,
                        transcript_payload(self.steps),
                    )
                    result = await grade(self.task, subject, self.backend, floor=floor)
        except TimeoutError:
            budget = 3 * self.task.limits.verify_seconds + _TAKING
            self.fail_infra(
                "verify-deadline",
                f"task {self.task.id}: grading took over {budget:g} s: lower --concurrency, "
                "or raise limits.verify_seconds of the task",
                fault=Fault.HOST,
            )
        except GradingError as error:
            self.fail_infra(error.cause, str(error), fault=fault_of(error))
        except EngineError as error:
            self.fail_infra(f"engine: {error}", fault=Fault.ENDPOINT)
        except InfraError as error:
            self.fail_infra(f"host: {error}", fault=Fault.HOST)
        except SandboxUnavailable:
            raise
        except SandboxDied as error:  # the box died between the last command and stop()
            self.stop, self.cause, result = "error", error.cause, self._zero(error.cause)
        except SandboxError:  # a box in such a state that its files cannot be taken
            self.stop, self.cause, result = "error", "workspace", self._zero("workspace")
        finally:
            if snapshot is not None:
                with contextlib.suppress(InfraError):  # it goes when the backend ends
                    await self.backend.drop(snapshot)
            await self._close()
        if keep_workspace and workspace is not None:
            episode = self._episode(result, await _compressed(workspace.tar), workspace.dropped)
        else:
            episode = self._episode(result)
        if workspace is None or result is None or not self.task.verifier.protected:
            return episode
        submission = await offloaded(submission_diff, self.task, workspace.tar)
        return replace(episode, files={**episode.files, DIFF_FILE: submission})

    def fail_infra(self, cause: str, error: str = "", *, fault: Fault) -> None:
        """Record an infrastructure error; the episode will be ``infra``. ``error`` is the whole message, where
        ``cause`` is not."""
        self._infra, self._error, self._fault = cause, error or cause, fault

    @property
    def failed_infra(self) -> bool:
        """Whether :meth:`fail_infra` was called."""
        return self._infra is not None

    async def abandon(self) -> Episode:
        """Close without grading."""
        await self._close()
        return self._episode(None)

    async def _take(self) -> tuple[Archive, str | None]:
        """The frozen workspace, or an empty one where the agent left no folder; and why it cannot be graded."""
        try:
            return await self.box.get_archive(self.task.workspace, max_bytes=_MAX_WORKSPACE), None
        except SandboxDied:
            raise
        except SandboxError as error:
            nothing = Archive(empty_archive().tar, (f"{self.task.workspace}: {error}",))
            return nothing, f"workspace-{error.bound}" if isinstance(error, TreeTooLarge) else None

    def _zero(self, cause: str) -> VerifierResult:
        spec = self.task.verifier
        return VerifierResult({}, 0.0, 0.0, 0.0, spec.mode, spec.digest, cause=cause)

    async def _end_tools(self) -> None:
        if self._tools is not None:
            await self._tools.aclose()

    async def _close(self) -> None:
        live.drop(self._live)
        if self._box is not None:
            try:
                async with self.phase(Phase.TEARDOWN):
                    try:
                        await self._end_tools()
                    finally:
                        await (self._box.close() if self.resident is None else self.resident.close_box(self._box))
            except (TimeoutError, InfraError):
                pass  # the lease stays with the supervisor, which clears it when we end

    def _episode(
        self, result: VerifierResult | None, workspace: bytes | None = None, dropped: tuple[str, ...] = ()
    ) -> Episode:
        if self._infra is not None or result is None:
            outcome, cause, result = Outcome.INFRA, self._infra or "abandoned", None
        elif self.stop == "error":
            outcome, cause = Outcome.FAILED, self.cause
        elif result.strict >= 1.0:
            outcome, cause = Outcome.SOLVED, None
        elif self.stop == "budget":
            outcome, cause = Outcome.TRUNCATED, self.cause
        else:
            outcome, cause = Outcome.FAILED, result.cause
        return Episode(
            task_id=self.task.id,
            task_hash=self.task.content_hash,
            sample=self.sample,
            seed=self.seed,
            agent=self.agent,
            outcome=outcome,
            cause=cause,
            fault=self._fault if outcome is Outcome.INFRA else None,
            error=self._error if outcome in (Outcome.INFRA, Outcome.FAILED) else "",
            result=result,
            steps=tuple(self.steps),
            turns=tuple(self.turns),
            usage=self.usage,
            final_message=self.final_message,
            seconds=dict(self.seconds),
            isolation=self._box.isolation.as_dict() if self._box is not None else {},
            workspace=workspace,
            dropped=dropped,
        )


async def _compressed(data: bytes) -> bytes:
    """``data`` as gzip has it, without a time. Piece by piece: nobody's files wait for all of another's."""
    packing = zlib.compressobj(6, zlib.DEFLATED, 31)
    pieces = [await offloaded(packing.compress, data[at : at + _PIECE]) for at in range(0, len(data), _PIECE)]
    return await offloaded(b"".join, (*pieces, packing.flush()))


def transcript_payload(steps: Iterable[Step]) -> tuple[Mapping[str, Any], ...]:
    """A transcript as verifiers see it (``transcript`` of the reward payload)."""
    return tuple(map(_message, steps))


def _message(step: Step) -> Mapping[str, Any]:
    """A transcript entry of the reward payload."""
    body: dict[str, Any] = {"role": "assistant" if step.source == "agent" else step.source, "content": step.message}
    if step.tool_calls:
        body["tool_calls"] = [{"id": c.id, "name": c.name, "arguments": dict(c.arguments)} for c in step.tool_calls]
    if step.observations:
        body["results"] = [{"id": o.call_id, "content": o.content} for o in step.observations]
    return body
