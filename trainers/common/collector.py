"""Keeps groups of episodes coming: tasks in a fixed order, through the gateway into the pool.

Invariants: which task, and which seeds, the n-th group has depends on the run's seed and n alone; no group is begun
that would be more than ``staleness`` versions old when its turn comes; what a killed run left open is closed and made
up for.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

from clawgym.agents import make_agent
from clawgym.agents.protocol import Agent, ResidentAgent
from clawgym.agents.tool_loop import ToolLoopAgent
from clawgym.engines import Sampling
from clawgym.engines.protocol import Engine
from clawgym.errors import PoolError, TrainingError
from clawgym.gateway.server import Gateway
from clawgym.gateway.sessions import SessionRequest
from clawgym.pool import EpisodeEnd, Pool
from clawgym.records import Episode, Outcome, Task
from clawgym.rewards.penalties import penalties
from clawgym.rewards.states import setting_of
from clawgym.rollout import EpisodeRequest
from clawgym.rollout.collect import collect_episode, in_process
from clawgym.sandbox.protocol import Backend
from clawgym.trainers.config import TrainConfig

__all__ = ["Collector", "Groups", "Missing", "Player", "episode_seed", "group_id"]

Missing = Mapping[int, Sequence[str]]
"""Which samples of a group are to be played, and the open episodes of a killed run that each takes the place of."""

INTERRUPTED = "interrupted"
"""The cause of an episode that was under way when its run was killed."""
_LOST = EpisodeEnd(outcome=Outcome.INFRA, cause=INTERRUPTED)
_REFILLS = 1
"""Further attempts at an episode that ended as ``infra``."""


def episode_seed(*parts: object) -> int:
    """31 bits of SHA-256 over ``parts``."""
    return int.from_bytes(hashlib.sha256(":".join(map(str, parts)).encode()).digest()[:4], "big") >> 1


class _Place:
    """One of the places for episodes; given back once, early or at the end."""

    def __init__(self, places: asyncio.Semaphore) -> None:
        self._places = places
        self._held = False

    async def __aenter__(self) -> None:
        await self._places.acquire()
        self._held = True

    async def __aexit__(self, *_: object) -> None:
        self.free()

    def free(self) -> None:
        if self._held:
            self._held = False
            self._places.release()


class Player:
    """Plays single episodes with the agent of a configuration. To be closed before ``gateway`` and ``backend`` are.

    Raises :class:`~clawgym.errors.AgentError` for an agent that is not there, or cannot be trained."""

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
        self._program: ResidentAgent | None = None
        """What lives in its boxes; ``None``: the tool loop, which lives here."""
        if config.agent.name != "tool-loop":
            made = make_agent(config.agent.name, gateway=gateway, **config.agent.options)
            if not isinstance(made, ResidentAgent):
                raise TrainingError(f"agent.name: {config.agent.name} is no program: use tool-loop, or a program")
            self._program = made

    async def aclose(self) -> None:
        """Close the boxes that wait."""
        if self._program is not None:
            await self._program.aclose()

    async def play(self, task: Task, *, seed: int, sample: int = 0, group: str | None = None, channel: str = "train",
                   greedy: bool = False, instead_of: Sequence[str] = (),
                   placed: Callable[[], Awaitable[float]] | None = None) -> Episode:  # fmt: skip
        """One episode, recorded in the pool under ``channel``; those that it is played instead of end as ``infra``.
        ``placed`` is called once it has its place, before it begins; it says when its deadline began."""
        temperature = 0.0 if greedy else (self._config.rollout.temperature if channel == "train" else 1.0)
        place, began = _Place(self._slots), time.monotonic()

        async def graded(session: str, episode: Episode) -> Mapping[str, float]:
            place.free()
            if channel != "train" or episode.outcome is Outcome.INFRA:
                return {}
            if self._judging is not None:
                # Half of what is left: an episode that is open at its group's deadline is lost with its tokens.
                left = self._config.rollout.deadline - (time.monotonic() - began)
                await self._judging(task, session, episode, max(0.0, left / 2))
            return await self._penalties(session)

        async def opening() -> None:  # only now: a group must not look finished while it waits for this one
            nonlocal began
            if placed is not None:
                began = await placed()
            for old in instead_of:
                await asyncio.to_thread(self._gateway.pool.close_episode, old, _LOST)

        async with place:
            request = EpisodeRequest(
                task=task,
                seed=seed,
                sample=sample,
                reward=self._config.reward.score,
                keep_workspace=False,
                session=SessionRequest(
                    channel=channel,
                    group=group,
                    adapter=self._adapter,
                    sampling=Sampling(temperature=temperature, max_tokens=self._config.agent.max_tokens),
                    meta={"setting": setting_of(task)},
                ),
            )
            agent = self._program or in_process(self._loop)
            ended = await collect_episode(request, agent, self._backend, self._gateway, opening=opening, graded=graded)
            return ended.episode

    async def _penalties(self, session: str) -> Mapping[str, float]:
        """What the configuration takes off for the form of the episode, by name."""
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


class Groups:
    """Plays groups of episodes by their number.

    Invariant: which task, and which seeds, the n-th group has depends on the run's seed and n alone."""

    def __init__(self, config: TrainConfig, tasks: Sequence[Task], pool: Pool, player: Player) -> None:
        if not tasks:
            raise TrainingError("tasks.train: there is no task to learn from: correct tasks.train")
        self._config = config
        self._tasks = tasks
        self._pool = pool
        self._player = player
        self.infra = 0
        """Attempts that failed for no fault of the agent, since the start."""
        self.in_a_row = 0
        """Of them, since the last one that did not."""
        self.last_cause = ""

    def task_of(self, number: int) -> Task:
        """The task of the ``number``-th group: each epoch in an order of its own."""
        epoch, place = divmod(number, len(self._tasks))
        order = list(range(len(self._tasks)))
        random.Random(f"{self._config.seed}:{epoch}").shuffle(order)
        return self._tasks[order[place]]

    async def play(self, number: int, samples: Missing | None = None) -> None:
        """Play ``samples`` of a group (all of them), each instead of the episodes that it comes with. Its deadline
        begins when the first of them has a place."""
        task, about = self.task_of(number), self._config.rollout
        if samples is None:
            samples = dict.fromkeys(range(about.group_size), ())
        group = group_id(number)
        opened = asyncio.Lock()
        began: list[float] = []

        async def placed() -> float:
            async with opened:  # the same call again changes nothing
                await asyncio.to_thread(
                    self._pool.open_group, id=group, task_id=task.id, size=about.group_size, deadline=about.deadline
                )
                began.append(time.monotonic())
            return began[0]

        await asyncio.gather(*(self._sample(task, group, number, n, old, placed) for n, old in samples.items()))

    async def begun(self) -> dict[int, Missing]:
        """Of each group that a run before this one has begun: what it lacks. What comes too late for its group is
        closed."""
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
        found: dict[int, Missing] = {}
        for number in range(max(done, default=-1) + 1):
            old = under_way.get(number, {})
            found[number] = {}
            if states.get(group_id(number), "open") in ("open", "ready"):
                wanted = range(self._config.rollout.group_size)
                found[number] = {n: old.get(n, ()) for n in wanted if n not in done.get(number, set())}
            else:
                for episode in (id for ids in old.values() for id in ids):  # too late for its group
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
        for attempt in range(1 + _REFILLS):
            seed = episode_seed(self._config.seed, number, sample, attempt)
            try:
                episode = await self._player.play(
                    task, seed=seed, sample=sample, group=group, instead_of=old, placed=placed
                )
            except PoolError:
                states = await asyncio.to_thread(self._pool.group_states)
                if states.get(group) in ("leased", "consumed", "dropped"):  # its deadline came first
                    return
                raise
            old = ()
            if episode.outcome is not Outcome.INFRA:
                self.in_a_row = 0
                return
            self.infra += 1
            self.in_a_row += 1
            self.last_cause = episode.error or str(episode.cause)


