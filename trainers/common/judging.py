"""Process rewards while training: turns are judged once their box is closed, beside the episodes that still run.

Invariants: no box and no place for an episode is held while a judge thinks; a turn that could not be judged has no
process reward, and its episode is learnt from by its outcome; what a judge is worth is measured by how the episodes
ended, all the time.
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
from clawgym.trainers.credit import ScoredEpisode, judged_of

__all__ = ["Agreement", "Judging", "judging"]

_PLACES = 16
"""Turns that are judged at once; the engine of a judge has a place for each of their calls."""


class Judging:
    """Gives the turns of an episode their process rewards."""

    def __init__(
        self, gateway: Gateway, judge: Judge, *, by_majority: bool = False, about: Reward | None = None
    ) -> None:
        self._gateway = gateway
        self._by_majority = by_majority
        self._about = about or Reward()
        self.pool = JudgePool(judge, concurrency=_PLACES)
        self.aside = JudgePool(judge, concurrency=_PLACES)
        """For turns that are not learnt from: counted apart."""
        self._counted = 0, Counter[str]()

    async def __call__(self, task: Task | str, session: str, episode: Episode, within: float | None = None) -> None:
        """Judge what the pool has of ``session``, before it is closed; what takes longer than ``within`` seconds is
        left unscored."""
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
        # A judgement without a valid vote gives no reward; it may hold hints.
        unscored = {turn: judgement.about() for turn, judgement in found.items() if turn not in rewards}
        await self._gateway.in_pool(lambda pool: pool.set_turn_rewards(session, rewards, about={**about, **unscored}))

    def warnings(self) -> list[str]:
        """What somebody should look at, of the turns since the last call."""
        scored, unscored = self._counted
        self._counted = self.pool.scored, Counter(self.pool.unscored)
        causes = self.pool.unscored - unscored
        del causes["next-state"]
        if causes.total() <= self.pool.scored - scored:
            return []
        cause, count = causes.most_common(1)[0]
        return [
            f"{causes.total()} of {causes.total() + self.pool.scored - scored} turns could not be judged, {count} for "
            f"{cause}: they are learnt from by their outcome alone; see that the judge answers (reward.judge)"
        ]


@contextlib.asynccontextmanager
async def judging(config: TrainConfig, gateway: Gateway) -> AsyncIterator[Judging | None]:
    """The judge that ``reward.judge`` names; ``None`` where none is wanted. Raises
    :class:`~clawgym.errors.TrainingError` for one that cannot be."""
    if config.reward.judge is None:
        yield None
        return
    async with contextlib.AsyncExitStack() as stack:
        binary = config.algorithm.advantage == "binary"
        made = Judging(gateway, _judge(config, gateway, stack), by_majority=binary, about=config.reward)
        await stack.enter_async_context(made.pool)
        await stack.enter_async_context(made.aside)
        yield made


def _judge(config: TrainConfig, gateway: Gateway, stack: contextlib.AsyncExitStack) -> Judge:
    """The judge, made with those settings of ``reward`` that it takes."""
    about = config.reward
    name = about.judge or ""
    settings: dict[str, Any] = {"votes": about.votes, "hints": config.distillation.hints, "pictures": about.pictures}
    settings |= {"max_tokens": about.max_tokens, "model": about.model, "base_url": about.base_url}
    settings |= {"gateway": gateway, "concurrency": _PLACES}
    try:
        takes = {option.name for option in judges.options(name)}
        given = {key: settings[key] for key in takes & settings.keys() if settings[key] is not None}
        made = judges.make(name, **given | about.judge_options)
    except Exception as error:  # whatever the constructor of somebody's judge raises
        raise TrainingError(
            f"reward.judge: {about.judge} gave no judge ({error or type(error).__name__}): choose one of `clawgym list "
            "judges`, or write package.module:thing, and let Python find the module (PYTHONPATH=folder)"
        ) from error
    if not isinstance(made, Judge):
        raise TrainingError(
            f"reward.judge: {about.judge} gave {type(made).__name__}, no judge: give it name, version and judge() "
            "(docs/rewards.md)"
        )
    if (close := getattr(made, "aclose", None)) is not None:
        stack.push_async_callback(close)
    return made


class Agreement:
    """How far process and outcome agree in the episodes that were learnt from, and so what process is worth, setting by
    setting. The episodes are kept in ``extra`` of the run's progress, so that a run that goes on knows them."""

    def __init__(self, config: TrainConfig, extra: dict[str, Any]) -> None:
        self._config = config
        self._extra = extra
        # Of a checkpoint without episodes only what they made of it is known.
        self._unknown = float(extra.get("process_worth", weight((0.0, 1.0))))
        self._seen: dict[str, deque[Judged]] = {}
        self._keep(Judged(*row) for row in extra.get("judged", ()))

    def worth(self, setting: str) -> float:
        """What process counts for in tasks of ``setting``, in [0, 1], beside ``reward.coefficient``."""
        if not self._config.reward.calibrate:
            return 1.0
        found = self._found.get(setting)
        return self._unknown if found is None else found.weight

    def add(self, attempts: Sequence[ScoredEpisode]) -> dict[str, float]:
        """Count the episodes of a batch in; from now on process is worth what they say. Figures, with the worth that
        the batch itself was learnt with; none without a judge."""
        if self._config.reward.judge is None:
            return {}
        figures = {"reward/process_worth": fmean(self.worth(one.setting) for one in attempts) if attempts else 0.0}
        self._keep(judged_of(attempts))
        self._extra["judged"] = [
            [row.setting, row.process, row.score, row.solved] for rows in self._seen.values() for row in rows
        ]
        for setting, found in self._found.items():
            which = "" if len(self._found) == 1 else f"_{setting}"
            for name in ("auc", "pearson", "spearman"):
                if (value := getattr(found, name)) is not None:
                    figures[f"reward/process_{name}{which}"] = value
            if which:
                figures[f"reward/process_worth{which}"] = self.worth(setting)
        return figures

    def _keep(self, rows: Iterable[Judged]) -> None:
        for row in rows:
            self._seen.setdefault(row.setting, deque(maxlen=WINDOW)).append(row)
        self._found = calibrate(row for rows in self._seen.values() for row in rows)
