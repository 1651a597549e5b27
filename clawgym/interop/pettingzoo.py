"""PettingZoo: both sides of a dialogue, such as agent and customer of tau2-bench, as an environment for two agents.

    game = dialogue_v0("tau2-bench")
    game.reset(seed=7)
    for agent in game.agent_iter():
        observation, reward, terminated, truncated, info = game.last()
        game.step(None if terminated or truncated else policies[agent](observation))

Needs the package ``pettingzoo``.

Invariants: an episode is that of :func:`~clawgym.rollout.run_episode`, with the agent ``tool-loop``. Each model request
of either side waits until its agent acts. Exactly one side waits at a time.
"""

from __future__ import annotations

import asyncio
import json
import threading
import uuid
import weakref
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import gymnasium as gym
import numpy as np

from clawgym.agents.tool_loop import ToolLoopAgent
from clawgym.engines.protocol import Completion, Sampling
from clawgym.envs.spaces import AssistantText, JsonList
from clawgym.errors import MissingDependency, TaskError
from clawgym.records import Outcome, Task, TaskSet, ToolCall
from clawgym.rollout import Ended, EpisodeRequest, RewardName, run_episode
from clawgym.sandbox import Backend, backend
from clawgym.simulation.customer import Customer
from clawgym.tasks.sets import load

try:
    from pettingzoo import AECEnv  # pyright: ignore[reportMissingImports]
except ImportError as error:
    raise MissingDependency(f"PettingZoo is needed ({error}): pip install pettingzoo") from error

__all__ = ["ASSISTANT", "CUSTOMER", "DialogueGame", "PlayedCustomer", "dialogue_v0"]

ASSISTANT, CUSTOMER = "assistant_0", "customer_0"
T = TypeVar("T")


class _Seat:
    """An :class:`~clawgym.engines.protocol.Engine` whose replies are the actions of one agent."""

    name = "pettingzoo"

    def __init__(self, changed: asyncio.Event) -> None:
        self._changed = changed
        self._count = 0
        self.messages: Sequence[Mapping[str, Any]] = ()
        self.tools: Sequence[Mapping[str, Any]] = ()
        self.action: asyncio.Future[str] | None = None
        """What the side waits for; None: it does not wait."""

    async def complete(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] = (), sampling: Sampling
    ) -> Completion:
        self.messages, self.tools = list(messages), list(tools)
        self.action = asyncio.get_running_loop().create_future()
        self._changed.set()
        try:
            action = await self.action
        finally:
            self.action = None
        self._count += 1
        return _completion(action, self._count)

    def identity(self) -> dict[str, Any]:
        return {"name": self.name}

    async def aclose(self) -> None:
        """Do nothing: a seat has no connection."""


_seats: weakref.WeakValueDictionary[str, _Seat] = weakref.WeakValueDictionary()


class PlayedCustomer(Customer):
    """The user of a dialogue, played by an agent of PettingZoo.

    Args:
        prompt, stops, script: see :class:`~clawgym.simulation.customer.Customer`; the script is not used.
        seat: names the seat of the agent.
    """

    def __init__(self, prompt: str, stops: list[str], script: list[dict[str, Any]], seat: str) -> None:
        self._model = _Seat.name
        self._stops, self._script = tuple(stops), []
        self._messages = [{"role": "system", "content": prompt}]
        self._seat = _seats[seat]

    def _engine(self) -> _Seat:
        return self._seat


