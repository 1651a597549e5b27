"""Judge turns concurrently with rollouts.

Invariants: rollouts never wait for a judge. A turn whose judge failed or was late stays unscored and is counted, never
scored 0. When a :class:`JudgePool` is closed, or its caller is cancelled, no call continues.
"""

from __future__ import annotations

import asyncio
import json
import traceback
from collections import Counter
from collections.abc import Collection, Coroutine, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from clawgym.errors import BudgetExceeded, EngineError
from clawgym.records import Episode, Image, Task, Turn
from clawgym.records.judge import Judge, Judgeable, Judgement, Setting
from clawgym.rewards.states import judgeables

__all__ = ["JudgePool"]


class JudgePool:
    """Runs ``judge`` on turns, at most ``concurrency`` at once, each for at most ``deadline`` seconds.

    The deadline of a turn starts with its call, not while it waits in the queue. An asynchronous context manager that
    belongs to one event loop.
    """

    def __init__(self, judge: Judge, *, concurrency: int = 16, deadline: float = 120.0) -> None:
        if concurrency < 1 or not deadline > 0:
            raise ValueError(f"concurrency={concurrency}, deadline={deadline}: both must be positive: correct them")
        self.unscored: Counter[str] = Counter()
        """Number of turns without a score, by cause: ``late``, ``budget``, ``http-<status>``, ``engine`` (no answer),
        ``next-state`` (nothing followed the turn), ``invalid`` (no valid vote), ``no-judgement`` (the judge returned
        something else), or the name of the exception's class."""
        self.errors: dict[str, str] = {}
        """Name of an exception's class -> the newest one, and the line that raised it."""
        self.scored = 0
        """Number of turns with at least one valid vote."""
        self._judge = judge
        self._deadline = deadline
        self._room = asyncio.Semaphore(concurrency)
        self._running: set[asyncio.Task[Any]] = set()
        self._closed = False

    async def judge(self, record: Judgeable) -> Judgement | None:
        """Judge one turn. None if the judge failed or was late."""
        async with self._room:
            try:
                async with asyncio.timeout(self._deadline):
                    judgement = await self._judge.judge(record)
                if not isinstance(judgement, Judgement):
                    self.unscored["no-judgement"] += 1
                    return None
                json.dumps(judgement.about(), allow_nan=False)  # it must be JSON for the pool
                score = judgement.score
            except Exception as error:  # no error of a judge may stop the rollouts
                self.unscored[cause := _cause(error)] += 1
                if cause == type(error).__name__:
                    raised = traceback.extract_tb(error.__traceback__)[-1]
                    text = traceback.format_exception_only(error)[-1].strip()[:200]
                    self.errors[cause] = f"{text} ({Path(raised.filename).name}:{raised.lineno})"
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
        """Judge the turns of an episode that have a next state.

        The arguments not listed here are those of :func:`~clawgym.rewards.states.judgeables`. The images of turns in a
        pool are ``{sha: pool.image(sha) for turn in turns for sha in turn.images}``.

        Args:
            judged: indices of turns to skip, because they have a judgement already.
            within: time limit for the whole episode, in seconds, including waiting in the queue. Turns not judged by
                then are cancelled and counted as ``late``.

        Returns:
            Index of the turn -> judgement, without the turns that could not be judged.
        """
        records = judgeables(task, episode, id=id, setting=setting, outcome=outcome, images=images)
        turns = episode.turns if isinstance(episode, Episode) else episode
        if nothing := sum(turn.role == "main" for turn in turns) - len(records):
            self.unscored["next-state"] += nothing
        records = [record for record in records if record.turn not in judged]
        tasks = {record.turn: asyncio.create_task(self.judge(record)) for record in records}
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
        """Start :meth:`judge_episode` in the background, and return its task. :meth:`aclose` cancels it."""
        if self._closed:
            raise RuntimeError("this pool of judges is closed: make a new one")
        return self._started(self.judge_episode(task, episode, **about))

    def _started(self, work: Coroutine[Any, Any, dict[int, Judgement]]) -> asyncio.Task[dict[int, Judgement]]:
        running = asyncio.get_running_loop().create_task(work)
        self._running.add(running)
        running.add_done_callback(self._running.discard)
        return running

    async def settled(self) -> None:
        """Wait until all submitted episodes are judged."""
        while self._running:
            await asyncio.wait(self._running)

    async def aclose(self) -> None:
        """Cancel all running judgements, and wait until they have ended."""
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
