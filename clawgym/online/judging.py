"""The loop that judges ended conversations: votes on their turns, hints, and what the user said by a thumb.

Invariants: a conversation is judged once, and then closed. A user's own feedback on a turn stands in place of the
judge's votes. A private conversation is deleted unread. At most ``turns`` turns of one conversation are scored, so that
one long conversation has no more weight than that. While the judge fails, conversations wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace

from clawgym.errors import ClawGymError
from clawgym.online.client import open_version
from clawgym.online.config import ServiceConfig, ServiceFolder
from clawgym.online.conversations import source_of
from clawgym.online.door import FEEDBACK
from clawgym.online.openclaw import is_heartbeat, reactions
from clawgym.pool import EpisodeEnd, Pool, PooledEpisode
from clawgym.records import Outcome, Turn
from clawgym.records.judge import Judge, Judgement
from clawgym.rewards.judge import JudgePool
from clawgym.rewards.model import ModelJudge
from clawgym.rewards.votes import rewards_of
from clawgym.trainers.common.judging import PLACES, make_judge

__all__ = ["ConversationJudge", "judge_conversations", "open_judge", "pause"]

_log = logging.getLogger("clawgym.online")
_POLL_SECONDS = 1.0
_RETRY_SECONDS = 30.0
_PASSING = re.compile("late|engine|budget|http-(408|429|5..)")
"""Causes of a turn without a score that another try may not have."""


async def judge_conversations(folder: ServiceFolder, stop: asyncio.Event) -> None:
    """Judge conversations as they end, until ``stop`` is set."""
    config = folder.config
    with Pool(folder.pool) as pool:
        judge = ConversationJudge(folder, config, pool)
        while not stop.is_set():
            waiting = [episode for episode in pool.episodes(state="open") if _ended(episode)]
            failed = False
            for episode in waiting:
                if stop.is_set():
                    return
                try:
                    failed |= not await judge(episode)
                except ClawGymError as error:
                    failed = True
                    _log.warning("conversation %s could not be judged: %s", episode.id, error)
            await pause(stop, _RETRY_SECONDS if failed else _POLL_SECONDS)


async def pause(stop: asyncio.Event, seconds: float) -> None:
    """Wait for ``stop``, at most so many seconds."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(stop.wait(), seconds)


def _ended(episode: PooledEpisode) -> bool:
    return not episode.secret_sha256 and source_of(episode.channel) is not None


class ConversationJudge:
    """Judges one conversation at a time."""

    def __init__(self, folder: ServiceFolder, config: ServiceConfig, pool: Pool) -> None:
        self._folder, self._config, self._pool = folder, config, pool

    async def __call__(self, episode: PooledEpisode) -> bool:
        """Judge a conversation that has ended, and close it. False if the judge failed: it should be tried again."""
        pool, id = self._pool, episode.id
        turns = pool.turns(id)
        if episode.trainable is False or not turns:
            pool.erase(id)
            return True
        feedback = self._feedback(id, turns)
        found, failed = await self._votes(id, _without_heartbeats(turns))
        if failed:
            return False
        for turn, score in feedback.items():
            said = found.get(turn)
            own = Judgement((1 if score > 0 else -1,), ("feedback",), "user", FEEDBACK)
            found[turn] = own if said is None else replace(own, hints=said.hints, hint_texts=said.hint_texts)
        found = self._limited(found, feedback)
        rewards, about = rewards_of(found, by_majority=True)
        unscored = {turn: judgement.about() for turn, judgement in found.items() if turn not in rewards}
        pool.set_turn_rewards(id, rewards, about={**about, **unscored})
        if not any(rewards.values()) and not any(judgement.hints for judgement in found.values()):
            pool.curate(id, trainable=False, note="nothing was said about its turns")
        good = sum(rewards.values()) > 0
        pool.close_episode(id, EpisodeEnd(outcome=Outcome.SOLVED if good else Outcome.FAILED))
        return True

    def _feedback(self, id: str, turns: Sequence[Turn]) -> dict[int, int]:
        """What the user said of each turn by a thumb: to the service, or to the client that shows it to the model."""
        given = self._pool.turn_rewards(id).get(FEEDBACK, {})
        shown = {turn: float(score) for turn, score in reactions(turns).items() if turn not in given}
        if shown:
            self._pool.set_turn_rewards(id, shown, name=FEEDBACK)
        return {turn: int(score) for turn, score in {**given, **shown}.items()}

    async def _votes(self, id: str, turns: tuple[Turn, ...]) -> tuple[dict[int, Judgement], bool]:
        """The judge's votes by turn, and whether it failed on any."""
        shown = {sha: self._pool.image(sha) for turn in turns for sha in turn.images}
        async with AsyncExitStack() as stack:
            judge = await open_judge(self._folder, self._config, self._pool, stack)
            judging = await stack.enter_async_context(JudgePool(judge, concurrency=PLACES))
            found = await judging.judge_episode("", turns, id=id, setting="chat", images=shown)
            failed = sorted(cause for cause in judging.unscored if _PASSING.fullmatch(cause))
            if failed:
                _log.warning("conversation %s: the judge failed (%s): trying again later", id, ", ".join(failed))
            return found, bool(failed)

    def _limited(self, found: Mapping[int, Judgement], feedback: Mapping[int, int]) -> dict[int, Judgement]:
        """At most ``turns`` judgements: the user's own first, then the latest."""
        order = sorted(found, key=lambda turn: (turn not in feedback, -turn))
        return {turn: found[turn] for turn in sorted(order[: self._config.turns])}


def _without_heartbeats(turns: Sequence[Turn]) -> tuple[Turn, ...]:
    """The turns as a judge sees them: a heartbeat is no answer to a reply, and has none."""
    return tuple(replace(turn, role="unknown") if is_heartbeat(turn.messages) else turn for turn in turns)


async def open_judge(folder: ServiceFolder, config: ServiceConfig, pool: Pool, stack: AsyncExitStack) -> Judge:
    """The judge of a service; ``stack`` closes it. ``policy`` is the first version of the model, which never changes,
    so that no version can learn to please itself."""
    about = config.training
    if about.reward.judge != "policy":
        return make_judge(about, None, stack)
    engine = await stack.enter_async_context(open_version(folder, pool, 0, concurrency=PLACES))
    return ModelJudge(
        engine,
        votes=about.reward.votes,
        hints=about.distillation.hints,
        max_tokens=about.reward.max_tokens,
        pictures=about.reward.pictures,
        weights="version 0",
    )
