"""Process rewards during training: the turns of an episode are judged after its sandbox is closed.

Invariants: judging holds no sandbox and no slot of ``rollout.concurrency``. A turn that could not be judged has no
process reward; it is trained on with the outcome of its episode only. The agreement of process rewards with outcomes is
measured on every batch.
"""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from clawgym.errors import TrainingError
from clawgym.gateway.server import Gateway
from clawgym.records import Episode, Task
from clawgym.records.judge import Judge
from clawgym.registry import judges
from clawgym.rewards.calibration import WINDOW, Judged, calibrate, weight
from clawgym.rewards.judge import JudgePool
from clawgym.rewards.votes import rewards_of
from clawgym.trainers.config import Reward, TrainConfig
from clawgym.trainers.credit import ScoredEpisode, judged_episodes
from clawgym.trainers.traits import traits_of

__all__ = ["PLACES", "Agreement", "Judging", "judging", "make_judge"]

PLACES = 16
"""Turns that are judged at the same time; also the concurrency of the judge's engine."""


class Judging:
    """Judges the turns of an episode and stores their process rewards in the pool."""

    def __init__(
        self, gateway: Gateway, judge: Judge, *, by_majority: bool = False, about: Reward | None = None
    ) -> None:
        self._gateway = gateway
        self._by_majority = by_majority
        self._about = about or Reward()
        self.pool = JudgePool(judge, concurrency=PLACES)
        self.canary_pool = JudgePool(judge, concurrency=PLACES)
        """The same judge for canaries, with separate counts."""
        self._counted = 0, Counter[str]()

    async def __call__(self, task: Task | str, session: str, episode: Episode, within: float | None = None) -> None:
        """Judge the turns of ``session`` in the pool, before it is closed. Turns that are not judged within ``within``
        seconds stay unscored."""
        turns = await self._gateway.in_pool(lambda pool: pool.turns(session))
        shown = [sha for turn in turns for sha in turn.images]
        images = await self._gateway.in_pool(lambda pool: {sha: pool.image(sha) for sha in shown})
        found = await self.pool.judge_episode(
            task,
            replace(episode, turns=turns),
            id=session,
            images=images,
            outcome=self._about.verdict,
            within=within,
        )
        rewards, about = rewards_of(found, by_majority=self._by_majority, count_zeros=self._about.count_zeros)
        # A judgement without a valid vote gives no reward, but may have hints.
        unscored = {turn: judgement.about() for turn, judgement in found.items() if turn not in rewards}
        await self._gateway.in_pool(lambda pool: pool.set_turn_rewards(session, rewards, about={**about, **unscored}))

    def warnings(self) -> list[str]:
        """Warnings about the turns since the last call."""
        scored, unscored = self._counted
        self._counted = self.pool.scored, Counter(self.pool.unscored)
        causes = self.pool.unscored - unscored
        del causes["next-state"]
        if causes.total() <= self.pool.scored - scored:
            return []
        cause, count = causes.most_common(1)[0]
        return [
            f"{causes.total()} of {causes.total() + self.pool.scored - scored} turns could not be judged, {count} for "
            f"{self.pool.errors.get(cause, cause)}; they are trained on with the outcome only: check the judge "
            "(reward.judge)"
        ]


@contextlib.asynccontextmanager
async def judging(config: TrainConfig, gateway: Gateway) -> AsyncIterator[Judging | None]:
    """The judge named by ``reward.judge``; ``None`` without one. Raises :class:`~clawgym.errors.TrainingError` if it
    cannot be made."""
    if config.reward.judge is None:
        yield None
        return
    async with contextlib.AsyncExitStack() as stack:
        by_majority = not traits_of(config.algorithm.advantage).uses_outcome
        made = Judging(gateway, make_judge(config, gateway, stack), by_majority=by_majority, about=config.reward)
        await stack.enter_async_context(made.pool)
        await stack.enter_async_context(made.canary_pool)
        yield made


def make_judge(config: TrainConfig, gateway: Gateway | None, stack: contextlib.AsyncExitStack) -> Judge:
    """Make the judge, with the settings of ``reward`` that it has options for; ``stack`` closes it.

    Raises :class:`~clawgym.errors.TrainingError` if it cannot be made, such as one that needs a gateway without one."""
    about = config.reward
    name = about.judge or ""
    settings: dict[str, Any] = {"votes": about.votes, "hints": config.distillation.hints, "pictures": about.pictures}
    settings |= {"max_tokens": about.max_tokens, "model": about.model, "base_url": about.base_url}
    settings |= {"gateway": gateway, "concurrency": PLACES}
    try:
        takes = {option.name for option in judges.options(name)}
        given = {key: settings[key] for key in takes & settings.keys() if settings[key] is not None}
        made = judges.make(name, **given | about.judge_options)
    except Exception as error:  # the constructor of a user's judge may raise anything
        raise TrainingError(
            f"reward.judge: {about.judge} cannot be made ({error or type(error).__name__}): choose one of `clawgym "
            "list judges`, or write package.module:thing, and let Python find the module (PYTHONPATH=folder)"
        ) from error
    if not isinstance(made, Judge):
        raise TrainingError(
            f"reward.judge: {about.judge} gave {type(made).__name__}, which is not a judge: a judge has name, version "
            "and judge() (docs/concepts/process-rewards.md)"
        )
    if (close := getattr(made, "aclose", None)) is not None:
        stack.push_async_callback(close)
    return made


class Agreement:
    """Calibrates the weight of the process reward by its agreement with outcomes, for each setting of tasks.

    Judged episodes are kept in ``extra`` of the run's progress, so that a resumed run has them."""

    def __init__(self, config: TrainConfig, extra: dict[str, Any]) -> None:
        self._config = config
        self._extra = extra
        # An old checkpoint has only the weight, not the episodes.
        self._unknown = float(extra.get("process_worth", weight((0.0, 1.0))))
        self._seen: dict[str, deque[Judged]] = {}
        self._keep(Judged(*row) for row in extra.get("judged", ()))

    def process_weight(self, setting: str) -> float:
        """The weight of the process reward in tasks of ``setting``, in [0, 1], before ``reward.coefficient``."""
        if not self._config.reward.calibrate or self._config.reward.milestones:
            return 1.0
        found = self._found.get(setting)
        return self._unknown if found is None else found.weight

    def add(self, scored: Sequence[ScoredEpisode]) -> dict[str, float]:
        """Add the episodes of a batch and recalibrate. Returns metrics, with the weight that applied to this batch;
        empty without a judge."""
        if self._config.reward.judge is None:
            return {}
        metrics = {"reward/process_worth": fmean(self.process_weight(one.setting) for one in scored) if scored else 0.0}
        self._keep(judged_episodes(scored))
        self._extra["judged"] = [
            [row.setting, row.process, row.score, row.solved] for rows in self._seen.values() for row in rows
        ]
        for setting, found in self._found.items():
            which = "" if len(self._found) == 1 else f"_{setting}"
            for name in ("auc", "pearson", "spearman"):
                if (value := getattr(found, name)) is not None:
                    metrics[f"reward/process_{name}{which}"] = value
            if which:
                metrics[f"reward/process_worth{which}"] = self.process_weight(setting)
        return metrics

    def _keep(self, rows: Iterable[Judged]) -> None:
        for row in rows:
            self._seen.setdefault(row.setting, deque(maxlen=WINDOW)).append(row)
        self._found = calibrate(row for rows in self._seen.values() for row in rows)
