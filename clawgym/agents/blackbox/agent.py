"""An agent that runs a program in the sandbox: it opens a gateway session, sends user messages and collects the turns.

Invariants: the transcript of an episode comes from the gateway's records, never from what the program reports. The
program's session opens when the episode begins and accepts no call after the program's work is done.

In a dialogue, the user gets the last reply of the model, and answers with the next message to the program. A system
prompt of the task, and what was said before, begin the first message. Tools are called only while the program works.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from clawgym.agents._dialogue import Conversation
from clawgym.agents.blackbox.protocol import Claw, ClawStopped
from clawgym.agents.blackbox.sandboxes import BootedSandbox, SandboxSource, WarmSandboxes
from clawgym.agents.blackbox.transcript import steps_of, with_executed
from clawgym.agents.protocol import AgentArtifacts, AgentContext, AgentReport
from clawgym.engines.protocol import Checkable, Sampling, TextEngine, TokenEngine
from clawgym.errors import BudgetExceeded, EngineError, InfraError, SandboxDied, SandboxError
from clawgym.gateway.calls import Refusal, text_of
from clawgym.gateway.request import SessionRequest
from clawgym.gateway.server import Gateway
from clawgym.gateway.tool_server import OfferedTools
from clawgym.pool import EpisodeEnd, Pool
from clawgym.records import Usage
from clawgym.sandbox.protocol import Backend, Sandbox, SandboxSpec

__all__ = ["BlackBoxAgent"]

_log = logging.getLogger("clawgym.agents")
_NOT_THE_AGENT = (401, 403, 408, 429)
"""HTTP statuses that the content of an agent's request cannot cause."""


@dataclass(eq=False)
class _Episode:
    """The state of one episode, from the creation of its sandbox to the end of its session."""

    booted: BootedSandbox
    offered: OfferedTools | None = None
    asked: set[str] = field(default_factory=set)
    turns: int = 0
    """Turns that are in the transcript."""
    executed: int = 0
    """Calls of the task's tools that are in the transcript."""
    reply: str = ""
    """The last reply of the model in the transcript."""
    opened: bool = False
    usage: Usage = field(default_factory=Usage)
    files: dict[str, bytes] = field(default_factory=dict)


