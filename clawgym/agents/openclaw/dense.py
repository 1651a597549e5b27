"""Agent ``openclaw-dense``: one OpenClaw process for all tasks, and a sandbox for each task, where its tools work.

For small machines (docs/how-to/openclaw.md). Isolation is weaker than with one OpenClaw per sandbox, since the
agents share a process. Invariants: a tool works only in the sandbox of its own task. Each of OpenClaw's agents gets one
task and is then removed. If the shared process ends, its episodes end with an infrastructure error.
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

from clawgym.agents.blackbox.http import request
from clawgym.agents.blackbox.protocol import ClawStopped, ModelLink
from clawgym.agents.blackbox.sandboxes import PORT as MODEL_PORT
from clawgym.agents.blackbox.sandboxes import BootedSandbox
from clawgym.agents.openclaw._dense_config import (
    PLUGIN,
    SECONDS,
    TOOLS_PORT,
    configuration_of,
    plugin,
    plugin_files,
)
from clawgym.agents.openclaw._tools import AgentTools, OpenClawToolServer
from clawgym.agents.openclaw.claw import FOLDER, HOME, PORT, OpenClaw, RunningOpenClaw
from clawgym.agents.openclaw.config import Prompt, model_provider
from clawgym.errors import AgentError, InfraError, SandboxDied, SandboxError, SandboxUnavailable
from clawgym.gateway.request import SessionCredentials, reserve_session
from clawgym.gateway.server import Address, Gateway
from clawgym.records import Limits, TaskFile
from clawgym.registry import agents
from clawgym.sandbox.protocol import Backend, Sandbox, SandboxSpec

__all__ = ["DenseOpenClaw"]

_log = logging.getLogger("clawgym.agents")
_SPARE = 32
"""Agents that are registered ahead: reading a new configuration takes OpenClaw half a second for any number of them."""
_MEMORY_MB = 4096
_NODE_OPTIONS = ["--max-old-space-size=3072"]
"""Comes after the same option for a small OpenClaw: Node uses the last one."""
_REGISTER_SECONDS = 60.0
_POLL_SECONDS = 0.05
_POLLS = 100
_MAX_STARTS = 4
"""Agents that start a turn at the same time, at most: each needs OpenClaw's lock on its list of containers, and gives
up after ten seconds."""


@agents.register("openclaw-dense")
class DenseOpenClaw(OpenClaw):
    """An unmodified OpenClaw, started once for all tasks; weaker isolation than ``openclaw``.

    Implements :class:`~clawgym.agents.blackbox.sandboxes.SandboxSource`. Needs a sandbox backend with a loopback.

    Args:
        version: the installed version to use; by default the one that ``clawgym agents install openclaw`` installs.
        prompt: ``reference``, OpenClaw's default prompt, or ``slim``, a shorter one (docs/how-to/openclaw.md).
        max_tokens: token limit of one reply.

    Raises:
        AgentError: OpenClaw is not installed, or ``$OPENCLAW_ROOTFS`` is set.
    """

    name = "openclaw-dense"

    def __init__(self, version: str | None = None, *, prompt: Prompt = "reference", max_tokens: int = 8192) -> None:
        super().__init__(version, prompt=prompt)
        if self.installation is None:
            raise AgentError("openclaw-dense uses the installed OpenClaw: unset OPENCLAW_ROOTFS")
        self._folder = self.installation.folder
        self.max_tokens = max_tokens
        self._processes: dict[Hashable, _Process] = {}
        self._starting = asyncio.Lock()

    async def take(
        self, backend: Backend, spec: SandboxSpec, gateway: Gateway, *, tools: bool = False
    ) -> BootedSandbox:
        """Return a sandbox for one episode, with an agent of the shared process that works in it.

        Raises:
            SandboxUnavailable: the sandboxes of ``backend`` have no loopback.
            InfraError: OpenClaw does not start, or does not accept another agent.
        """
        process = await self._process(backend, gateway)
        mounts = {**spec.mounts, FOLDER: self._folder}  # skills and documentation that the prompt refers to
        sandbox = await backend.create(replace(spec, mounts=mounts))
        try:
            return await process.assign(sandbox)
        except BaseException:
            await sandbox.close()
            raise

    async def _process(self, backend: Backend, gateway: Gateway) -> _Process:
        key = (id(backend), id(gateway))
        async with self._starting:
            process = self._processes.get(key)
            if process is None or process.ended:
                if process is not None:
                    _log.warning("the shared OpenClaw ended (%s); starting it again", process.why())
                    await process.aclose()
                process = self._processes[key] = await _Process.start(self, backend, gateway)
        return process

    def identity(self) -> dict[str, Any]:
        """See :class:`~clawgym.agents.blackbox.protocol.Claw`."""
        return {**super().identity(), "mode": "dense", "plugin_sha256": hashlib.sha256(plugin()).hexdigest()}

    async def aclose(self) -> None:
        """End the shared processes."""
        for process in self._processes.values():
            await process.aclose()
        self._processes.clear()


@dataclass(eq=False)
class _Process:
    """One shared OpenClaw, in its own sandbox."""

    claw: DenseOpenClaw
    gateway: Gateway
    sandbox: Sandbox
    tools: OpenClawToolServer
    token: str
    running: RunningOpenClaw
    address: Address
    cleanup: contextlib.AsyncExitStack
    workspaces: dict[str, str] = field(default_factory=dict)
    """Agent -> workspace, for all agents in OpenClaw's configuration."""
    sessions: dict[str, SessionCredentials] = field(default_factory=dict)
    """Agent -> its reserved gateway session."""
    free: dict[str, deque[str]] = field(default_factory=dict)
    """Workspace -> registered agents that are unused."""
    starts: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_MAX_STARTS))
    registering: asyncio.Lock = field(default_factory=asyncio.Lock)
    wanted: dict[str, int] = field(default_factory=dict)
    """Workspace -> number of callers that wait for an agent."""

    @classmethod
    async def start(cls, claw: DenseOpenClaw, backend: Backend, gateway: Gateway) -> _Process:
        """Start OpenClaw in a new sandbox.

        Raises as :meth:`Backend.create` does, and :class:`InfraError` if OpenClaw does not start.
        """
        cores = float(len(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else 1.0
        limits = Limits(
            memory_mb=_MEMORY_MB, pids=4096, cpus=cores, disk_mb=1024, agent_seconds=SECONDS, command_seconds=60.0
        )
        spec = claw.spec(SandboxSpec(limits=limits, readonly={PLUGIN: plugin_files()}))
        try:
            sandbox = await backend.create(spec)
        except SandboxUnavailable:
            raise
        except SandboxError as error:
            raise InfraError(f"no sandbox could be created for OpenClaw ({error}): run `clawgym doctor`") from error
        async with contextlib.AsyncExitStack() as cleanup:
            cleanup.push_async_callback(sandbox.close)
            tools = OpenClawToolServer()
            cleanup.push_async_callback(tools.aclose)
            await tools.start(await _listen(sandbox, TOOLS_PORT))
            address = await gateway.listen(sock=await _listen(sandbox, MODEL_PORT))
            cleanup.push_async_callback(gateway.unlisten, address)
            token = secrets.token_urlsafe(24)
            config = configuration_of(claw, gateway.model, token, tools.key, {})
            await sandbox.put([TaskFile("openclaw.json", json.dumps(config).encode())], f"{HOME}/.openclaw")
            argv = claw.argv(ModelLink("", ""))
            entry = next(place for place, word in enumerate(argv) if word.endswith(".mjs"))
            running = RunningOpenClaw(sandbox, token, [*argv[:entry], *_NODE_OPTIONS, *argv[entry:]], claw.env())
            cleanup.push_async_callback(running.aclose)
            await claw.wait(running)
            return cls(claw, gateway, sandbox, tools, token, running, address, cleanup.pop_all())
        raise AssertionError

    @property
    def ended(self) -> bool:
        return self.running.ended

    def why(self) -> str:
        """Return the exit code and the end of its output."""
        return self.running.why()[-500:]

    async def assign(self, sandbox: Sandbox) -> BootedSandbox:
        """Assign an unused agent to ``sandbox``. Raises :class:`InfraError`."""
        agent = await self._agent(sandbox.spec.workdir)
        agent_tools = self.tools.add(agent, sandbox)
        return _SharedSandbox(
            sandbox, _SharedAgent(self, agent, agent_tools), self.sessions[agent], self.address, self.gateway
        )

    async def forget(self, agent: str) -> None:
        """Remove the tools, the model and the files of ``agent``.

        The configuration drops its name when the next agents are registered.
        """
        await self.tools.remove(agent)
        self.workspaces.pop(agent, None)
        self.sessions.pop(agent, None)
        with contextlib.suppress(SandboxError):
            await self.sandbox.exec(["rm", "-rf", "--", f"{HOME}/.openclaw/agents/{agent}"])

    async def _agent(self, workspace: str) -> str:
        """Return a registered agent that is unused; register more if there is none."""
        self.wanted[workspace] = self.wanted.get(workspace, 0) + 1
        try:
            async with self.registering:
                if not self.free.get(workspace):
                    await self._register(workspace, self.wanted[workspace] + _SPARE + 1)
                return self.free[workspace].popleft()
        finally:
            self.wanted[workspace] -= 1

    async def _register(self, workspace: str, count: int) -> None:
        """Add ``count`` agents to OpenClaw's configuration and wait until it lists them. Raises InfraError."""
        new = {secrets.token_hex(8): reserve_session() for _ in range(count)}
        self.workspaces |= dict.fromkeys(new, workspace)
        config = configuration_of(self.claw, self.gateway.model, self.token, self.tools.key, self.workspaces)
        files = [TaskFile("openclaw.json", json.dumps(config).encode())]
        models = [file for agent, opened in new.items() for file in self._model_files(agent, opened)]
        try:
            async with asyncio.timeout(_REGISTER_SECONDS):
                await self.sandbox.put(models, f"{HOME}/.openclaw/agents")  # before the configuration
                polls = 0
                while not await self._knows(new):
                    if polls % _POLLS == 0:  # again: OpenClaw may miss a change while it starts
                        await self.sandbox.put(files, f"{HOME}/.openclaw")
                    polls += 1
                    await asyncio.sleep(_POLL_SECONDS)
        except (ClawStopped, SandboxError, TimeoutError) as error:
            for agent in new:
                del self.workspaces[agent]
            raise InfraError(
                f"the shared OpenClaw does not accept more agents ({error}): run the same command again"
            ) from error
        self.sessions |= new
        if workspace not in self.free:
            await self._initialize_workspace(workspace, new.popitem()[0])
        self.free[workspace].extend(new)

    async def _initialize_workspace(self, workspace: str, agent: str) -> None:
        """Let OpenClaw write its files into its own copy of ``workspace``; two agents at once would conflict.

        A message to ``agent`` triggers this and then fails, since the agent has no sandbox.
        """
        with contextlib.suppress(ClawStopped):
            await self.running.ask("Hello.", agent=agent)
        self.free[workspace] = deque()
        await self.forget(agent)

    def _model_files(self, agent: str, opened: SessionCredentials) -> tuple[TaskFile, TaskFile]:
        """Return the files that give ``agent`` its only model: its own session of the gateway."""
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
            self.sandbox, PORT, "GET", "/v1/models", headers={"authorization": f"Bearer {self.token}"}
        )
        try:
            known = {model["id"].rpartition("/")[2] for model in json.loads(answer)["data"]} if status == 200 else set()
        except (ValueError, LookupError, TypeError):
            known = set()
        return known >= agents.keys()

    async def aclose(self) -> None:
        """End OpenClaw and close its sandbox. Idempotent."""
        await self.cleanup.aclose()


class _SharedSandbox(BootedSandbox):
    """The sandbox of a task whose agent runs in the shared process."""

    async def disconnect(self) -> None:
        """Stop the agent's tools. Its model ends with its session."""
        assert isinstance(self.running, _SharedAgent)
        await self.running.stop()


@dataclass(eq=False)
class _SharedAgent:
    """One agent of the shared process (:class:`~clawgym.agents.blackbox.protocol.Running`)."""

    process: _Process
    agent: str
    agent_tools: AgentTools

    @property
    def ended(self) -> bool:
        return self.process.ended

    async def ask(self, message: str) -> str:
        """As :meth:`RunningOpenClaw.ask`. Raises :class:`InfraError` if the shared process ended."""
        self.agent_tools.started.clear()
        async with self.process.starts:
            asking = asyncio.ensure_future(self.process.running.ask(message, agent=self.agent))
            started = asyncio.ensure_future(self.agent_tools.started.wait())
            try:
                await asyncio.wait((asking, started, self.agent_tools.failed), return_when=asyncio.FIRST_COMPLETED)
            except BaseException:
                asking.cancel()
                raise
            finally:
                started.cancel()
        try:
            await asyncio.wait((asking, self.agent_tools.failed), return_when=asyncio.FIRST_COMPLETED)
            if self.agent_tools.failed.done():
                self.agent_tools.failed.result()  # raises: the sandbox of the task ended
            return await asking
        except (ClawStopped, SandboxDied) as error:
            if error is _of(self.agent_tools.failed):
                raise
            await asyncio.sleep(_POLL_SECONDS)  # the process may have just ended
            if isinstance(error, ClawStopped) and not self.process.ended:
                raise
            raise InfraError(f"the shared OpenClaw ended ({self.process.why()}): run the same command again") from error
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    async def files(self) -> Mapping[str, bytes]:
        """Return OpenClaw's own transcripts of this agent."""
        return await self.process.running.files(self.agent)

    async def stop(self) -> None:
        """Stop the tools. Idempotent."""
        await self.process.tools.remove(self.agent)

    async def aclose(self) -> None:
        await self.agent_tools.aclose()
        await self.process.forget(self.agent)


def _of(failed: asyncio.Future[None]) -> BaseException | None:
    return failed.exception() if failed.done() and not failed.cancelled() else None


async def _listen(sandbox: Sandbox, port: int) -> socket.socket:
    if not sandbox.isolation.features["loopback"]:
        raise SandboxUnavailable(
            "openclaw-dense needs sandboxes with a loopback, which these do not have: use --sandbox namespace"
        )
    return await sandbox.listen(port)
