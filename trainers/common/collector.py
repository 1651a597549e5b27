"""Collects groups of episodes: tasks in a fixed order, through the gateway into the pool.

Invariants: the task and the seeds of the n-th group depend only on the run's seed and n. No group is started that would
be more than ``staleness`` versions old when it is trained on. Episodes that a killed run left open are closed and run
again.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

from clawgym.agents import make_agent
from clawgym.agents.protocol import Agent, ResidentAgent
from clawgym.agents.tool_loop import ToolLoopAgent
from clawgym.engines import Sampling
from clawgym.engines.protocol import Engine
from clawgym.errors import PoolError, TaskError, TrainingError
from clawgym.gateway.request import SessionRequest
from clawgym.gateway.server import Gateway
from clawgym.pool import EpisodeEnd, Pool
from clawgym.pool.states import PROCESS_REWARD
from clawgym.records import Episode, Outcome, Task
from clawgym.rewards.milestones import MILESTONES, milestone_rewards
from clawgym.rewards.penalties import penalties
from clawgym.rewards.states import setting_of
from clawgym.rollout import Ended, EpisodeRequest
from clawgym.rollout.collect import collect_episode, in_process
from clawgym.sandbox.protocol import Backend
from clawgym.trainers.config import TrainConfig
from clawgym.verifiers.reuse import Grades

__all__ = ["Collector", "GroupPlayer", "MissingSamples", "Player", "episode_seed", "group_id"]

_log = logging.getLogger("clawgym.trainers")

MissingSamples = Mapping[int, Sequence[str]]
"""Index of each sample of a group that must be run -> the open episodes of a killed run that it replaces."""

INTERRUPTED = "interrupted"
"""The cause of an episode that was running when its run was killed."""
_LOST = EpisodeEnd(outcome=Outcome.INFRA, cause=INTERRUPTED)
_RETRIES = 1
"""Retries of an episode after an infrastructure error."""


def episode_seed(*parts: object) -> int:
    """A seed in [0, 2**31): 31 bits of SHA-256 over ``parts``."""
    return int.from_bytes(hashlib.sha256(":".join(map(str, parts)).encode()).digest()[:4], "big") >> 1


class _Slot:
    """One slot of ``rollout.concurrency``; released once, early or at the end."""

    def __init__(self, slots: asyncio.Semaphore) -> None:
        self._slots = slots
        self._held = False

    async def __aenter__(self) -> None:
        await self._slots.acquire()
        self._held = True

    async def __aexit__(self, *_: object) -> None:
        self.free()

    def free(self) -> None:
        if self._held:
            self._held = False
            self._slots.release()


class Player:
    """Runs single episodes with the agent of a configuration. Close it before ``gateway`` and ``backend``.

    Raises :class:`~clawgym.errors.AgentError` for an agent that is not installed, and
    :class:`~clawgym.errors.TrainingError` for one that cannot be trained."""

    def __init__(
        self,
        config: TrainConfig,
        gateway: Gateway,
        backend: Backend,
        *,
        adapter: str | None = None,
        judging: Callable[[Task, str, Episode, float], Awaitable[None]] | None = None,
    ) -> None:
        self._config = config
        self._gateway = gateway
        self._backend = backend
        self._adapter = adapter
        self._judging = judging
        self._slots = asyncio.Semaphore(config.rollout.concurrency)
        self.unstable: set[str] = set()
        """Tasks without milestones from now on: two measurements of one workspace differed."""
        self.grades = Grades()
        """Reports of verifiers, reused for identical workspaces of pure ones."""
        self._program: ResidentAgent | None = None
        """An agent that runs in its sandboxes; ``None`` for the tool loop, which runs in this process."""
        if config.agent.name != "tool-loop":
            made = make_agent(config.agent.name, gateway=gateway, **config.agent.options)
            if not isinstance(made, ResidentAgent):
                raise TrainingError(
                    f"agent.name: {config.agent.name} does not run in the sandbox: use tool-loop, or an agent that does"
                )
            self._program = made

    async def aclose(self) -> None:
        """Close idle sandboxes."""
        if self._program is not None:
            await self._program.aclose()

    async def play(self, task: Task, *, seed: int, sample: int = 0, group: str | None = None, channel: str = "train",
                   greedy: bool = False, replaces: Sequence[str] = (),
                   placed: Callable[[], Awaitable[float]] | None = None) -> Episode:  # fmt: skip
        """Run one episode and record it in the pool under ``channel``.

        Args:
            task: the task.
            seed: the seed of task and engine.
            sample: the index of the episode in its group.
            group: the id of its group in the pool.
            channel: the channel of the pool. Only episodes of ``train`` are judged.
            greedy: greedy decoding.
            replaces: open episodes in the pool that this one replaces; they are closed with outcome ``infra``.
            placed: called when the episode has a slot, before it starts. Returns when its deadline started
                (``time.monotonic()``).
        """
        temperature = 0.0 if greedy else (self._config.rollout.temperature if channel == "train" else 1.0)
        slot, began = _Slot(self._slots), time.monotonic()

        async def graded(session: str, ended: Ended) -> Mapping[str, float]:
            slot.free()
            episode = ended.episode
            if channel != "train" or episode.outcome is Outcome.INFRA:
                return {}
            if ended.unstable and task.id not in self.unstable:
                self.unstable.add(task.id)
                _log.warning(
                    "task %s: its verifier gave two results on one workspace, so it has no milestones: repair it, or "
                    "leave the task out (see `clawgym tasks audit`)",
                    task.id,
                )
            if ended.progress:
                await self._store_progress(session, ended.progress)
            if self._judging is not None:
                # Half of the remaining time: an episode that is open at its group's deadline is lost.
                left = self._config.rollout.deadline - (time.monotonic() - began)
                await self._judging(task, session, episode, max(0.0, left / 2))
            return await self._penalties(session)

        async def opening() -> None:  # not earlier: a group must not look complete while it waits for this episode
            nonlocal began
            if placed is not None:
                began = await placed()
            for old in replaces:
                await asyncio.to_thread(self._gateway.pool.close_episode, old, _LOST)

        async with slot:
            request = EpisodeRequest(
                task=task,
                seed=seed,
                sample=sample,
                reward=self._config.reward.score,
                keep_workspace=False,
                milestones=self._config.reward.milestones is not None
                and channel == "train"
                and task.id not in self.unstable,
                grades=self.grades,
                session=SessionRequest(
                    channel=channel,
                    group=group,
                    adapter=self._adapter,
                    sampling=Sampling(temperature=temperature, max_tokens=self._config.agent.max_tokens),
                    meta={"setting": setting_of(task), "family": str(task.metadata.get("category") or task.id)},
                ),
            )
            agent = self._program or in_process(self._loop)
            ended = await collect_episode(request, agent, self._backend, self._gateway, opening=opening, graded=graded)
            return ended.episode

    async def _store_progress(self, session: str, progress: Sequence[float | None]) -> None:
        """Store the rewards of ``reward.milestones`` for the agent's turns, and the change of the progress itself."""
        about = self._config.reward
        turns = await self._gateway.in_pool(lambda pool: pool.turns(session))
        main = [index for index, turn in enumerate(turns) if turn.role == "main"]
        given = milestone_rewards(progress, credit=about.milestones or "turn", potential=about.potential)
        for name, found in ((PROCESS_REWARD, given), (MILESTONES, milestone_rewards(progress))):
            rewards = {main[turn]: value for turn, value in found.items() if turn < len(main)}
            await self._gateway.in_pool(partial(Pool.set_turn_rewards, id=session, rewards=rewards, name=name))

    def milestone_metrics(self) -> dict[str, float]:
        """The number of tasks in :attr:`unstable`; empty without ``reward.milestones``."""
        asked = self._config.reward.milestones is not None
        return {"reward/milestones_unstable_tasks": float(len(self.unstable))} if asked else {}

    async def _penalties(self, session: str) -> Mapping[str, float]:
        """Penalties of the episode by name (``reward.malformed``, ``reward.length``)."""
        about = self._config.reward
        if not (about.malformed or about.length):
            return {}
        turns = await self._gateway.in_pool(lambda pool: pool.turns(session))
        if not turns:
            return {}
        return penalties(
            turns, malformed=about.malformed, length=about.length, longest=about.longest, slack=about.slack
        )

    def _loop(self, engine: Engine) -> Agent:
        about = self._config.agent
        return ToolLoopAgent(
            engine,
            protocol=about.protocol,
            system_prompt=about.system_prompt,
            max_malformed=about.max_malformed,
        )