class Collector:
    """Begins groups for a trainer, never too far ahead of it."""

    def __init__(self, config: TrainConfig, groups: Groups) -> None:
        self._config = config
        self._groups = groups
        self._begun = 0
        self._trained = 0
        self._dropped = 0
        self._news = asyncio.Event()
        self.ended = asyncio.Event()
        """Set when a group has ended; cleared by whoever waits for one."""
        self._running: set[asyncio.Task[None]] = set()
        self.idle_seconds = 0.0
        """In which nothing was collected, because learning was behind."""

    async def run(self) -> None:
        """Collect until cancelled. Raises what is nobody's fault but the installation's."""
        await self._resume()
        try:
            while True:
                while self._may_begin():
                    self._begin(self._begun)
                    self._begun += 1
                self._news.clear()
                started, idle = time.monotonic(), not self._running
                news = asyncio.ensure_future(self._news.wait())
                done, _ = await asyncio.wait({news, *self._running}, return_when=asyncio.FIRST_COMPLETED)
                news.cancel()
                if idle:
                    self.idle_seconds += time.monotonic() - started
                for task in done - {news}:
                    self._running.discard(task)
                    self.ended.set()
                    task.result()
        finally:
            for task in self._running:
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)

    def advance(self, trained: int, dropped: int) -> None:
        """``trained`` batches are learnt, and the engine samples by the newest weights; ``dropped`` groups, of all that
        were begun, can never be learnt from."""
        self._trained, self._dropped = trained, dropped
        self._news.set()

    def _may_begin(self) -> bool:
        ahead = (self._trained + 1 + self._config.rollout.staleness) * self._config.rollout.groups
        return self._begun - self._dropped < ahead

    def _begin(self, number: int, samples: Missing | None = None) -> None:
        self._running.add(asyncio.create_task(self._groups.play(number, samples)))

    async def _resume(self) -> None:
        """Finish the groups of a run that was killed."""
        begun = await self._groups.begun()
        self._begun = len(begun)
        for number, missing in begun.items():
            if missing:
                self._begin(number, missing)


def group_id(number: int) -> str:
    """The id of a group in the pool."""
    return f"group-{number:08d}"


def _group_number(group: str) -> int | None:
    head, _, digits = group.partition("-")
    return int(digits) if head == "group" and digits.isdigit() else None
