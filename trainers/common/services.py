"""What a training run stands on while it runs: pool, engine, gateway, boxes.

Invariant: whatever ends the run, boxes and listeners are gone before it returns.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from clawgym.errors import TrainingError
from clawgym.gateway.server import Gateway
from clawgym.pool import Pool
from clawgym.records import Outcome, Task
from clawgym.sandbox import backend as make_backend
from clawgym.sandbox.protocol import Backend
from clawgym.statistics import Estimate, rate
from clawgym.trainers.common.collector import Player, episode_seed
from clawgym.trainers.common.judging import Judging, judging
from clawgym.trainers.common.policy import Policy
from clawgym.trainers.config import TrainConfig

if TYPE_CHECKING:
    from clawgym.trainers.common.policy import Sampler

__all__ = ["Measured", "Score", "Setting", "measured", "opened", "pool_file", "sampling", "scores"]


@dataclass(frozen=True)
class Measured:
    """A policy's score on a part."""

    estimate: Estimate
    by_generator: dict[str, float]
    infra: int
    """Episodes without a result; they are in no score."""


@dataclass(frozen=True)
class Setting:
    """An engine that samples by a policy, behind a gateway, and boxes to act in."""

    config: TrainConfig
    pool: Pool
    backend: Backend
    engine: Sampler
    gateway: Gateway
    player: Player
    judge: Judging | None

    async def measure(self, tasks: Sequence[Task], *, samples: int, greedy: bool, channel: str) -> Measured:
        """The share of strict successes: every task ``samples`` times, the same seeds each time it is asked."""
        return measured(await scores(self.player, self.config, tasks, samples=samples, greedy=greedy, channel=channel))


class Score(NamedTuple):
    """Of one episode that was played to measure."""

    task: str
    generator: str
    strict: float | None
    """``None`` where there was no result, three times in a row."""


async def scores(
    player: Player, config: TrainConfig, tasks: Sequence[Task], *, samples: int, greedy: bool, channel: str
) -> list[Score]:
    """Every task ``samples`` times."""

    async def one(task: Task, sample: int) -> Score:
        seed = episode_seed(config.seed, "measure", task.content_hash, sample)
        generator = str(task.metadata.get("generator") or "all")
        for attempt in range(3):
            episode = await player.play(task, seed=seed + attempt, sample=sample, channel=channel, greedy=greedy)
            if episode.outcome is not Outcome.INFRA and episode.result is not None:
                return Score(task.id, generator, episode.result.strict)
        return Score(task.id, generator, None)

    return list(await asyncio.gather(*(one(task, sample) for task in tasks for sample in range(samples))))


def measured(results: Sequence[Score]) -> Measured:
    """Raises :class:`~clawgym.errors.TrainingError` where nothing could be graded."""
    by_task: dict[str, list[float]] = {}
    by_generator: dict[str, list[float]] = {}
    for task, generator, strict in results:
        if strict is not None:
            by_task.setdefault(task, []).append(strict)
            by_generator.setdefault(generator, []).append(strict)
    estimate = rate(list(by_task.values()))
    if estimate is None:
        raise TrainingError("no episode could be graded: run `clawgym doctor`, and look at the pool's causes")
    means = {name: sum(values) / len(values) for name, values in sorted(by_generator.items())}
    return Measured(estimate, means, sum(one.strict is None for one in results))


@contextlib.asynccontextmanager
async def sampling(config: TrainConfig, policy: Policy, run: Path, *, version: int = 0) -> AsyncIterator[Sampler]:
    """An engine that samples by ``policy`` as ``version``: in this process, or where ``compute.vllm`` says."""
    window = config.model.context_window
    if config.compute.vllm is None:
        engine: Sampler = policy.engine(
            context_window=window, max_batch=config.rollout.concurrency, policy_version=version
        )
    else:
        engine = await policy.served(config.compute.vllm, run.absolute() / "adapters", context_window=window)
    try:
        await policy.publish(engine, version)
        yield engine
    finally:
        await engine.aclose()


@contextlib.asynccontextmanager
async def opened(
    config: TrainConfig, policy: Policy, run: Path, pool: Pool, *, version: int = 0
) -> AsyncIterator[Setting]:
    """A setting of the run in ``run``, whose engine samples by ``policy`` as ``version``."""
    async with contextlib.AsyncExitStack() as stack:
        backend = make_backend(config.backend)
        stack.push_async_callback(backend.aclose)
        await backend.probe()
        engine = await stack.enter_async_context(sampling(config, policy, run, version=version))
        gateway = await stack.enter_async_context(Gateway(engine, pool))
        await gateway.listen()
        judge = await stack.enter_async_context(judging(config, gateway))
        player = Player(config, gateway, backend, adapter=policy.adapter, judging=judge)
        stack.push_async_callback(player.aclose)
        yield Setting(config, pool, backend, engine, gateway, player, judge)


def pool_file(run: Path) -> Path:
    """The pool of a run."""
    return run / "pool.db"
