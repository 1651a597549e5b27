"""``clawgym train``: collect episodes, learn from them, sample by what was learnt.

Invariants: a batch is learnt once: it is acknowledged after the checkpoint that holds it is on disk, and a run that
was killed in between fetches the same batch again; the best checkpoint is chosen on the validation part; what is held
out is measured before the first and after the last step.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial

from clawgym.errors import TrainingError
from clawgym.gateway.render import Renderer
from clawgym.pool import Pool
from clawgym.pool.states import Batch
from clawgym.trainers.common.batch import attempts_of, images_of, make_batch
from clawgym.trainers.common.canary import Canaries
from clawgym.trainers.common.checkpoints import Progress
from clawgym.trainers.common.collector import Collector, Groups
from clawgym.trainers.common.demonstrations import demonstrated
from clawgym.trainers.common.imitation import Imitated
from clawgym.trainers.common.judging import Agreement
from clawgym.trainers.common.parts import Parts
from clawgym.trainers.common.run import Run
from clawgym.trainers.common.scratch import base_folder
from clawgym.trainers.common.services import Setting, opened, pool_file
from clawgym.trainers.common.teaching import Taught, teachers
from clawgym.trainers.config import TrainConfig
from clawgym.trainers.local.learning import Learning

__all__ = ["train_grpo"]

CONSUMER = "trainer"
_LOOK = 0.5
"""Seconds between two looks at whether a batch is ready, where no group ends: a deadline may have passed."""
_PATIENCE = 20
"""Attempts in a row that failed for no fault of the agent, after which a run gives up; and at least all that are under
way at once, which one server takes with it."""


async def train_grpo(config: TrainConfig, run: Run, parts: Parts, *, stop: asyncio.Event) -> Progress:
    """Train until the budget is used up, or ``stop`` is set. Goes on from the last checkpoint, if there is one.

    Raises :class:`~clawgym.errors.TrainingError` past a guard, and where nothing can be collected.
    """
    folder = base_folder(config, run.path, parts.demonstrations, ())
    learning = Learning.begin(config, run.path, folder, reference=config.algorithm.kl > 0)
    progress = learning.progress
    run.rewind(progress.step if learning.checkpoints.last() else -1)  # the first measurements are done again, too
    with Pool(pool_file(run.path)) as pool:
        imitated = None
        if config.algorithm.imitation:
            imitated, _ = await demonstrated(config, parts, pool, run)
            imitated.recall(progress.extra.get("solved", {}), pool)
        async with opened(config, learning.policy, run.path, pool, version=progress.step) as setting:
            await _Loop(run, setting, learning, parts, imitated).run(stop)
    return progress


class _Loop:
    """One call of :func:`train_grpo`."""

    def __init__(self, run: Run, setting: Setting, learning: Learning, parts: Parts, imitated: Imitated | None) -> None:
        self._run = run
        self._setting = setting
        self._learning = learning
        self._parts = parts
        self._imitated = imitated
        self._config, self._pool = config, pool = setting.config, setting.pool
        self._policy, self._checkpoints, self._progress = learning.policy, learning.checkpoints, learning.progress
        self._groups = Groups(config, parts.train, pool, setting.player)
        self._collector = Collector(config, self._groups)
        self._acked = 0
        self._renderer: Renderer | None = None
        self._agreement = Agreement(config, learning.progress.extra)
        judge = None if setting.judge is None else setting.judge.aside
        self._canaries = Canaries(config, parts.validation, pool, setting.backend, judge)

    async def run(self, stop: asyncio.Event) -> None:
        progress = self._progress
        await self._acknowledge()  # what a killed run had learnt and saved, but not said
        if progress.step == 0 and self._checkpoints.last() is None:
            for greedy in (False, True):
                await self._run.measure(self._setting, "heldout", self._parts.heldout, 0, greedy=greedy)
            await self._validate()
            await self._save()
        self._collector.advance(progress.step, await self._dropped())
        collecting = asyncio.create_task(self._collector.run())
        try:
            while not stop.is_set() and not self._over():
                await self._step(collecting, stop)
        finally:
            collecting.cancel()
            await asyncio.gather(collecting, return_exceptions=True)
        if self._acked < progress.step:  # stopped between two checkpoints
            await self._save()
        if self._over():
            await self._run.measure_best(self._setting, self._policy, self._checkpoints, self._parts.heldout)

    async def _save(self) -> None:
        await asyncio.to_thread(self._learning.save)
        await self._acknowledge()

    async def _acknowledge(self) -> None:
        """Tell the pool what the newest checkpoint holds."""
        while self._acked < self._progress.step:
            await asyncio.to_thread(self._pool.ack, CONSUMER, self._acked)
            self._acked += 1

    def _over(self) -> bool:
        return self._progress.used(self._config.budget) >= 1.0

    async def _step(self, collecting: asyncio.Task[None], stop: asyncio.Event) -> None:
        config, progress = self._config, self._progress
        started, idle = time.monotonic(), self._collector.idle_seconds
        fetched = await self._fetch(collecting, stop)
        if fetched is None:
            return
        waited = time.monotonic() - started
        seed = config.seed * 1_000_003 + progress.step
        taught, said = await self._teachers(fetched)
        images = await asyncio.to_thread(images_of, fetched, self._pool)
        make = partial(
            make_batch, seed=seed, worth=self._agreement.worth, taught=taught, images=images, device=self._policy.device
        )
        batch = await asyncio.to_thread(make, fetched, config)
        figures = dict(batch.figures) | self._agreed(fetched) | said
        if self._imitated is not None:
            progress.extra.setdefault("solved", {}).update(self._imitated.remember(batch))
            figures["sft/solved_tasks"] = float(self._imitated.solved)
        done = progress.used(config.budget)
        learn = partial(self._learning.learner.learn, batch, seed=seed, done=done, imitated=self._imitated)
        figures |= await asyncio.to_thread(learn)
        versions = [v for e in batch.episodes for s in e.sequences for v in s.policy_versions if v is not None]
        progress.step += 1
        await self._policy.publish(self._setting.engine, progress.step)
        seconds = time.monotonic() - started
        progress.seconds += seconds
        progress.tokens += int(figures["rollout/sampled_tokens"])
        figures |= {
            "timing/wait_for_batch": waited,
            "timing/step": seconds,
            "timing/learning_seconds": progress.seconds,
            "perf/trainer_idle_ratio": waited / seconds,
            "perf/sampled_tokens_per_second": figures["rollout/sampled_tokens"] / seconds,
            "staleness/mean": sum(progress.step - 1 - v for v in versions) / max(1, len(versions)),
            "staleness/max": float(max((progress.step - 1 - v for v in versions), default=0)),
            "timing/rollouts_idle_seconds": self._collector.idle_seconds - idle,
            "perf/rollout_idle_ratio": (self._collector.idle_seconds - idle) / seconds,
            "rollout/infra": float(self._groups.infra),
        }
        validates = progress.step % config.evaluation.every == 0 or self._over()
        if validates:
            figures |= await self._validate()
        self._run.log(progress.step, figures)
        if validates or progress.step % config.checkpoint_every == 0:
            await self._save()
        self._collector.advance(progress.step, await self._dropped())

    async def _teachers(self, batch: Batch) -> tuple[Taught, dict[str, float]]:
        """The teachers of a batch, where there are any to be."""
        about = self._config.distillation
        if not about.hints:
            return {}, {}
        self._renderer = self._renderer or Renderer(self._policy.folder)
        return await teachers(batch, about, self._pool, self._renderer, self._policy.scorer())

    def _agreed(self, batch: Batch) -> dict[str, float]:
        """How far judge and outcomes agree; from the next step on, process counts for that much."""
        figures = self._agreement.add(attempts_of(batch))
        if self._setting.judge is not None:
            judge = self._setting.judge.pool
            figures |= {"judge/scored": float(judge.scored), "judge/unscored": float(sum(judge.unscored.values()))}
        return figures

    async def _fetch(self, collecting: asyncio.Task[None], stop: asyncio.Event) -> Batch | None:
        """The batch of this step; ``None`` if the run is to stop. Raises what ended the collection."""
        about = self._config.rollout
        while not stop.is_set():
            self._collector.ended.clear()
            batch = await asyncio.to_thread(
                partial(
                    self._pool.fetch,
                    CONSUMER,
                    self._progress.step,
                    groups=about.groups,
                    policy_version=self._progress.step,
                    max_staleness=about.staleness,
                    lease_seconds=24 * 3600,
                )
            )
            if batch is not None:
                return batch
            self._collector.advance(self._progress.step, await self._dropped())
            news = asyncio.ensure_future(self._collector.ended.wait())
            done, _ = await asyncio.wait({collecting, news}, timeout=_LOOK, return_when=asyncio.FIRST_COMPLETED)
            news.cancel()
            if collecting in done:
                collecting.result()
            if self._groups.in_a_row >= max(_PATIENCE, 1 + self._config.rollout.concurrency):
                raise TrainingError(
                    f"{self._groups.in_a_row} attempts in a row failed for no fault of the policy "
                    f"({self._groups.last_cause}): run `clawgym doctor`, mend it, and give the same command again"
                )
        return None

    async def _dropped(self) -> int:
        stats = await asyncio.to_thread(self._pool.stats)
        return stats["channels"].get("train", {}).get("groups", {}).get("dropped", 0)

    async def _validate(self) -> dict[str, float]:
        """Measure on the validation part; the figures of the canaries."""
        seen = self._progress.extra.setdefault("canary", {})
        figures, warnings = await self._canaries.look(seen)
        warnings += [] if self._setting.judge is None else self._setting.judge.warnings()
        for text in warnings:
            self._run.say(f"warning: {text}")
        await self._run.validate(self._setting, self._parts.validation, self._progress)
        return figures