class DialogueGame(AECEnv):
    """A dialogue of two agents, which take turns.

    Args:
        tasks: a task set or its name, of tasks with a dialogue whose user is ``customer``.
        backend: the sandbox backend.
        reward: the score that both agents get at the end.

    ``assistant_0`` has the tools of the task, and ``customer_0`` those that the task keeps for its user. Both act until
    they say something, then it is the other's turn.

    Observation: ``messages`` and ``tools``, JSON text of the model request that the agent is to answer. Actions (str):
    JSON text of an assistant message with ``content`` or ``tool_calls`` (OpenAI's form); other text is said as it is.

    End: the customer says one of the stop words of its prompt, or a budget of the task is used up. Both agents are
    terminated, or truncated. The last info has ``outcome``, ``cause`` and ``checks``.

    ``reset(options={"task_id": ...})`` names the task; otherwise the seed draws it.

    Raises:
        TaskError: no task of the set is such a dialogue.
    """

    metadata: dict[str, Any] = {"name": "dialogue_v0", "render_modes": ["ansi"]}  # noqa: RUF012

    def __init__(self, tasks: str | TaskSet, *, backend: str = "auto", reward: RewardName = "official") -> None:
        super().__init__()
        given = load(tasks) if isinstance(tasks, str) else tasks
        self._tasks = {
            task.id: task
            for task in given.tasks
            if not task.unsupported and task.dialogue is not None and task.dialogue.user == "customer"
        }
        if not self._tasks:
            raise TaskError(f"{given.name!r} has no dialogue with a customer: use a set such as tau2-bench")
        self.render_mode = "ansi"
        self.possible_agents = [ASSISTANT, CUSTOMER]
        self.agents: list[str] = []
        self.observation_spaces = {
            agent: gym.spaces.Dict({"messages": JsonList(1 << 28), "tools": JsonList(1 << 28)})
            for agent in self.possible_agents
        }
        self.action_spaces = {agent: AssistantText() for agent in self.possible_agents}
        self._reward: RewardName = reward
        self._rng = np.random.default_rng()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._backend_name, self._backend = backend, None
        self._rollout: asyncio.Task[Ended] | None = None
        self._seats: dict[str, _Seat] = {}

    def observation_space(self, agent: str) -> gym.Space[Any]:
        return self.observation_spaces[agent]

    def action_space(self, agent: str) -> gym.Space[Any]:
        return self.action_spaces[agent]

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        if seed is not None:
            self._rng = np.random.default_rng(seed)
            for number, space in enumerate(self.action_spaces.values()):
                space.seed(seed + number)
        names = list(self._tasks)
        name = (options or {}).get("task_id") or names[int(self._rng.integers(len(names)))]
        if name not in self._tasks:
            raise TaskError(f"no task {name!r} with a customer: use one of the set's (`clawgym tasks show`)")
        self.agents = list(self.possible_agents)
        self.rewards = dict.fromkeys(self.agents, 0.0)
        self._cumulative_rewards = dict.fromkeys(self.agents, 0.0)
        self.terminations = dict.fromkeys(self.agents, False)
        self.truncations = dict.fromkeys(self.agents, False)
        about = {"task_id": name, "task_hash": self._tasks[name].content_hash}
        self.infos: dict[str, dict[str, Any]] = {agent: dict(about) for agent in self.agents}
        self.agent_selection = ASSISTANT
        self._skip_agent_selection = None
        self._call(self._begin(self._tasks[name], int(self._rng.integers(2**31))))
        self._took_turn()

    def observe(self, agent: str) -> dict[str, Any]:
        seat = self._seats[agent]
        return {
            "messages": json.dumps(seat.messages, ensure_ascii=False),
            "tools": json.dumps(seat.tools, ensure_ascii=False),
        }

    def step(self, action: str | None) -> None:
        agent = self.agent_selection
        if self.terminations[agent] or self.truncations[agent]:
            self._was_dead_step(action)
            return
        self._cumulative_rewards[agent] = 0.0
        self._clear_rewards()
        self._call(self._act(agent, str(action)))
        self._took_turn()
        self._accumulate_rewards()

    def render(self) -> str:
        """What was said and done last, as the agent sees it whose turn it is."""
        messages = self._seats[self.agent_selection].messages if self._seats else ()
        return "\n".join(f"[{m['role']}] {m.get('content') or ''}" for m in messages)

    def close(self) -> None:
        if self._loop.is_closed():
            return
        self._call(self._shut_down())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _begin(self, task: Task, seed: int) -> None:
        await self._end()
        if self._backend is None:
            self._backend: Backend | None = backend(self._backend_name)
        self._changed = asyncio.Event()
        self._seats = {agent: _Seat(self._changed) for agent in self.possible_agents}
        assert task.dialogue is not None
        place = uuid.uuid4().hex
        _seats[place] = self._seats[CUSTOMER]
        user = f"{__name__}:{PlayedCustomer.__name__}"
        dialogue = replace(task.dialogue, user=user, options={**task.dialogue.options, "seat": place})
        request = EpisodeRequest(
            task=replace(task, dialogue=dialogue), seed=seed, reward=self._reward, keep_workspace=False
        )
        agent = ToolLoopAgent(self._seats[ASSISTANT])
        self._rollout = asyncio.ensure_future(run_episode(request, agent, self._backend))
        self._rollout.add_done_callback(lambda _, changed=self._changed: changed.set())
        await self._changed.wait()

    async def _act(self, agent: str, action: str) -> None:
        waiting = self._seats[agent].action
        self._changed.clear()
        if waiting is not None and not waiting.done():  # otherwise a time limit ended the episode meanwhile
            waiting.set_result(action)
        elif self._rollout is not None and self._rollout.done():
            return
        await self._changed.wait()

    def _took_turn(self) -> None:
        """Select the agent that acts next, or end the game."""
        assert self._rollout is not None
        if not self._rollout.done():
            self.agent_selection = next(name for name, seat in self._seats.items() if seat.action is not None)
            return
        ended = self._rollout.result()
        episode = ended.episode
        about: dict[str, Any] = {"outcome": str(episode.outcome), "cause": episode.cause or ""}
        if episode.result is not None:
            about["checks"] = dict(episode.result.checks)
        if episode.outcome is Outcome.INFRA:
            about["error"] = episode.error
        for agent in self.agents:
            self.rewards[agent] = ended.reward or 0.0
            self.terminations[agent], self.truncations[agent] = not ended.truncated, ended.truncated
            self.infos[agent] |= about

    async def _end(self) -> None:
        rollout, self._rollout = self._rollout, None
        if rollout is not None:
            rollout.cancel()
            await asyncio.gather(rollout, return_exceptions=True)

    async def _shut_down(self) -> None:
        await self._end()
        if self._backend is not None:
            await self._backend.aclose()


dialogue_v0 = DialogueGame
"""The name by which environments of PettingZoo are made."""


def _completion(action: str, number: int) -> Completion:
    """An action as the reply of a model. Never raises."""
    try:
        said = json.loads(action)
    except (ValueError, RecursionError):
        return Completion(action)
    if not isinstance(said, dict) or not said.keys() & {"content", "tool_calls"}:
        return Completion(action)
    calls: list[ToolCall] = []
    malformed: list[str] = []
    made = said.get("tool_calls")
    for one in made if isinstance(made, list) else ():
        function = one.get("function") if isinstance(one, dict) else None
        name, arguments = (function.get("name"), function.get("arguments")) if isinstance(function, dict) else ("", "")
        try:
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        except (ValueError, RecursionError):
            pass
        if isinstance(name, str) and isinstance(arguments, dict):
            calls.append(ToolCall(f"call{number:06}{len(calls):03}", name, arguments))
        else:
            malformed.append(str(one)[:1000])
    text = said.get("content")
    return Completion(text if isinstance(text, str) else "", tuple(calls), tuple(malformed))
