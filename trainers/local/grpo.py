"""``clawgym train rl``: collect episodes, train on them, sample with the new weights.

Invariants: a batch is trained on once. It is acknowledged after its checkpoint is on disk; a run that is killed in
between fetches the same batch again. The best checkpoint is chosen on the validation split. The held-out split is
evaluated before the first and after the last step.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Protocol

from clawgym.errors import TrainingError
from clawgym.gateway.render import Renderer
from clawgym.offload import in_update_thread
from clawgym.pool import Pool
from clawgym.pool.states import Batch
from clawgym.trainers.common.advantages import trained_by_turn, write_advantages
from clawgym.trainers.common.batch import images_of, make_batch, scored_episodes
from clawgym.trainers.common.canary import Canaries
from clawgym.trainers.common.checkpoints import Checkpoints, Progress
from clawgym.trainers.common.collector import Collector, GroupPlayer
from clawgym.trainers.common.demonstrations import load_imitation_data
from clawgym.trainers.common.imitation import ImitationData
from clawgym.trainers.common.judging import Agreement
from clawgym.trainers.common.run import Run
from clawgym.trainers.common.services import LoopPolicy, Services, open_services, pool_file
from clawgym.trainers.common.splits import Splits
from clawgym.trainers.common.start_model import base_folder
from clawgym.trainers.common.step import BatchLearner
from clawgym.trainers.common.teaching import Teachers, find_teachers
from clawgym.trainers.config import TrainConfig
from clawgym.trainers.local.training_state import TrainingState

__all__ = ["LoopState", "train_from", "train_grpo"]

CONSUMER = "trainer"
_POLL_SECONDS = 0.5
"""Seconds between two checks for a batch while no group ends: a deadline may have passed."""
_MAX_FAILURES = 20
"""A run gives up after this many infrastructure errors in a row, or after more than ``rollout.concurrency`` if that is
larger: one failing server ends all running episodes at once."""


class LoopState(Protocol):
    """What the loop trains."""

    @property
    def policy(self) -> LoopPolicy: ...

    @property
    def learner(self) -> BatchLearner: ...

    @property
    def checkpoints(self) -> Checkpoints: ...

    @property
    def progress(self) -> Progress: ...

    def save(self) -> None:
        """Write a checkpoint. Raises :class:`~clawgym.errors.TrainingError` if it cannot be written."""
        ...


async def train_grpo(config: TrainConfig, run: Run, splits: Splits) -> Progress:
    """Train until the budget is used up or ``run.stop`` is set, from the last checkpoint if there is one.

    Raises :class:`~clawgym.errors.TrainingError` if a guard is exceeded, and if no episodes can be collected.
    """
    folder = base_folder(config, run.path, splits.demonstrations, ())
    state = TrainingState.load(config, run.path, folder, reference=config.algorithm.kl > 0)
    return await train_from(state, config, run, splits)


async def train_from(state: LoopState, config: TrainConfig, run: Run, splits: Splits) -> Progress:
    """:func:`train_grpo` from a loaded ``state``. Raises as it does."""
    progress = state.progress
    run.rewind(progress.step if state.checkpoints.last() else -1)  # -1: repeat the first evaluations too
    with Pool(pool_file(run.path)) as pool:
        imitation = None
        if config.algorithm.imitation:
            imitation, _ = await load_imitation_data(config, splits, pool, run)
            imitation.restore_solved(progress.extra.get("solved", {}), pool)
        async with open_services(config, state.policy, run.path, pool, version=progress.step) as services:
            await _Loop(run, services, state, splits, imitation).run()
    return progress


class _Loop:
    """One call of :func:`train_grpo`."""

    def __init__(
        self, run: Run, services: Services, state: LoopState, splits: Splits, imitation: ImitationData | None
    ) -> None:
        self._run = run
        self._services = services
        self._state = state
        self._splits = splits
        self._imitation = imitation
        self._config, self._pool = config, pool = services.config, services.pool
        self._policy, self._checkpoints, self._progress = state.policy, state.checkpoints, state.progress
        self._groups = GroupPlayer(config, splits.train, pool, services.player)
        self._collector = Collector(config, self._groups)
        self._acked = 0
        self._replaced = 0
        self._renderer: Renderer | None = None
        self._agreement = Agreement(config, state.progress.extra)
        judge = None if services.judge is None else services.judge.canary_pool
        self._canaries = Canaries(config, splits.validation, pool, services.backend, judge)

    async def run(self) -> None:
        progress, stop = self._progress, self._run.stop
        await self._acknowledge()  # batches that a killed run saved but did not acknowledge
        if progress.step == 0 and self._checkpoints.last() is None:
            for greedy in (False, True) if self._config.evaluation.before else ():
                await self._run.measure(self._services, "heldout", self._splits.heldout, 0, greedy=greedy)
            await self._validate()
            if stop.is_set():
                return
            await self._save()
        elif self._validates() and self._run.unvalidated(progress.step):
            await self._validate()
            await self._save()
        self._collector.advance(progress.step, await self._dropped())
        collecting = asyncio.create_task(self._collector.run())
        try:
            while not stop.is_set() and not self._over():
                await self._step(collecting)
        finally:
            collecting.cancel()
            await asyncio.gather(collecting, return_exceptions=True)
        if self._acked < progress.step:  # stopped between two checkpoints
            await self._save()
        if self._over():
            await self._run.measure_best(self._services, self._policy, self._checkpoints, self._splits.heldout)

    async def _save(self) -> None:
        await asyncio.to_thread(self._state.save)
        await self._acknowledge()

    async def _acknowledge(self) -> None:
        """Acknowledge to the pool all batches in the newest checkpoint."""
        while self._acked < self._progress.step:
            await asyncio.to_thread(self._pool.ack, CONSUMER, self._acked)
            self._acked += 1

    def _over(self) -> bool:
        return self._progress.used(self._config.budget) >= 1.0

    def _validates(self) -> bool:
        """Whether the policy is evaluated after this step."""
        return self._progress.step % self._config.evaluation.every == 0 or self._over()

    async def _step(self, collecting: asyncio.Task[None]) -> None:
        config, progress = self._config, self._progress
        started, idle = time.monotonic(), self._collector.idle_seconds
        fetched = await self._fetch(collecting)
        if fetched is None:
            return
        waited = time.monotonic() - started
        seed = config.seed * 1_000_003 + progress.step
        teachers, said = await self._teachers(fetched)
        images = await asyncio.to_thread(images_of, fetched, self._pool)
        make = partial(
            make_batch,
            seed=seed,
            process_weight=self._agreement.process_weight,
            teachers=teachers,
            images=images,
            device=self._policy.device,
        )
        batch = await asyncio.to_thread(make, fetched, config)
        metrics = dict(batch.metrics) | self._agreed(fetched) | said
        if self._imitation is not None and config.algorithm.self_imitation:
            progress.extra.setdefault("solved", {}).update(self._imitation.add_solved(batch))
            metrics["sft/solved_tasks"] = float(self._imitation.solved)
        done = progress.used(config.budget)
        imitation = None if self._imitation is None else self._imitation.batch
        train_step = partial(self._state.learner.train_step, batch, seed=seed, done=done, imitation=imitation)
        if config.compute.sleep:
            await self._services.engine.sleep()  # type: ignore[union-attr]
        elif not config.rollout.staleness:
            await self._services.rest()
        metrics |= await in_update_thread(train_step)
        versions = [v for e in batch.episodes for s in e.sequences for v in s.policy_versions if v is not None]
        progress.step += 1
        await self._policy.publish(self._services.engine, progress.step)
        learner = self._state.learner
        used = trained_by_turn(batch, learner.advantages)
        await asyncio.to_thread(write_advantages, self._run.path, progress.step - 1, used)
        seconds = time.monotonic() - started
        progress.seconds += seconds
        progress.tokens += int(metrics["rollout/sampled_tokens"])
        metrics |= {
            "timing/wait_for_batch": waited,
            "timing/step": seconds,
            "timing/learning_seconds": progress.seconds,
            "perf/trainer_idle_ratio": waited / seconds,
            "perf/sampled_tokens_per_second": metrics["rollout/sampled_tokens"] / seconds,
            "staleness/mean": sum(progress.step - 1 - v for v in versions) / max(1, len(versions)),
            "staleness/max": float(max((progress.step - 1 - v for v in versions), default=0)),
            "timing/rollouts_idle_seconds": self._collector.idle_seconds - idle,
            "perf/rollout_idle_ratio": (self._collector.idle_seconds - idle) / seconds,
            "rollout/infra": float(self._groups.infra),
            "rollout/groups_replaced": float(self._replaced),
            **self._services.player.milestone_metrics(),
        }
        validates = self._validates()
        if validates:
            metrics |= await self._validate()
        self._run.log(progress.step, metrics)
        if validates or progress.step % config.checkpoint_every == 0:
            await self._save()
        self._collector.advance(progress.step, await self._dropped())

    async def _teachers(self, batch: Batch) -> tuple[Teachers, dict[str, float]]:
        """The teachers of a batch, and metrics; empty without ``distillation.hints``."""
        about = self._config.distillation
        if not about.hints:
            return {}, {}
        self._renderer = self._renderer or Renderer(self._policy.folder)
        scorer = self._policy.scorer(tokens=self._config.compute.micro_tokens)
        return await find_teachers(batch, about, self._pool, self._renderer, scorer)

    def _agreed(self, batch: Batch) -> dict[str, float]:
        """Recalibrate the weight of the process reward, which applies from the next step on; metrics of the judge."""
        metrics = self._agreement.add(scored_episodes(batch))
        if self._services.judge is not None:
            judge = self._services.judge.pool
            metrics |= {"judge/scored": float(judge.scored), "judge/unscored": float(sum(judge.unscored.values()))}
        return metrics

    async def _fetch(self, collecting: asyncio.Task[None]) -> Batch | None:
        """The batch of this step; ``None`` once the run is stopped. Raises the error that ended the collection."""
        about = self._config.rollout
        while not self._run.stop.is_set():
            self._collector.group_ended.clear()
            batch = await asyncio.to_thread(
                partial(
                    self._pool.fetch,
                    CONSUMER,
                    self._progress.step,
                    groups=about.groups,
                    policy_version=self._progress.step,
                    max_staleness=about.staleness,
                    replaced=about.replaced,
                    lease_seconds=24 * 3600,
                )
            )
            if batch is not None:
                return batch
            self._collector.advance(self._progress.step, await self._dropped())
            news = asyncio.ensure_future(self._collector.group_ended.wait())
            done, _ = await asyncio.wait({collecting, news}, timeout=_POLL_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            news.cancel()
            if collecting in done:
                collecting.result()
            if self._groups.failures_in_a_row >= max(_MAX_FAILURES, 1 + self._config.rollout.concurrency):
                raise TrainingError(
                    f"{self._groups.failures_in_a_row} infrastructure errors in a row (the last: "
                    f"{self._groups.last_cause}): run `clawgym doctor`, repair that, and run the same command again"
                )
        return None

    async def _dropped(self) -> int:
        stats = (await asyncio.to_thread(self._pool.stats))["channels"].get("train", {})
        self._replaced = stats.get("dropped", {}).get("zero-variance", 0)
        return stats.get("groups", {}).get("dropped", 0)

    async def _validate(self) -> dict[str, float]:
        """Evaluate on the validation split. Returns metrics of the canaries."""
        first_scores = self._progress.extra.setdefault("canary", {})
        metrics, warnings = await self._canaries.check(first_scores)
        warnings += [] if self._services.judge is None else self._services.judge.warnings()
        for text in warnings:
            self._run.say(f"warning: {text}")
        await self._run.validate(self._services, self._splits.validation, self._progress)
        return metrics
