"""Many agents in one OpenClaw: a process for all, a box for each task, where that task's tools work.

Weaker than a box with an OpenClaw of its own, and for small machines (docs/openclaw.md): the agents share a process
that speaks for their models. Invariants: no tool works anywhere but in its own task's box; an agent of OpenClaw sees
one task and is then removed; whatever ends the process is ours, so its episodes are ``infra``.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import secrets
import socket
from collections import deque
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from clawgym.agents.blackbox.boxes import PORT as MODEL_PORT
from clawgym.agents.blackbox.boxes import Booted
from clawgym.agents.blackbox.http import request
from clawgym.agents.blackbox.protocol import ClawStopped, ModelLink
from clawgym.agents.openclaw._dense_config import (
    PLUGIN,
    SECONDS,
    TOOLS_PORT,
    configuration_of,
    plugin,
    plugin_files,
)
from clawgym.agents.openclaw._tools import Hands, OpenClawToolServer
from clawgym.agents.openclaw.claw import FOLDER, HOME, PORT, OpenClaw, RunningOpenClaw
from clawgym.agents.openclaw.config import Prompt, model_provider
from clawgym.errors import AgentError, InfraError, SandboxDied, SandboxError, SandboxUnavailable
from clawgym.gateway.server import Address, Gateway
from clawgym.gateway.sessions import Opened, reserve
from clawgym.records import Limits, TaskFile
from clawgym.registry import agents
from clawgym.sandbox.protocol import Backend, Sandbox, SandboxSpec

__all__ = ["DenseOpenClaw"]

_log = logging.getLogger("clawgym.agents")
_SPARE = 32
"""Agents that OpenClaw knows before they are needed: it takes half a second to learn of some, however many."""
_MEMORY_MB = 4096
_NODE = ["--max-old-space-size=3072"]
"""Over that of a small OpenClaw: the last one counts."""
_LEARN_SECONDS = 60.0
_LOOK_SECONDS = 0.05
_LOOKS = 100
_DOORS = 4
"""Agents that begin at once: each waits for a lock on a list of containers, and gives up after ten seconds."""


@agents.register("openclaw-dense")
class DenseOpenClaw(OpenClaw):
    """OpenClaw, started once for all tasks: weaker isolation (:class:`~clawgym.agents.blackbox.boxes.BoxSource`).

    Needs a backend whose boxes have a loopback. Raises as :class:`OpenClaw` does.

    Args:
        version: the installed version to use; the one that ``clawgym openclaw install`` installs by default.
        prompt: ``reference``, as OpenClaw's users have it, or ``slim`` (docs/openclaw.md).
        max_tokens: most tokens of one reply.
    """

    name = "openclaw-dense"

    def __init__(self, version: str | None = None, *, prompt: Prompt = "reference", max_tokens: int = 8192) -> None:
        super().__init__(version, prompt=prompt)
        if self.installation is None:
            raise AgentError("dense mode uses the OpenClaw that is installed here: unset OPENCLAW_ROOTFS")
        self._folder = self.installation.folder
        self.max_tokens = max_tokens
        self._processes: dict[Hashable, _Process] = {}
        self._starting = asyncio.Lock()

    async def take(self, backend: Backend, spec: SandboxSpec, gateway: Gateway) -> Booted:
        """A box for one episode, and an agent that works in it: see :meth:`~clawgym.agents.blackbox.boxes.Boxes.take`.

        Raises :class:`SandboxUnavailable` where boxes have no loopback."""
        process = await self._process(backend, gateway)
        mounts = {**spec.mounts, FOLDER: self._folder}  # skills and pages that the prompt speaks of
        box = await backend.create(replace(spec, mounts=mounts))
        try:
            return await process.seat(box)
        except BaseException:
            await box.close()
            raise

    async def _process(self, backend: Backend, gateway: Gateway) -> _Process:
        key = (id(backend), id(gateway))
        async with self._starting:
            process = self._processes.get(key)
            if process is None or process.ended:
                if process is not None:
                    _log.warning("the shared OpenClaw ended (%s): starting another one", process.why())
                    await process.aclose()
                process = self._processes[key] = await _Process.start(self, backend, gateway)
        return process

    def identity(self) -> dict[str, Any]:
        """See :class:`~clawgym.agents.blackbox.protocol.Claw`."""
        return {**super().identity(), "mode": "dense", "plugin_sha256": hashlib.sha256(plugin()).hexdigest()}

    async def aclose(self) -> None:
        """End what was started."""
        for process in self._processes.values():
            await process.aclose()
        self._processes.clear()


@dataclass(eq=False)
class _Process:
    """One OpenClaw, in a box of its own."""

    claw: DenseOpenClaw
    gateway: Gateway
    box: Sandbox
    tools: OpenClawToolServer
    token: str
    running: RunningOpenClaw
    address: Address
    undo: contextlib.AsyncExitStack
    workspaces: dict[str, str] = field(default_factory=dict)
    """Agent -> where it works; all that OpenClaw's configuration names."""
    sessions: dict[str, Opened] = field(default_factory=dict)
    """Agent -> its session of the gateway."""
    free: dict[str, deque[str]] = field(default_factory=dict)
    """Where they work -> agents that nobody has had yet."""
    doors: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_DOORS))
    learning: asyncio.Lock = field(default_factory=asyncio.Lock)
    wanted: dict[str, int] = field(default_factory=dict)

    @classmethod
    async def start(cls, claw: DenseOpenClaw, backend: Backend, gateway: Gateway) -> _Process:
        """Raises as :meth:`Backend.create` does, and :class:`InfraError` where OpenClaw does not start."""
        cores = float(len(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else 1.0
        limits = Limits(
            memory_mb=_MEMORY_MB, pids=4096, cpus=cores, disk_mb=1024, agent_seconds=SECONDS, command_seconds=60.0
        )
        spec = claw.spec(SandboxSpec(limits=limits, readonly={PLUGIN: plugin_files()}))
        try:
            box = await backend.create(spec)
        except SandboxUnavailable:
            raise
        except SandboxError as error:
            raise InfraError(f"no box for OpenClaw ({error}): run `clawgym doctor`") from error
        async with contextlib.AsyncExitStack() as undo:
            undo.push_async_callback(box.close)
            tools = OpenClawToolServer()
            undo.push_async_callback(tools.aclose)
            await tools.start(await _listen(box, TOOLS_PORT))
            address = await gateway.listen(sock=await _listen(box, MODEL_PORT))
            undo.push_async_callback(gateway.unlisten, address)
            token = secrets.token_urlsafe(24)
            config = configuration_of(claw, gateway.model, token, tools.key, {})
            await box.put([TaskFile("openclaw.json", json.dumps(config).encode())], f"{HOME}/.openclaw")
            argv = claw.argv(ModelLink("", ""))
            entry = next(place for place, word in enumerate(argv) if word.endswith(".mjs"))
            running = RunningOpenClaw(box, token, [*argv[:entry], *_NODE, *argv[entry:]], claw.env())
            undo.push_async_callback(running.aclose)
            await claw.wait(running)
            return cls(claw, gateway, box, tools, token, running, address, undo.pop_all())
        raise AssertionError

    @property
    def ended(self) -> bool:
        return self.running.ended

    def why(self) -> str:
        """What it said last."""
        return self.running.why()[-500:]

    async def seat(self, box: Sandbox) -> Booted:
        """An agent for ``box``. Raises :class:`InfraError`."""
        agent = await self._agent(box.spec.workdir)
        hands = self.tools.add(agent, box)
        return _Seated(box, _Seat(self, agent, hands), self.sessions[agent], self.address, self.gateway)

    async def forget(self, agent: str) -> None:
        """No tool, no model, no word of ``agent`` is left; its name goes with the next that are learned."""
        await self.tools.remove(agent)
        self.workspaces.pop(agent, None)
        self.sessions.pop(agent, None)
        with contextlib.suppress(SandboxError):
            await self.box.exec(["rm", "-rf", "--", f"{HOME}/.openclaw/agents/{agent}"])

    async def _agent(self, workspace: str) -> str:
        """An agent that OpenClaw knows and that nobody has had."""
        self.wanted[workspace] = self.wanted.get(workspace, 0) + 1
        try:
            async with self.learning:
                if not self.free.get(workspace):
                    await self._learn(workspace, self.wanted[workspace] + _SPARE + 1)
                return self.free[workspace].popleft()
        finally:
            self.wanted[workspace] -= 1

    async def _learn(self, workspace: str, count: int) -> None:
        new = {secrets.token_hex(8): reserve() for _ in range(count)}
        self.workspaces |= dict.fromkeys(new, workspace)
        config = configuration_of(self.claw, self.gateway.model, self.token, self.tools.key, self.workspaces)
        files = [TaskFile("openclaw.json", json.dumps(config).encode())]
        models = [file for agent, opened in new.items() for file in self._model(agent, opened)]
        try:
            async with asyncio.timeout(_LEARN_SECONDS):
                await self.box.put(models, f"{HOME}/.openclaw/agents")  # it reads the keys as it learns of their agents
                looks = 0
                while not await self._knows(new):
                    if looks % _LOOKS == 0:  # again, since a change while it starts may pass unseen
                        await self.box.put(files, f"{HOME}/.openclaw")
                    looks += 1
                    await asyncio.sleep(_LOOK_SECONDS)
        except (ClawStopped, SandboxError, TimeoutError) as error:
            for agent in new:
                del self.workspaces[agent]
            raise InfraError(
                f"the shared OpenClaw takes no more agents ({error}): run the same command again"
            ) from error
        self.sessions |= new
        if workspace not in self.free:
            await self._furnish(workspace, new.popitem()[0])
        self.free[workspace].extend(new)

    async def _furnish(self, workspace: str, agent: str) -> None:
        """Let OpenClaw write its files into its own ``workspace``, which two agents at once would trip over.

        ``agent`` asks for that and fails: it has no box."""
        with contextlib.suppress(ClawStopped):
            await self.running.ask("Hello.", agent=agent)
        self.free[workspace] = deque()
        await self.forget(agent)

    def _model(self, agent: str, opened: Opened) -> tuple[TaskFile, TaskFile]:
        """The one model that ``agent`` finds: its own session of the gateway."""
        link = ModelLink(
            base_url=f"http://127.0.0.1:{MODEL_PORT}/s/{opened.id}/v1",
            api_key=opened.secret,
            model=self.gateway.model,
            context_window=getattr(self.gateway.engine, "context_window", 128_000),
            max_tokens=self.claw.max_tokens,
        )
        models = {"providers": {"clawgym": model_provider(link)}}
        key = {"type": "api_key", "provider": "clawgym", "key": link.api_key}
        return (
            TaskFile(f"{agent}/agent/models.json", json.dumps(models).encode()),
            TaskFile(
                f"{agent}/agent/auth-profiles.json",
                json.dumps({"version": 1, "profiles": {"clawgym:default": key}}).encode(),
            ),
        )

    async def _knows(self, agents: Mapping[str, Any]) -> bool:
        status, answer = await request(
            self.box, PORT, "GET", "/v1/models", headers={"authorization": f"Bearer {self.token}"}
        )
        try:
            known = {model["id"].rpartition("/")[2] for model in json.loads(answer)["data"]} if status == 200 else set()
        except (ValueError, LookupError, TypeError):
            known = set()
        return known >= agents.keys()

    async def aclose(self) -> None:
        """Idempotent."""
        await self.undo.aclose()


class _Seated(Booted):
    """A box whose agent is in another one."""

    async def hang_up(self) -> None:
        """The agent's tools reach the box no more; its model ends with its session."""
        assert isinstance(self.running, _Seat)
        await self.running.hang_up()


@dataclass(eq=False)
class _Seat:
    """One agent of the shared process (:class:`~clawgym.agents.blackbox.protocol.Running`)."""

    process: _Process
    agent: str
    hands: Hands

    @property
    def ended(self) -> bool:
        return self.process.ended

    async def ask(self, message: str) -> str:
        """As :meth:`RunningOpenClaw.ask`. Raises :class:`InfraError` where the shared process ended: that is ours."""
        self.hands.begun.clear()
        async with self.process.doors:
            asking = asyncio.ensure_future(self.process.running.ask(message, agent=self.agent))
            begun = asyncio.ensure_future(self.hands.begun.wait())
            try:
                await asyncio.wait((asking, begun, self.hands.failed), return_when=asyncio.FIRST_COMPLETED)
            except BaseException:
                asking.cancel()
                raise
            finally:
                begun.cancel()
        try:
            await asyncio.wait((asking, self.hands.failed), return_when=asyncio.FIRST_COMPLETED)
            if self.hands.failed.done():
                self.hands.failed.result()  # its own box is gone
            return await asking
        except (ClawStopped, SandboxDied) as error:
            if error is _of(self.hands.failed):
                raise
            await asyncio.sleep(_LOOK_SECONDS)  # its end may be about to be noticed
            if isinstance(error, ClawStopped) and not self.process.ended:
                raise
            raise InfraError(f"the shared OpenClaw ended ({self.process.why()}): run the same command again") from error
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    async def files(self) -> Mapping[str, bytes]:
        """OpenClaw's own transcripts of this agent."""
        return await self.process.running.files(self.agent)

    async def hang_up(self) -> None:
        """No tool works any more. Idempotent."""
        await self.process.tools.remove(self.agent)

    async def aclose(self) -> None:
        await self.hands.aclose()
        await self.process.forget(self.agent)


def _of(failed: asyncio.Future[None]) -> BaseException | None:
    return failed.exception() if failed.done() and not failed.cancelled() else None


async def _listen(box: Sandbox, port: int) -> socket.socket:
    if not box.isolation.features["loopback"]:
        raise SandboxUnavailable(
            "dense mode needs boxes with a loopback, which these do not have: use --sandbox namespace"
        )
    return await box.listen(port)
