"""tinker-cookbook: tasks of this library for its RL loop (``tinker_cookbook.rl.train``).

    config = Config(dataset_builder=ClawGymDatasetBuilder(tasks="terminal-basic:train", model=MODEL), ...)
    asyncio.run(main(config))

An episode is our agent ``tool-loop`` behind our gateway. The gateway's prompt is the observation, and the ids that the
cookbook's policy sampled are the action. Needs the package ``tinker-cookbook``.

Invariants: ids are passed on, never encoded again: an observation starts with the observation and the action before it,
unless the history was rewritten. An infrastructure error is an exception, never a reward.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from clawgym.agents.tool_loop import ToolLoopAgent
from clawgym.engines.folders import load_config, model_folder
from clawgym.engines.protocol import GenerateRequest, Tokens
from clawgym.errors import InfraError, MissingDependency
from clawgym.gateway.server import Gateway
from clawgym.interop._backend import loop_backend
from clawgym.pool import Pool
from clawgym.records import Outcome, Task
from clawgym.rollout import Ended, EpisodeRequest
from clawgym.rollout.collect import collect_episode, in_process
from clawgym.rollout.request import RewardName
from clawgym.tasks.sets import load

try:
    import chz  # pyright: ignore[reportMissingImports]
    from tinker_cookbook.rl import types  # pyright: ignore[reportMissingImports]

    tinker: Any = importlib.import_module("tinker")  # a type checker takes this file for it
except ImportError as error:
    raise MissingDependency(f"tinker-cookbook is needed ({error}): pip install tinker-cookbook") from error

__all__ = ["ClawGymDataset", "ClawGymDatasetBuilder", "ClawGymGroup", "ClawGymTokens"]


class _Asked:
    """An engine whose requests wait for ids from outside."""

    name = "tinker-cookbook"

    def __init__(self, folder: Path) -> None:
        self.tokenizer = str(folder)
        self.context_window = int(load_config(folder).get_text_config().max_position_embeddings)
        self.requests: asyncio.Queue[tuple[GenerateRequest, asyncio.Future[tuple[int, ...]]]] = asyncio.Queue()

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Tokens]:
        answer: asyncio.Future[tuple[int, ...]] = asyncio.get_running_loop().create_future()
        self.requests.put_nowait((request, answer))
        ids = await answer
        reason = "stop" if ids and ids[-1] in request.stop_ids else "length"
        yield Tokens(ids, (), None, finish_reason=reason)

    def identity(self) -> dict[str, Any]:
        return {"name": self.name}

    async def aclose(self) -> None: ...


class ClawGymTokens(types.Env):  # type: ignore[misc]
    """One episode of ``task``, whose tokens are given from outside."""

    def __init__(self, task: Task, sample: int, group: ClawGymGroup) -> None:
        self._task, self._sample, self._group = task, sample, group
        self._engine = _Asked(model_folder(group.model, weights=False))
        self._playing: asyncio.Task[Ended] | None = None
        self._answer: asyncio.Future[tuple[int, ...]] | None = None

    async def initial_observation(self) -> Any:
        self._playing = asyncio.create_task(self._play())
        found = await self._next()
        if isinstance(found, Ended):
            raise InfraError(f"task {self._task.id} ended before its first turn ({found.episode.cause}): see the task")
        return found

    async def step(self, action: Sequence[int], *, extra: Any = None) -> Any:
        assert self._answer is not None, "await initial_observation() first"
        self._answer.set_result(tuple(action))
        found = await self._next()
        if not isinstance(found, Ended):
            return types.StepResult(0.0, False, *found)
        metrics = {"strict": found.episode.result.strict} if found.episode.result is not None else {}
        return types.StepResult(found.reward or 0.0, True, tinker.ModelInput.empty(), [], metrics)

    async def aclose(self) -> None:
        """End the episode, if it still runs."""
        if self._playing is not None:
            self._playing.cancel()
            await asyncio.gather(self._playing, return_exceptions=True)

    async def _next(self) -> Any:
        """The next observation with its stop ids, or the end. Raises :class:`~clawgym.errors.InfraError`."""
        assert self._playing is not None
        asked = asyncio.ensure_future(self._engine.requests.get())
        done, _ = await asyncio.wait({asked, self._playing}, return_when=asyncio.FIRST_COMPLETED)
        if asked in done:
            request, self._answer = asked.result()
            return tinker.ModelInput.from_ints(list(request.prompt_ids)), sorted(request.stop_ids)
        asked.cancel()
        ended = self._playing.result()
        if ended.episode.outcome is Outcome.INFRA:
            why = ended.episode.error or ended.episode.cause
            raise InfraError(f"task {self._task.id}: infrastructure error ({why}): run it again")
        return ended

    async def _play(self) -> Ended:
        group = self._group
        request = EpisodeRequest(
            task=self._task,
            seed=(group.seed + self._sample) % 2**31,
            sample=self._sample,
            reward=group.reward,
            keep_workspace=False,
        )
        agent = in_process(
            lambda engine: ToolLoopAgent(engine, protocol=group.protocol, system_prompt=group.system_prompt)
        )
        with tempfile.TemporaryDirectory(prefix="clawgym-") as folder, Pool(Path(folder, "pool.db")) as pool:
            async with Gateway(self._engine, pool) as gateway:
                return await collect_episode(request, agent, await loop_backend(), gateway)


@dataclass
class ClawGymGroup(types.EnvGroupBuilder):  # type: ignore[misc]
    """The episodes of one task. It can be pickled."""

    tasks: str
    """The task set (``clawgym tasks list``)."""
    task_id: str
    model: str
    """The folder of the model, or its name on the Hub, for tokenizer and chat template."""
    size: int = 8
    seed: int = 0
    reward: RewardName = "strict"
    protocol: Literal["tools", "text"] = "tools"
    system_prompt: str | None = None
    max_steps: int | None = None
    """Most turns; by default the task's own limit."""
    _envs: list[ClawGymTokens] = field(default_factory=list, repr=False)

    async def make_envs(self) -> Sequence[ClawGymTokens]:
        (task,) = (await asyncio.to_thread(load, self.tasks, ids=[self.task_id])).tasks
        if self.max_steps is not None:
            task = replace(task, limits=replace(task.limits, max_steps=self.max_steps))
        self._envs = [ClawGymTokens(task, sample, self) for sample in range(self.size)]
        return self._envs

    def logging_tags(self) -> list[str]:
        return [self.tasks.partition(":")[0]]

    async def cleanup(self) -> None:
        envs, self._envs = self._envs, []
        with contextlib.suppress(Exception):
            await asyncio.gather(*(env.aclose() for env in envs))