class GroupPlayer:
    """Runs groups of episodes by their number.

    Invariant: the task and the seeds of the n-th group depend only on the run's seed and n."""

    def __init__(self, config: TrainConfig, tasks: Sequence[Task], pool: Pool, player: Player) -> None:
        if not tasks:
            raise TrainingError("tasks.train: there is no task to train on: correct tasks.train")
        self._config = config
        self._tasks = tasks
        self._pool = pool
        self._player = player
        self.infra = 0
        """Episodes with an infrastructure error, since the start."""
        self.failures_in_a_row = 0
        """Infrastructure errors since the last episode without one."""
        self.last_cause = ""

    def task_of(self, number: int) -> Task:
        """The task of the ``number``-th group; tasks are shuffled in each epoch."""
        epoch, place = divmod(number, len(self._tasks))
        order = list(range(len(self._tasks)))
        random.Random(f"{self._config.seed}:{epoch}").shuffle(order)
        return self._tasks[order[place]]

    async def play(self, number: int, samples: MissingSamples | None = None) -> None:
        """Run a group, or only ``samples`` of it. The group's deadline starts when the first episode has a slot."""
        task, about = self.task_of(number), self._config.rollout
        with contextlib.suppress(TaskError):  # each episode tells it
            task = await asyncio.to_thread(task.frozen)  # once for all
        if samples is None:
            samples = dict.fromkeys(range(about.group_size), ())
        group = group_id(number)
        opened = asyncio.Lock()
        began: list[float] = []

        async def placed() -> float:
            async with opened:  # opening a group again changes nothing
                await asyncio.to_thread(
                    self._pool.open_group, id=group, task_id=task.id, size=about.group_size, deadline=about.deadline
                )
                began.append(time.monotonic())
            return began[0]

        await asyncio.gather(*(self._sample(task, group, number, n, old, placed) for n, old in samples.items()))

    async def unfinished(self) -> dict[int, MissingSamples]:
        """Number of each group that an earlier process started -> the samples that it lacks (empty if complete).

        Open episodes of groups that take no more episodes are closed."""
        states = await asyncio.to_thread(self._pool.group_states)
        done: dict[int, set[int]] = {}
        under_way: dict[int, dict[int, list[str]]] = {}
        for episode in await asyncio.to_thread(lambda: list(self._pool.episodes(channel="train"))):
            number = _group_number(episode.group)
            if number is None:
                continue
            done.setdefault(number, set())
            if episode.state == "open":
                under_way.setdefault(number, {}).setdefault(episode.sample, []).append(episode.id)
            elif episode.outcome != "infra":
                done[number].add(episode.sample)
        found: dict[int, MissingSamples] = {}
        for number in range(max(done, default=-1) + 1):
            old = under_way.get(number, {})
            found[number] = {}
            if states.get(group_id(number), "open") in ("open", "ready"):
                wanted = range(self._config.rollout.group_size)
                found[number] = {n: old.get(n, ()) for n in wanted if n not in done.get(number, set())}
            else:
                for episode in (id for ids in old.values() for id in ids):  # the group takes no more episodes
                    await asyncio.to_thread(self._pool.close_episode, episode, _LOST)
        return found

    async def _sample(
        self,
        task: Task,
        group: str,
        number: int,
        sample: int,
        old: Sequence[str],
        placed: Callable[[], Awaitable[float]],
    ) -> None:
        for attempt in range(1 + _RETRIES):
            seed = episode_seed(self._config.seed, number, sample, attempt)
            try:
                episode = await self._player.play(
                    task, seed=seed, sample=sample, group=group, replaces=old, placed=placed
                )
            except PoolError:
                states = await asyncio.to_thread(self._pool.group_states)
                if states.get(group) in ("leased", "consumed", "dropped"):  # the group's deadline has passed
                    return
                raise
            old = ()
            if episode.outcome is not Outcome.INFRA:
                self.failures_in_a_row = 0
                return
            self.infra += 1
            self.failures_in_a_row += 1
            self.last_cause = episode.error or str(episode.cause)