class BlackBoxAgent:
    """Lets the program of ``claw`` work on tasks, each in its own sandbox.

    Give either ``engine`` or ``gateway``. With ``engine``, the agent starts a gateway of its own with a temporary pool
    and closes the engine. A ``gateway`` is not closed.

    Args:
        claw: the adapter of the program. If it is also a
            :class:`~clawgym.agents.blackbox.sandboxes.SandboxSource`, it makes its sandboxes itself, and ``spare``,
            ``booting`` and ``max_tokens`` have no effect.
        engine: the model of the program.
        gateway: a running gateway whose engine is the model of the program.
        sampling: sampling parameters; without a seed, the seed of the episode is used.
        follow_ups: user messages that are sent one after another after the instruction, in the same conversation.
        spare: sandboxes to keep ready with the program started; default: the number of cores.
        booting: programs that start at the same time, at most; default: the number of cores.
        max_tokens: token limit of one reply, as the program is told.

    Raises:
        TypeError: both of ``engine`` and ``gateway``, or none, are given.
    """

    def __init__(
        self,
        claw: Claw,
        engine: TokenEngine | TextEngine | None = None,
        *,
        gateway: Gateway | None = None,
        sampling: Sampling | None = None,
        follow_ups: Sequence[str] = (),
        spare: int | None = None,
        booting: int | None = None,
        max_tokens: int = 8192,
    ) -> None:
        if (engine is None) == (gateway is None):
            raise TypeError("a black-box agent needs a model: give either engine= or gateway=")
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.name = claw.name
        self.version = claw.version
        self.claw = claw
        self.takes_tools: bool = getattr(claw, "takes_tools", False)
        sandboxes = WarmSandboxes(
            claw,
            spare=cores if spare is None else spare,
            booting=cores if booting is None else booting,
            max_tokens=max_tokens,
        )
        self.sandboxes: SandboxSource = claw if isinstance(claw, SandboxSource) else sandboxes
        self._own_engine = engine
        self._engine: TokenEngine | TextEngine = engine or gateway.engine  # type: ignore[union-attr]
        self._gateway = gateway
        self._sampling = sampling or Sampling()
        self._follow_ups = tuple(follow_ups)
        self._episodes: dict[str, _Episode] = {}
        self._owned: contextlib.AsyncExitStack | None = None
        self._starting = asyncio.Lock()

    # -- sandboxes

    async def open_sandbox(self, backend: Backend, spec: SandboxSpec, *, tools: bool = False) -> Sandbox:
        """See :class:`~clawgym.agents.protocol.ResidentAgent`."""
        booted = await self.sandboxes.take(backend, spec, await self._running_gateway(), tools=tools)
        self._episodes[booted.sandbox.id] = _Episode(booted)
        return booted.sandbox

    def session_of(self, sandbox: Sandbox) -> str | None:
        """See :class:`~clawgym.agents.protocol.ResidentAgent`."""
        episode = self._episodes[sandbox.id]
        return episode.booted.opened.id if episode.opened else None

    def reserved_session(self, sandbox: Sandbox) -> str:
        """Return the id that the gateway session of the program in ``sandbox`` has, or will have once it is opened."""
        return self._episodes[sandbox.id].booted.opened.id

    async def close_sandbox(self, sandbox: Sandbox) -> None:
        """See :class:`~clawgym.agents.protocol.ResidentAgent`."""
        await self._episodes[sandbox.id].booted.close()

    async def close_session(self, sandbox: Sandbox, end: EpisodeEnd) -> AgentArtifacts:
        """See :class:`~clawgym.agents.protocol.ResidentAgent`."""
        episode = self._episodes.pop(sandbox.id)
        if episode.opened:
            await episode.booted.gateway.close_session(episode.booted.opened.id, end)
        return AgentArtifacts(episode.usage, episode.files)

    # -- episodes

    async def run(self, context: AgentContext) -> AgentReport:
        """Send the instruction, then the follow-ups. In a dialogue, send what the user says, until the user ends it.

        Raises:
            EngineError, InfraError: the engine, the gateway, the user or a tool of the task failed.
        """
        episode = self._episodes[context.sandbox.id]
        await self._open_session(context, episode)
        try:
            answer = ""
            follow_ups = iter(self._follow_ups)
            conversation = Conversation(context) if context.task.dialogue is not None else None
            message: str | None = context.task.instruction
            if conversation is not None:
                message = _first_message(await conversation.open())
            while message is not None:
                episode.asked.add(message.strip())
                try:
                    with _accepting(episode, conversation):
                        answer = await episode.booted.running.ask(message)
                except SandboxDied:
                    raise
                except (ClawStopped, SandboxError) as error:  # code in the sandbox can cause either
                    _log.info("%s: %s", context.task.id, error)
                    cause = error.cause if isinstance(error, ClawStopped) else "agent-stopped"
                    return await self._failed(episode) or AgentReport("error", cause, answer)
                failed = await self._failed(episode)
                if episode.offered is not None:
                    await self._record(context, episode)
                    answer = episode.reply
                if failed is not None:
                    return replace(failed, final_message=answer)
                if conversation is None:
                    message = next(follow_ups, None)
                else:
                    said: list[dict[str, Any]] = []
                    message = said[-1]["content"] if await conversation.say(answer, said) else None
            return AgentReport(final_message=answer)
        finally:
            await asyncio.shield(asyncio.ensure_future(self._collect(context, episode)))

    async def _open_session(self, context: AgentContext, episode: _Episode) -> None:
        if context.opening is not None:
            await context.opening()
        request = context.session or SessionRequest(channel="eval")
        sampling = request.sampling or self._sampling
        if sampling.seed is None:
            sampling = replace(sampling, seed=context.seed & 0x7FFFFFFF)
        request = replace(
            request,
            sampling=sampling,
            agent=f"{self.name} {self.version}",
            most_turns=context.task.limits.max_steps,
        )
        if context.task.brings_tools:
            episode.offered = OfferedTools(context.tools)
            episode.offered.accepting = False
            episode.booted.gateway.offered[episode.booted.opened.id] = episode.offered
        await episode.booted.gateway.open_session(request, reserved=episode.booted.opened)
        episode.opened = True

    async def _failed(self, episode: _Episode) -> AgentReport | None:
        """Return how the episode ends if the last model call or the task's tools failed, or ``None`` if neither did.

        Programs often hide such failures behind an ordinary answer. A failure that the content of a request can cause
        is the agent's own.

        Raises:
            EngineError, InfraError, SandboxDied: the engine, the gateway or a tool's sandbox failed.
        """
        if episode.offered is not None and episode.offered.failure is not None:
            raise episode.offered.failure
        session = await episode.booted.gateway.sessions.get(episode.booted.opened.id)
        failure = None if session is None else session.failure
        match failure:
            case None:
                return None
            case BudgetExceeded():
                return AgentReport("budget", failure.cause)
            case EngineError() if failure.status in range(400, 500) and failure.status not in _NOT_THE_AGENT:
                return AgentReport("error", f"model-{failure.status}")
            case EngineError():
                raise failure
            case Refusal() if failure.status not in _NOT_THE_AGENT:
                return AgentReport("error", f"model-{failure.status}")
        raise InfraError(f"the gateway failed ({failure}): see its log, then run the same command again")

    async def _collect(self, context: AgentContext, episode: _Episode) -> None:
        """End the model calls, then collect usage, turns, steps and files of the episode."""
        booted = episode.booted
        await booted.disconnect()
        await booted.gateway.stop_session(booted.opened.id)
        if (session := await booted.gateway.sessions.get(booted.opened.id)) is not None:
            episode.usage = session.usage
        await self._record(context, episode)
        with contextlib.suppress(SandboxError):  # the sandbox has ended, or its files cannot be read
            episode.files.update(await booted.running.files())

    async def _record(self, context: AgentContext, episode: _Episode) -> None:
        """Record the turns and executed calls that are not recorded yet."""
        booted, offered, first = episode.booted, episode.offered, episode.turns
        turns = (await booted.gateway.in_pool(lambda pool: pool.turns(booted.opened.id)))[first:]
        for turn in turns:
            context.record_turn(turn)
        asked = None if context.task.dialogue is None else episode.asked
        steps = list(steps_of(turns, context.task.instruction, asked=asked))
        if offered is not None:
            steps = with_executed(steps, first, offered.executed[episode.executed :])
            episode.executed = len(offered.executed)
        for step in steps:
            context.record(step)
        episode.turns += len(turns)
        episode.reply = next((text_of(turn.reply) for turn in reversed(turns) if turn.role == "main"), "")

    # -- resources

    async def _running_gateway(self) -> Gateway:
        async with self._starting:
            if self._gateway is None:
                self._owned = contextlib.AsyncExitStack()
                folder = self._owned.enter_context(tempfile.TemporaryDirectory(prefix="clawgym-"))
                pool = self._owned.enter_context(contextlib.closing(Pool(Path(folder) / "pool.db")))
                self._gateway = await self._owned.enter_async_context(Gateway(self._engine, pool))
        return self._gateway

    def identity(self) -> dict[str, Any]:
        """Return the identity of the program, its configuration, the sampling parameters and the engine's identity."""
        return {
            "name": self.name,
            "version": self.version,
            **self.claw.identity(),
            "follow_ups": list(self._follow_ups),
            "sampling": {k: v for k, v in asdict(self._sampling).items() if v not in (None, ())},
            "engine": self._engine.identity(),
        }

    async def check(self) -> None:
        """See :class:`~clawgym.engines.protocol.Checkable`."""
        if isinstance(self._engine, Checkable):
            await self._engine.check()

    async def aclose(self) -> None:
        """Close the sandboxes that nobody has taken, and with ``engine=`` the engine and the gateway."""
        await self.sandboxes.aclose()
        if self._owned is not None:
            await self._owned.aclose()
        if self._own_engine is not None:
            await self._own_engine.aclose()


@contextlib.contextmanager
def _accepting(episode: _Episode, conversation: Conversation | None) -> Iterator[None]:
    """Let the program call the tools of the task that are offered now."""
    offered = episode.offered
    if offered is None:
        yield
        return
    offered.withheld = conversation.withheld if conversation is not None else ()
    offered.accepting = True
    try:
        yield
    finally:
        offered.accepting = False


def _first_message(messages: Sequence[Mapping[str, Any]]) -> str:
    """The first messages of a dialogue as one, since a program has a system prompt of its own."""
    said = {"assistant": "You have said: ", "user": "The user has said: "}
    before = [said.get(message["role"], "") + message["content"] for message in messages[:-1]]
    return "\n\n".join([*before, messages[-1]["content"]])