class ClawGymDataset(types.RLDataset):  # type: ignore[misc]
    """Batches of groups, in the order of the tasks."""

    def __init__(self, groups: Sequence[ClawGymGroup], batch: int) -> None:
        self._groups, self._batch = groups, batch

    def get_batch(self, index: int) -> Sequence[ClawGymGroup]:
        return self._groups[index * self._batch : (index + 1) * self._batch]

    def __len__(self) -> int:
        return len(self._groups) // self._batch


@chz.chz
class ClawGymDatasetBuilder(types.RLDatasetBuilder):  # type: ignore[misc]
    """A task set as training data: ``groups`` tasks a step, ``group_size`` episodes each."""

    tasks: str = "terminal-basic:train"
    model: str
    groups: int = 8
    group_size: int = 8
    seed: int = 0
    reward: RewardName = "strict"
    protocol: Literal["tools", "text"] = "tools"
    system_prompt: str | None = None
    max_steps: int | None = None
    most: int | None = None
    """Only the first tasks."""

    async def __call__(self) -> tuple[ClawGymDataset, None]:
        found = await asyncio.to_thread(load, self.tasks, limit=self.most)
        options = {"reward": self.reward, "protocol": self.protocol, "system_prompt": self.system_prompt}
        groups = [
            ClawGymGroup(
                self.tasks,
                task.id,
                self.model,
                size=self.group_size,
                seed=self.seed + n * self.group_size,
                max_steps=self.max_steps,
                **options,
            )
            for n, task in enumerate(found.tasks)
            if not task.unsupported
        ]
        return ClawGymDataset(groups, self.groups), None
