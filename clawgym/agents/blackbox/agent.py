"""An agent made of somebody else's program: a box, a session of the gateway, user turns, and our own records of it all.

Invariants: what an episode was is read from the gateway's records, never from what the program says of itself; a
program's session opens with its episode and takes no call after the program's work is done.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from clawgym.agents.blackbox.boxes import Booted, Boxes, BoxSource
from clawgym.agents.blackbox.protocol import Claw, ClawStopped
from clawgym.agents.blackbox.transcript import steps_of
from clawgym.agents.protocol import AgentContext, AgentReport, Known
from clawgym.engines.protocol import Checkable, Sampling, TextEngine, TokenEngine
from clawgym.errors import BudgetExceeded, EngineError, InfraError, SandboxDied, SandboxError
from clawgym.gateway.calls import Refusal
from clawgym.gateway.server import Gateway
from clawgym.gateway.sessions import SessionRequest
from clawgym.pool import EpisodeEnd, Pool
from clawgym.records import Usage
from clawgym.sandbox.protocol import Backend, Sandbox, SandboxSpec

__all__ = ["BlackBoxAgent"]

_log = logging.getLogger("clawgym.agents")
_OURS = (401, 403, 408, 429)
"""Statuses that no request of an agent brings about."""


@dataclass(eq=False)
class _Stay:
    """One episode's box, from its first to its last use."""

    booted: Booted
    opened: bool = False
    usage: Usage = field(default_factory=Usage)
    files: dict[str, bytes] = field(default_factory=dict)


