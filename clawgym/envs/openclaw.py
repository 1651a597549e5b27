"""``ClawGym/openclaw-v0``: an unmodified OpenClaw works on a task; the policy is its model.

The observation is the model request that OpenClaw waits on, the action the assistant message that answers it. The
episode is the rollout that evaluation runs.

Invariant: a step answers the request that the last observation showed, or none.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from clawgym.agents.blackbox import BlackBoxAgent
from clawgym.agents.openclaw.claw import OpenClaw
from clawgym.agents.openclaw.config import Prompt
from clawgym.agents.protocol import AgentArtifacts, AgentContext, AgentReport
from clawgym.envs._replies import deltas_of, parser_of, reply_of
from clawgym.envs._turnstile import Asked, Seat, Turnstile
from clawgym.envs._worker import StepResult, ending
from clawgym.envs.spaces import AssistantText, openclaw_observation_space
from clawgym.errors import ClawGymError
from clawgym.gateway.server import Gateway
from clawgym.gateway.tool_calls import CallParser
from clawgym.pool import EpisodeEnd, Pool
from clawgym.records import Episode, Outcome, Task
from clawgym.registry import envs
from clawgym.rollout import Ended, EpisodeRequest, RewardName, run_episode
from clawgym.sandbox.protocol import Backend, Sandbox, SandboxSpec

__all__ = ["OpenClawKit", "OpenClawWorker"]

_REQUESTS = 64
"""Of one environment, at once: as many as connections from its sandbox."""


class _Seated:
    """The shared agent, for one episode (:class:`~clawgym.agents.protocol.ResidentAgent`)."""

    def __init__(self, agent: BlackBoxAgent, turnstile: Turnstile, seat: Seat) -> None:
        self._agent = agent
        self._turnstile = turnstile
        self._seat = seat
        self.name = agent.name
        self.version = agent.version

    async def open_sandbox(self, backend: Backend, spec: SandboxSpec) -> Sandbox:
        return await self._agent.open_sandbox(backend, spec)

    async def close_sandbox(self, sandbox: Sandbox) -> None:
        await self._agent.close_sandbox(sandbox)

    def session_of(self, sandbox: Sandbox) -> str | None:
        return self._agent.session_of(sandbox)

    async def close_session(self, sandbox: Sandbox, end: EpisodeEnd) -> AgentArtifacts:
        return await self._agent.close_session(sandbox, end)

    async def run(self, context: AgentContext) -> AgentReport:
        with self._turnstile.taken(self._agent.reserved_session(context.sandbox), self._seat):
            return await self._agent.run(context)

    def identity(self) -> dict[str, Any]:
        return self._agent.identity()

    async def aclose(self) -> None:
        """The shared agent is closed by its owner."""


class OpenClawWorker:
    """One environment (:class:`~clawgym.envs._worker.Worker`)."""

    def __init__(
        self,
        backend: Backend,
        agent: BlackBoxAgent,
        turnstile: Turnstile,
        parser: CallParser | None,
        reward: RewardName,
    ) -> None:
        self._backend = backend
        self._agent = agent
        self._turnstile = turnstile
        self._parser = parser
        self._reward: RewardName = reward
        self.last: Episode | None = None
        self._play: asyncio.Task[Ended] | None = None
        self._seat = Seat()
        self._shown: Asked | None = None
        self._steps = self._most = 0

    async def reset(self, task: Task, seed: int, floor: float | None) -> tuple[dict[str, Any], dict[str, Any]]:
        """Start the episode; returns with its first request. See :class:`~clawgym.envs._worker.Worker`."""
        await self.close()
        self._steps, self._most = 0, task.limits.max_steps
        info: dict[str, Any] = {"task_id": task.id, "task_hash": task.content_hash, "instruction": task.instruction}
        for retry in (True, False):
            seat = self._seat = Seat()
            request = EpisodeRequest(task=task, seed=seed, reward=self._reward, baseline=floor, keep_workspace=False)
            seated = _Seated(self._agent, self._turnstile, seat)
            self._play = asyncio.ensure_future(run_episode(request, seated, self._backend))
            self._play.add_done_callback(lambda _, changed=seat.changed: changed.set())
            await self._until_asked()
            if not self._play.done():
                break
            episode = self._play.result().episode
            if episode.outcome is Outcome.INFRA:
                if retry and (episode.cause or "").startswith("setup"):
                    continue
                info["error"] = episode.error
            break
        return self._observe(), info

    async def step(self, action: str) -> StepResult:
        """Answer the request that was shown last."""
        action = str(action)
        if self._play is None:
            raise ClawGymError("the episode is over or was never started: call reset() first")
        info: dict[str, Any] = {}
        if not self._play.done():
            asked = self._shown
            assert asked is not None
            message, malformed = reply_of(action, self._parser, asked.body.get("tools", ()), asked.number)
            info = {"malformed_calls": malformed, "heard": self._seat.answer(asked, deltas_of(message))}
            self._steps += 1
            await self._until_asked()
        if not self._play.done():
            return self._observe(), 0.0, False, False, info
        play, self._play = self._play, None
        ended = play.result()
        self.last = ended.episode
        return self._observe(), *ending(ended, info)

    async def _until_asked(self) -> None:
        """Wait until a request waits, or the episode is over; whoever is interrupted here has no episode any more."""
        play, seat = self._play, self._seat
        assert play is not None
        try:
            while not (play.done() or seat.line):
                seat.changed.clear()
                await seat.changed.wait()
        except BaseException:
            await self.close()
            raise
        self._shown = None if play.done() else seat.line[0]

    def _observe(self) -> dict[str, Any]:
        asked = self._shown
        body: Mapping[str, Any] = {} if asked is None else asked.body
        window = self._turnstile.context_window
        return {
            "messages": _json(body.get("messages", [])),
            "tools": _json(body.get("tools", [])),
            "role": "" if asked is None else str(asked.role),
            "request": _count(-1 if asked is None else asked.number),
            "max_tokens": _count(0 if asked is None else body.get("max_tokens") or window),
            "context_window": _count(window),
            "step": _count(self._steps),
            "remaining_steps": _count(max(0, self._most - self._steps)),
        }

    def forget(self) -> None:
        """See :class:`~clawgym.envs._worker.Worker`."""
        self._play = self._shown = None
        del self._backend, self._agent, self._turnstile

    async def close(self) -> None:
        """See :class:`~clawgym.envs._worker.Worker`."""
        play, self._play, self._shown = self._play, None, None
        if play is not None:
            play.cancel()
            await asyncio.gather(play, return_exceptions=True)


@envs.register("ClawGym/openclaw-v0")
class OpenClawKit:
    """OpenClaws whose model is the policy (:class:`~clawgym.envs._worker.Kit`).

    Args:
        version: of OpenClaw, as installed (``clawgym openclaw install``); default: the one that is known to work,
            or that of ``$OPENCLAW_ROOTFS``.
        prompt: ``reference``, what OpenClaw makes of its defaults, or ``slim``, a third of the tokens.
        action_format: what an action is; see below.
        max_tokens: of one answer, as OpenClaw is told. Nothing is counted here.
        context_window: tokens of prompt and answer, as OpenClaw is told; it sums up its history by it.
        spare: OpenClaws kept booted for the next episodes (default: the cores here, one for a single environment).

    Observation: see :func:`~clawgym.envs.spaces.openclaw_observation_space`. ``json.loads`` of ``messages`` and
    ``tools`` is the request, as every engine gets it from the gateway. Sub-agents may ask while the main agent does:
    their requests are shown one after another in the order they came, ``role`` and ``request`` tell them apart.

    Action (str), with ``action_format="message"``: JSON text of an assistant message in OpenAI's form, ``{"content":
    ..., "tool_calls": [{"function": {"name": ..., "arguments": ...}}], "reasoning_content": ...}``, ``content`` or
    ``tool_calls`` at least; ``arguments`` JSON text or an object; ids are made here. Any other text is said as it
    stands, without calls, which ends OpenClaw's turn. With the name of a parser (``clawgym list parsers``): the text as
    a model that writes such calls samples it, reasoning included, end-of-turn tokens left out. What is malformed stays
    text, as the gateway has it, and ``info["malformed_calls"]`` counts it; no action raises.

    An episode ends when OpenClaw has answered the instruction: ``terminated``, also when it died. ``truncated`` when
    the task's model calls or seconds are used up, or the host failed. The seconds are the task's own
    (``limits.agent_seconds``) and run while the policy thinks; past them the work is graded as it stands, and the next
    step says so. ``info["heard"]`` is false where OpenClaw had given up the request before it was answered. The last
    ``info`` holds ``outcome``, ``cause``, ``checks``, ``official``, ``strict``, ``tampered``.

    Raises :class:`~clawgym.errors.AgentError` if OpenClaw is not installed.
    """

    default_tasks = "terminal-basic:train"
    render_mode = "ansi"

    def __init__(
        self,
        *,
        version: str | None = None,
        prompt: Prompt = "reference",
        action_format: str = "message",
        max_tokens: int = 8192,
        context_window: int = 128_000,
        spare: int | None = None,
    ) -> None:
        self._parser = parser_of(action_format)
        self.action_space: gym.spaces.Text = AssistantText(action_format)
        self.observation_space = openclaw_observation_space()
        self._claw = OpenClaw(version, prompt=prompt)
        self._max_tokens = max_tokens
        self._turnstile = Turnstile(context_window)
        self._spare = spare
        self._stack = contextlib.AsyncExitStack()

    async def open(self, backend: Backend, num_envs: int) -> None:
        self._backend = backend
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        spare = min(num_envs, cores) if self._spare is None else self._spare
        folder = tempfile.mkdtemp(prefix="clawgym-")
        # Not a TemporaryDirectory: a fork's copy would remove the folder under us.
        self._stack.callback(weakref.finalize(self, _remove, folder, os.getpid()))
        try:
            pool = self._stack.enter_context(contextlib.closing(Pool(Path(folder) / "pool.db")))
            gateway = Gateway(self._turnstile, pool, streams=_REQUESTS * num_envs)
            self._turnstile.gateway = await self._stack.enter_async_context(gateway)
        except BaseException:
            await self._stack.aclose()
            raise
        self._agent = BlackBoxAgent(self._claw, gateway=gateway, spare=spare, max_tokens=self._max_tokens)

    def worker(self, reward: RewardName) -> OpenClawWorker:
        return OpenClawWorker(self._backend, self._agent, self._turnstile, self._parser, reward)

    def screen(self, observation: dict[str, Any]) -> str:
        messages = json.loads(observation["messages"])
        begin = max((n + 1 for n, m in enumerate(messages) if m["role"] == "assistant"), default=0)
        return "\n".join(f"[{m['role']}] {m['content']}" for m in messages[begin:])

    async def aclose(self) -> None:
        await self._agent.aclose()
        await self._stack.aclose()


def _remove(folder: str, owner: int) -> None:
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _count(value: int) -> np.ndarray:
    return np.array(value, dtype=np.int64)
