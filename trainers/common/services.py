"""The services of a training run: pool, engine, gateway, sandboxes, judge.

Invariant: however the run ends, sandboxes and listening sockets are closed before it returns.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

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
    import torch

    from clawgym.rewards.scoring import Scorer
    from clawgym.trainers.common.policy import Sampler

from clawgym.verifiers.scores import plain_mean

__all__ = [
    "LoopPolicy",
    "SplitScore",
    "EpisodeScore",
    "Services",
    "summarize",
    "open_services",
    "pool_file",
    "open_engine",
    "score_tasks",
]


class LoopPolicy(Protocol):
    """A policy that is trained while an engine samples with its weights."""

    @property
    def folder(self) -> Path:
        """The folder with its tokenizer and chat template."""
        ...

    @property
    def device(self) -> torch.device:
        """Where its batches are."""
        ...

    @property
    def adapter(self) -> str | None:
        """The name of the adapter to request from the engine."""
        ...

    @property
    def engine(self) -> Any:
        """Makes an engine in this process."""
        ...

    async def publish(self, engine: Any, version: int) -> None:
        """Let the engine sample with these weights, as ``version``."""
        ...

    async def restore(self, checkpoint: Path, engine: Any, version: int) -> None:
        """Let the engine sample with the weights of a checkpoint, as ``version``."""
        ...

    def scorer(self, *, tokens: int) -> Scorer:
        """A scorer with these weights."""
        ...


@dataclass(frozen=True)
class SplitScore:
    """A policy's score on a split."""

    estimate: Estimate
    """Strict success, with its confidence interval."""
    by_generator: dict[str, float]
    """Generator -> mean strict success."""
    infra: int
    """Episodes with an infrastructure error; they are in no score."""
    partial: float
    """Mean score of the verifier's plain checks, in [0, 1]."""


@dataclass(frozen=True)
class Services:
    """An engine with the policy's weights behind a gateway, and sandboxes; see :func:`open_services`."""

    config: TrainConfig
    pool: Pool
    backend: Backend
    engine: Sampler
    gateway: Gateway
    player: Player
    judge: Judging | None

    async def measure(self, tasks: Sequence[Task], *, samples: int, greedy: bool, channel: str) -> SplitScore:
        """Strict success over ``samples`` episodes of each task. Each call uses the same seeds."""
        return summarize(
            await score_tasks(self.player, self.config, tasks, samples=samples, greedy=greedy, channel=channel)
        )

    async def rest(self) -> None:
        """Let an engine in this process free what it needs to sample, before an update needs the memory."""
        from clawgym.engines.transformers import TransformersEngine

        if isinstance(self.engine, TransformersEngine):
            await self.engine.sleep()


class EpisodeScore(NamedTuple):
    """The result of one evaluation episode."""

    task: str
    generator: str
    strict: float | None
    """``None`` after three infrastructure errors in a row."""
    partial: float
    """Mean score of the verifier's plain checks, in [0, 1]."""


async def score_tasks(
    player: Player, config: TrainConfig, tasks: Sequence[Task], *, samples: int, greedy: bool, channel: str
) -> list[EpisodeScore]:
    """Run ``samples`` episodes of each task; an infrastructure error is retried twice."""

    async def one(task: Task, sample: int) -> EpisodeScore:
        seed = episode_seed(config.seed, "measure", task.content_hash, sample)
        generator = str(task.metadata.get("generator") or "all")
        for attempt in range(3):
            episode = await player.play(task, seed=seed + attempt, sample=sample, channel=channel, greedy=greedy)
            if episode.outcome is not Outcome.INFRA and episode.result is not None:
                return EpisodeScore(task.id, generator, episode.result.strict, plain_mean(episode.result.checks))
        return EpisodeScore(task.id, generator, None, 0.0)

    return list(await asyncio.gather(*(one(task, sample) for task in tasks for sample in range(samples))))


def summarize(results: Sequence[EpisodeScore]) -> SplitScore:
    """The score over all results. Raises :class:`~clawgym.errors.TrainingError` if no episode was graded."""
    by_task: dict[str, list[float]] = {}
    by_generator: dict[str, list[float]] = {}
    partial: list[float] = []
    for task, generator, strict, share in results:
        if strict is not None:
            partial.append(share)
            by_task.setdefault(task, []).append(strict)
            by_generator.setdefault(generator, []).append(strict)
    estimate = rate(list(by_task.values()))
    if estimate is None:
        raise TrainingError("no episode could be graded: run `clawgym doctor`, and look at the pool's causes")
    means = {name: sum(values) / len(values) for name, values in sorted(by_generator.items())}
    return SplitScore(estimate, means, sum(one.strict is None for one in results), fmean(partial))


@contextlib.asynccontextmanager
async def open_engine(
    config: TrainConfig, policy: LoopPolicy, run: Path, *, version: int = 0
) -> AsyncIterator[Sampler]:
    """An engine with the weights of ``policy`` as ``version``: in this process, or on the server that ``compute``
    names."""
    window = config.model.context_window
    if config.compute.vllm or config.compute.sglang:
        assert isinstance(policy, Policy), "the configuration allows servers for trainer: local only"
        engine: Sampler = await policy.served(config.compute, run.absolute() / "adapters", context_window=window)
    else:
        engine = policy.engine(
            context_window=window,
            max_batch=config.rollout.concurrency,
            policy_version=version,
            kernels=config.compute.kernels,
        )
    try:
        await policy.publish(engine, version)
        yield engine
    finally:
        await engine.aclose()


@contextlib.asynccontextmanager
async def open_services(
    config: TrainConfig, policy: LoopPolicy, run: Path, pool: Pool, *, version: int = 0
) -> AsyncIterator[Services]:
    """Open the services of the run in the folder ``run``; the engine has the weights of ``policy`` as ``version``."""
    async with contextlib.AsyncExitStack() as stack:
        backend = make_backend(config.backend)
        stack.push_async_callback(backend.aclose)
        await backend.probe()
        engine = await stack.enter_async_context(open_engine(config, policy, run, version=version))
        gateway = await stack.enter_async_context(Gateway(engine, pool))
        await gateway.listen()
        judge = await stack.enter_async_context(judging(config, gateway))
        player = Player(config, gateway, backend, adapter=policy.adapter, judging=judge)
        stack.push_async_callback(player.aclose)
        yield Services(config, pool, backend, engine, gateway, player, judge)


def pool_file(run: Path) -> Path:
    """The file of a run's pool."""
    return run / "pool.db"
