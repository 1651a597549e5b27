"""Judging beside the rollouts.

Invariants: nobody waits for a judge but who asked for its judgements; a turn whose judge failed or was late is left
unscored and counted, never 0; when a :class:`JudgePool` is closed, or its caller cancelled, nothing of it runs on.
Nothing here depends on what is logged.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Collection, Coroutine, Mapping, Sequence
from types import TracebackType
from typing import Any

from clawgym.errors import BudgetExceeded, EngineError
from clawgym.records import Episode, Image, Task, Turn
from clawgym.rewards.states import Judgeable, Setting, judgeables
from clawgym.rewards.votes import Judge, Judgement

__all__ = ["JudgePool"]


class JudgePool:
    """Asks ``judge`` about turns, at most ``concurrency`` at once, each for at most ``deadline`` seconds.

    The deadline begins when a turn's own call begins, not while it waits for its place. A context manager; belongs to
    the event loop that uses it.
    """

    def __init__(self, judge: Judge, *, concurrency: int = 16, deadline: float = 120.0) -> None:
        if concurrency < 1 or not deadline > 0:
            raise ValueError(f"concurrency={concurrency}, deadline={deadline}: both must be positive: correct them")
        self.unscored: Counter[str] = Counter()
        """Turns that got no judgement, by cause: ``late``, ``budget``, ``http-<status>``, ``engine`` (no answer),
        ``next-state`` (nothing came after), ``invalid`` (no vote of it is one), ``no-judgement`` (the judge gave
        something else), else the name of the error's class."""
        self.scored = 0
        """Turns with at least one valid vote."""
        self._judge = judge
        self._deadline = deadline
        self._room = asyncio.Semaphore(concurrency)
        self._running: set[asyncio.Task[Any]] = set()
        self._closed = False

    async def judge(self, asked: Judgeable) -> Judgement | None:
        """The judgement of one turn; ``None`` where it could not be had in time."""
        async with self._room:
            try:
                async with asyncio.timeout(self._deadline):
                    judgement = await self._judge.judge(asked)
                if not isinstance(judgement, Judgement):
                    self.unscored["no-judgement"] += 1
                    return None
                json.dumps(judgement.about(), allow_nan=False)  # the pool must be able to keep it
                score = judgement.score
            except Exception as error:  # whatever a judge does, the rollouts go on
                self.unscored[_cause(error)] += 1
                return None
        if score is None:
            self.unscored["invalid"] += 1
        else:
            self.scored += 1
        return judgement

    async def judge_episode(
        self,
        task: Task | str,
        episode: Episode | Sequence[Turn],
        *,
        id: str | None = None,
        setting: Setting | None = None,
        outcome: bool = False,
        images: Mapping[str, Image] | None = None,
        judged: Collection[int] = (),
        within: float | None = None,
    ) -> dict[int, Judgement]:
        """Index of the turn -> judgement, for the turns that have a next state and are not ``judged`` already.

        The other arguments are those of :func:`~clawgym.rewards.states.judgeables`; the pictures of turns in a pool are
        ``{sha: pool.image(sha) for turn in turns for sha in turn.images}``. Turns that could not be judged are
        absent; asking again with those that were as ``judged`` tries the rest. ``within`` bounds all of it, in seconds,
        waiting for places included: what was judged by then is given back, the rest is cancelled and ``late``.
        """
        asked = judgeables(task, episode, id=id, setting=setting, outcome=outcome, images=images)
        turns = episode.turns if isinstance(episode, Episode) else episode
        if nothing := sum(turn.role == "main" for turn in turns) - len(asked):
            self.unscored["next-state"] += nothing
        asked = [one for one in asked if one.turn not in judged]
        tasks = {one.turn: asyncio.create_task(self.judge(one)) for one in asked}
        late: list[asyncio.Task[Judgement | None]] = []
        try:
            if tasks:
                await asyncio.wait(tasks.values(), timeout=within)
            if late := [each for each in tasks.values() if not each.done()]:
                self.unscored["late"] += len(late)
        finally:
            for each in tasks.values():
                each.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)
        done = {turn: each for turn, each in tasks.items() if each not in late}
        return {turn: found for turn, each in done.items() if (found := each.result()) is not None}

    def submit(
        self, task: Task | str, episode: Episode | Sequence[Turn], **about: Any
    ) -> asyncio.Task[dict[int, Judgement]]:
        """:meth:`judge_episode`, begun now, beside whatever else runs; the result is there to be awaited. Cancelled by
        :meth:`aclose`."""
        if self._closed:
            raise RuntimeError("this pool of judges is closed: make a new one")
        return self._started(self.judge_episode(task, episode, **about))

    def _started(self, work: Coroutine[Any, Any, dict[int, Judgement]]) -> asyncio.Task[dict[int, Judgement]]:
        running = asyncio.get_running_loop().create_task(work)
        self._running.add(running)
        running.add_done_callback(self._running.discard)
        return running

    async def settled(self) -> None:
        """Wait for everything that was submitted."""
        while self._running:
            await asyncio.wait(self._running)

    async def aclose(self) -> None:
        """Cancel what runs, and wait until it has ended."""
        self._closed = True
        for running in self._running:
            running.cancel()
        await self.settled()

    async def __aenter__(self) -> JudgePool:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


def _cause(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "late"
    if isinstance(error, BudgetExceeded):
        return "budget"
    if isinstance(error, EngineError):
        return "engine" if error.status is None else f"http-{error.status}"
    return type(error).__name__
