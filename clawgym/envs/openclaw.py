"""``ClawGym/openclaw-v0``: an unmodified OpenClaw works on a task, and the policy is its model.

The observation is the model request that OpenClaw waits for; the action is the assistant message that answers it.
Episodes run through the same :func:`~clawgym.rollout.run_episode` as in evaluation.

Invariant: a step answers the request of the last observation, or none.
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
from clawgym.envs._policy_engine import ModelRequest, PolicyEngine, RequestQueue
from clawgym.envs._replies import deltas_of, parser_of, reply_of
from clawgym.envs._runner import StepResult, ending
from clawgym.envs._snapshots import Method, SavedEpisode
from clawgym.envs.spaces import AssistantText, openclaw_observation_space
from clawgym.errors import ClawGymError, SnapshotRefused
from clawgym.gateway.server import Gateway
from clawgym.gateway.tool_calls import CallParser
from clawgym.pool import EpisodeEnd, Pool
from clawgym.records import Episode, Outcome, Task
from clawgym.registry import envs
from clawgym.rollout import Ended, EpisodeRequest, RewardName, run_episode
from clawgym.sandbox.protocol import Backend, Sandbox, SandboxSpec

__all__ = ["OpenClawEpisodeRunner", "OpenClawRunnerFactory"]

_REQUESTS = 64
"""Most concurrent requests of one environment: the number of connections from its sandbox."""


class _EpisodeAgent:
    """The shared agent, with the request queue of one episode (:class:`~clawgym.agents.protocol.ResidentAgent`)."""

    def __init__(self, agent: BlackBoxAgent, engine: PolicyEngine, queue: RequestQueue) -> None:
        self._agent = agent
        self._engine = engine
        self._queue = queue
        self.name = agent.name
        self.version = agent.version

    async def open_sandbox(self, backend: Backend, spec: SandboxSpec, *, tools: bool = False) -> Sandbox:
        return await self._agent.open_sandbox(backend, spec, tools=tools)

    async def close_sandbox(self, sandbox: Sandbox) -> None:
        await self._agent.close_sandbox(sandbox)

    def session_of(self, sandbox: Sandbox) -> str | None:
        return self._agent.session_of(sandbox)

    async def close_session(self, sandbox: Sandbox, end: EpisodeEnd) -> AgentArtifacts:
        return await self._agent.close_session(sandbox, end)

    async def run(self, context: AgentContext) -> AgentReport:
        with self._engine.serving(self._agent.reserved_session(context.sandbox), self._queue):
            return await self._agent.run(context)

    def identity(self) -> dict[str, Any]:
        return self._agent.identity()

    async def aclose(self) -> None:
        """Do nothing: the factory closes the shared agent."""


class OpenClawEpisodeRunner:
    """One environment (:class:`~clawgym.envs._runner.EpisodeRunner`)."""

    def __init__(
        self,
        backend: Backend,
        agent: BlackBoxAgent,
        engine: PolicyEngine,
        parser: CallParser | None,
        reward: RewardName,
    ) -> None:
        self._backend = backend
        self._agent = agent
        self._engine = engine
        self._parser = parser
        self._reward: RewardName = reward
        self.last: Episode | None = None
        self._rollout: asyncio.Task[Ended] | None = None
        self._queue = RequestQueue()
        self._request: ModelRequest | None = None
        self._steps = self._max_steps = 0

    async def reset(self, task: Task, seed: int, baseline: float | None) -> tuple[dict[str, Any], dict[str, Any]]:
        """Start the episode and wait for its first request. See :class:`~clawgym.envs._runner.EpisodeRunner`."""
        await self.close()
        self._steps, self._max_steps = 0, task.limits.max_steps
        info: dict[str, Any] = {"task_id": task.id, "task_hash": task.content_hash, "instruction": task.instruction}
        for retry in (True, False):
            queue = self._queue = RequestQueue()
            request = EpisodeRequest(task=task, seed=seed, reward=self._reward, baseline=baseline, keep_workspace=False)
            episode_agent = _EpisodeAgent(self._agent, self._engine, queue)
            self._rollout = asyncio.ensure_future(run_episode(request, episode_agent, self._backend))
            self._rollout.add_done_callback(lambda _, changed=queue.changed: changed.set())
            await self._wait_for_request()
            if not self._rollout.done():
                break
            episode = self._rollout.result().episode
            if episode.outcome is Outcome.INFRA:
                if retry and (episode.cause or "").startswith("setup"):
                    continue
                info["error"] = episode.error
            break
        return self._observe(), info

    async def step(self, action: str) -> StepResult:
        """Answer the request of the last observation."""
        action = str(action)
        if self._rollout is None:
            raise ClawGymError("the episode is over or was never started: call reset() first")
        info: dict[str, Any] = {}
        if not self._rollout.done():
            request = self._request
            assert request is not None
            message, malformed = reply_of(action, self._parser, request.body.get("tools", ()), request.number)
            info = {"malformed_calls": malformed, "heard": self._queue.answer(request, deltas_of(message))}
            self._steps += 1
            await self._wait_for_request()
        if not self._rollout.done():
            return self._observe(), 0.0, False, False, info
        rollout, self._rollout = self._rollout, None
        ended = rollout.result()
        self.last = ended.episode
        return self._observe(), *ending(ended, info)

    async def _wait_for_request(self) -> None:
        """Wait until a request arrives or the episode is over. An interruption closes the episode."""
        rollout, queue = self._rollout, self._queue
        assert rollout is not None
        try:
            while not (rollout.done() or queue.waiting):
                queue.changed.clear()
                await queue.changed.wait()
        except BaseException:
            await self.close()
            raise
        self._request = None if rollout.done() else queue.waiting[0]

    def _observe(self) -> dict[str, Any]:
        request = self._request
        body: Mapping[str, Any] = {} if request is None else request.body
        window = self._engine.context_window
        return {
            "messages": _json(body.get("messages", [])),
            "tools": _json(body.get("tools", [])),
            "role": "" if request is None else str(request.role),
            "request": _count(-1 if request is None else request.number),
            "max_tokens": _count(0 if request is None else body.get("max_tokens") or window),
            "context_window": _count(window),
            "step": _count(self._steps),
            "remaining_steps": _count(max(0, self._max_steps - self._steps)),
        }

    async def snapshot(self, method: Method | None) -> SavedEpisode:
        """Refuse: OpenClaw is a running program, and its requests hold times and random ids."""
        raise SnapshotRefused("OpenClaw is a running program, which cannot be saved: use ClawGym/swe-v0 or terminal-v0")

    async def restore(self, saved: SavedEpisode) -> tuple[dict[str, Any], dict[str, Any]]:
        raise SnapshotRefused("an episode of OpenClaw cannot be restored: reset() the environment")

    async def drop(self, saved: SavedEpisode) -> None:
        """Do nothing: there are no snapshots."""

    def discard(self) -> None:
        """See :class:`~clawgym.envs._runner.EpisodeRunner`."""
        self._rollout = self._request = None
        del self._backend, self._agent, self._engine

    async def close(self) -> None:
        """See :class:`~clawgym.envs._runner.EpisodeRunner`."""
        rollout, self._rollout, self._request = self._rollout, None, None
        if rollout is not None:
            rollout.cancel()
            await asyncio.gather(rollout, return_exceptions=True)


@envs.register("ClawGym/openclaw-v0")
class OpenClawRunnerFactory:
    """An environment in which an unmodified OpenClaw works on the task, and actions are the replies of its model.

    Args:
        version: the installed version of OpenClaw to use (``clawgym agents install openclaw``); by default the tested
            one, or that of ``$OPENCLAW_ROOTFS``.
        prompt: ``reference``, OpenClaw's default prompt, or ``slim``, with a third of the tokens.
        action_format: the format of actions: ``message``, or the name of a parser; see below.
        max_tokens: token limit of one reply, as OpenClaw is told; it is not enforced here.
        context_window: tokens of prompt and reply, as OpenClaw is told; OpenClaw compacts its history accordingly.
        spare: OpenClaws kept ready for the next episodes; default: the number of cores, 1 for a single environment.

    Observation: see :func:`~clawgym.envs.spaces.openclaw_observation_space`. ``json.loads`` of ``messages`` and
    ``tools`` is the request that an engine would get from the gateway. Sub-agents may send requests at the same time as
    the main agent: requests are shown one after another in the order of arrival, with ``role`` and ``request``.

    Actions (str), with ``action_format="message"``: the JSON text of an assistant message in OpenAI's form,
    ``{"content": ..., "tool_calls": [{"function": {"name": ..., "arguments": ...}}], "reasoning_content": ...}``, with
    at least ``content`` or ``tool_calls``. ``arguments`` is JSON text or an object; ids are assigned by the
    environment. Any other text is a message without calls, which ends OpenClaw's turn. With the name of a parser
    (``clawgym list parsers``): text with tool calls as such a model samples it, with reasoning and without end-of-turn
    tokens. No action raises: malformed calls stay text, and ``info["malformed_calls"]`` counts them.

    End: ``terminated`` when OpenClaw has answered the instruction or died; ``truncated`` when the task's model calls or
    seconds (``limits.agent_seconds``) are used up, or after an infrastructure error. The time includes that of the
    policy. When it is over, the workspace is graded, and the next step ends the episode. ``info["heard"]`` is false if
    OpenClaw had cancelled the request before it was answered. The last ``info`` has ``outcome``, ``cause``, ``checks``,
    ``official``, ``strict`` and ``tampered``.

    Raises:
        AgentError: OpenClaw is not installed.
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
        self._engine = PolicyEngine(context_window)
        self._spare = spare
        self._stack = contextlib.AsyncExitStack()

    async def open(self, backend: Backend, num_envs: int) -> None:
        self._backend = backend
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        spare = min(num_envs, cores) if self._spare is None else self._spare
        folder = tempfile.mkdtemp(prefix="clawgym-")
        # Not a TemporaryDirectory: its copy in a forked process would remove the folder.
        self._stack.callback(weakref.finalize(self, _remove, folder, os.getpid()))
        try:
            pool = self._stack.enter_context(contextlib.closing(Pool(Path(folder) / "pool.db")))
            gateway = Gateway(self._engine, pool, streams=_REQUESTS * num_envs)
            self._engine.gateway = await self._stack.enter_async_context(gateway)
        except BaseException:
            await self._stack.aclose()
            raise
        self._agent = BlackBoxAgent(self._claw, gateway=gateway, spare=spare, max_tokens=self._max_tokens)

    def runner(self, reward: RewardName) -> OpenClawEpisodeRunner:
        return OpenClawEpisodeRunner(self._backend, self._agent, self._engine, self._parser, reward)

    def frame(self, observation: dict[str, Any]) -> str:
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