class Collector:
    """Starts groups for a trainer, at most ``rollout.staleness`` steps ahead of it."""

    def __init__(self, config: TrainConfig, groups: GroupPlayer) -> None:
        self._config = config
        self._groups = groups
        self._started = 0
        self._trained = 0
        self._dropped = 0
        self._news = asyncio.Event()
        self.group_ended = asyncio.Event()
        """Set when a group has ended; the consumer clears it before it waits."""
        self._running: set[asyncio.Task[None]] = set()
        self.idle_seconds = 0.0
        """Seconds without running episodes, because training was behind."""

    async def run(self) -> None:
        """Collect until cancelled. Raises errors of the installation, such as a sandbox backend that fails."""
        await self._resume()
        try:
            while True:
                while self._may_start():
                    self._start(self._started)
                    self._started += 1
                self._news.clear()
                started, idle = time.monotonic(), not self._running
                news = asyncio.ensure_future(self._news.wait())
                done, _ = await asyncio.wait({news, *self._running}, return_when=asyncio.FIRST_COMPLETED)
                news.cancel()
                if idle:
                    self.idle_seconds += time.monotonic() - started
                for task in done - {news}:
                    self._running.discard(task)
                    self.group_ended.set()
                    task.result()
        finally:
            for task in self._running:
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)

    def advance(self, trained: int, dropped: int) -> None:
        """Tell the collector that ``trained`` batches were trained on and that the engine has the newest weights.

        ``dropped`` of the started groups will never be trained on."""
        self._trained, self._dropped = trained, dropped
        self._news.set()

    def _may_start(self) -> bool:
        ahead = (self._trained + 1 + self._config.rollout.staleness) * self._config.rollout.groups
        return self._started - self._dropped < ahead

    def _start(self, number: int, samples: MissingSamples | None = None) -> None:
        self._running.add(asyncio.create_task(self._groups.play(number, samples)))

    async def _resume(self) -> None:
        """Finish the groups of a run that was killed."""
        groups = await self._groups.unfinished()
        self._started = len(groups)
        for number, missing in groups.items():
            if missing:
                self._start(number, missing)


def group_id(number: int) -> str:
    """The id of a group in the pool."""
    return f"group-{number:08d}"


def _group_number(group: str) -> int | None:
    head, _, digits = group.partition("-")
    return int(digits) if head == "group" and digits.isdigit() else None