class BlackBoxAgent:
    """Lets ``claw`` work on tasks, each in a box of its own.

    Its model is ``engine`` (then the gateway, and a pool that is forgotten, are made here), or whatever a running
    ``gateway`` has, which stays its owner's. ``follow_ups`` are said one after another once the instruction has been
    worked on, in the same conversation. A seed that ``sampling`` leaves open is the episode's. ``spare`` boxes are kept
    booted, ``booting`` boot at once (default of both: the cores here); ``max_tokens`` bounds one answer. A
    ``claw`` that is a :class:`~clawgym.agents.blackbox.boxes.BoxSource` makes its boxes itself, and these do not count.
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
            raise TypeError("a black box needs a model: give engine= or gateway=, one of the two")
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.name = claw.name
        self.version = claw.version
        self.claw = claw
        boxes = Boxes(
            claw,
            spare=cores if spare is None else spare,
            booting=cores if booting is None else booting,
            max_tokens=max_tokens,
        )
        self.boxes: BoxSource = claw if isinstance(claw, BoxSource) else boxes
        self._own_engine = engine
        self._engine: TokenEngine | TextEngine = engine or gateway.engine  # type: ignore[union-attr]
        self._gateway = gateway
        self._sampling = sampling or Sampling()
        self._follow_ups = tuple(follow_ups)
        self._stays: dict[str, _Stay] = {}
        self._owned: contextlib.AsyncExitStack | None = None
        self._starting = asyncio.Lock()

    # -- the box

    async def open_box(self, backend: Backend, spec: SandboxSpec) -> Sandbox:
        """See :class:`~clawgym.agents.protocol.ResidentAgent`."""
        booted = await self.boxes.take(backend, spec, await self._running_gateway())
        self._stays[booted.box.id] = _Stay(booted)
        return booted.box

    def session_of(self, box: Sandbox) -> str | None:
        """See :class:`~clawgym.agents.protocol.ResidentAgent`."""
        stay = self._stays[box.id]
        return stay.booted.opened.id if stay.opened else None

    def reserved_for(self, box: Sandbox) -> str:
        """The id that the session of the program in ``box`` has, or will have once it is opened."""
        return self._stays[box.id].booted.opened.id

    async def close_box(self, box: Sandbox) -> None:
        """See :class:`~clawgym.agents.protocol.ResidentAgent`."""
        await self._stays[box.id].booted.close()

    async def settle(self, box: Sandbox, end: EpisodeEnd) -> Known:
        """See :class:`~clawgym.agents.protocol.ResidentAgent`."""
        stay = self._stays.pop(box.id)
        if stay.opened:
            await stay.booted.gateway.close_session(stay.booted.opened.id, end)
        return Known(stay.usage, stay.files)

    # -- the work

    async def run(self, context: AgentContext) -> AgentReport:
        """Say the instruction, then the follow-ups. See the class."""
        stay = self._stays[context.sandbox.id]
        await self._open_session(context, stay)
        try:
            answer = ""
            for message in (context.task.instruction, *self._follow_ups):
                try:
                    answer = await stay.booted.running.ask(message)
                except SandboxDied:
                    raise
                except (ClawStopped, SandboxError) as error:  # what runs in the box can cause either
                    _log.info("%s: %s", context.task.id, error)
                    cause = error.cause if isinstance(error, ClawStopped) else "agent-stopped"
                    return await self._failed(stay) or AgentReport("error", cause, answer)
                if report := await self._failed(stay):
                    return replace(report, final_message=answer)
            return AgentReport(final_message=answer)
        finally:
            await asyncio.shield(asyncio.ensure_future(self._wind_up(context, stay)))

    async def _open_session(self, context: AgentContext, stay: _Stay) -> None:
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
        await stay.booted.gateway.open_session(request, reserved=stay.booted.opened)
        stay.opened = True

    async def _failed(self, stay: _Stay) -> AgentReport | None:
        """What the last model call's failure means, which the program may have hidden behind a friendly answer.

        What an agent can bring about by what it sends is its own failure. Raises :class:`EngineError` and
        :class:`InfraError` for ours."""
        session = await stay.booted.gateway.sessions.get(stay.booted.opened.id)
        failure = None if session is None else session.failure
        match failure:
            case None:
                return None
            case BudgetExceeded():
                return AgentReport("budget", failure.cause)
            case EngineError() if failure.status in range(400, 500) and failure.status not in _OURS:
                return AgentReport("error", f"model-{failure.status}")
            case EngineError():
                raise failure
            case Refusal() if failure.status not in _OURS:
                return AgentReport("error", f"model-{failure.status}")
        raise InfraError(f"the gateway failed ({failure}): look at its log, then run the same command again")

    async def _wind_up(self, context: AgentContext, stay: _Stay) -> None:
        """No more model calls; then take what is known of the episode."""
        booted = stay.booted
        await booted.hang_up()
        await booted.gateway.hang_up(booted.opened.id)
        if (session := await booted.gateway.sessions.get(booted.opened.id)) is not None:
            stay.usage = session.usage
        turns = await booted.gateway.in_pool(lambda pool: pool.turns(booted.opened.id))
        for turn in turns:
            context.record_turn(turn)
        for step in steps_of(turns, context.task.instruction):
            context.record(step)
        with contextlib.suppress(SandboxError):  # a box that is gone, or whose files cannot be taken
            stay.files.update(await booted.running.files())

    # -- the rest

    async def _running_gateway(self) -> Gateway:
        async with self._starting:
            if self._gateway is None:
                self._owned = contextlib.AsyncExitStack()
                folder = self._owned.enter_context(tempfile.TemporaryDirectory(prefix="clawgym-"))
                pool = self._owned.enter_context(contextlib.closing(Pool(Path(folder) / "pool.db")))
                self._gateway = await self._owned.enter_async_context(Gateway(self._engine, pool))
        return self._gateway

    def identity(self) -> dict[str, Any]:
        """The program, its configuration, the sampling, the engine's run manifest."""
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
        """Close the boxes that wait, and what was made here: the gateway, the engine."""
        await self.boxes.aclose()
        if self._owned is not None:
            await self._owned.aclose()
        if self._own_engine is not None:
            await self._own_engine.aclose()
