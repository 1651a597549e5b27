"""Replay of held-out turns: what another version replies to a user's message, and who scores it.

Nobody has seen the new reply, so it is scored by what the user said about the reply that they saw. There is no perfect
way, which is why the gate asks for two scorers that err differently:

- ``likelihood`` reads no text. It asks whether a version prefers the replies that users approved more than the version
  that answers does, and avoids those that they complained of: sigmoid of the difference of the reply's log-probability
  (the implicit reward of DPO with beta = 2, arXiv 2305.18290, eq. 5; the reference is the version that answers). What
  a version writes cannot persuade it. But where most replies are complained of, it likes every change a little, as a
  version that drifts gives what was said less probability.
- ``judge`` reads the new reply beside what the user said about the old one. A model that begs can try to persuade it.

A turn that answers a complaint is left out. The complaint says what to do, so nearly every version gets it right; as a
conversation counts once, with the mean of its turns, it would halve a gain where there is one, and no loss.

Invariant: a held-out turn was judged before a version is measured on it, and the judge never sees which version wrote
a reply.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Protocol

from clawgym.engines.openai import OpenAIEngine
from clawgym.engines.protocol import Completion, Sampling
from clawgym.online.client import reply_of
from clawgym.online.config import ServiceConfig, ServiceFolder
from clawgym.online.versions import Version, Versions
from clawgym.pool import Pool, PooledEpisode
from clawgym.pool.states import PROCESS_REWARD
from clawgym.records import Turn, prompt_ids
from clawgym.records.judge import Judgeable, Message
from clawgym.registry import scorers
from clawgym.rewards.hints import tools_of
from clawgym.rewards.states import judgeables

__all__ = ["REPLAYS", "HeldOutTurn", "Replayed", "ReplayScorer", "ScorerContext", "held_out_turns", "replay"]

_MOST_NATS = 5.0
"""Bound of the change of a reply's log-probability, so that a long reply counts no more than a short one."""
_STEEPNESS = 2.0
"""beta of DPO. The version that answers always has 0.5, so the difference of two versions uses half of the range that
the gate's bounds allow for. With 1 a small gain had 0.6 of the evidence (docs/results/online.md)."""
_LONGEST = 1024
"""Most tokens of a replayed reply."""
REPLAYS = 3
"""Replies of a version to a turn; its score is their mean. Most of the spread of one reply's score is that of sampling:
with three, the spread of the difference of two versions falls to about 0.6 of it."""


@dataclass(frozen=True)
class HeldOutTurn:
    """A turn of a held-out conversation whose reply the user approved of or not."""

    session: str
    index: int
    at: float
    """When the conversation began, in seconds since 1970."""
    turns: Sequence[Turn]
    """All turns of the conversation."""
    record: Judgeable
    """The turn with its history, and what the user said next."""
    tools: Sequence[Mapping[str, Any]]
    vote: int
    """1 or -1."""

    @property
    def id(self) -> str:
        """The id of the item of the gate."""
        return f"{self.session}:{self.index}"


@dataclass(frozen=True)
class Replayed:
    """What a version replies to a held-out turn."""

    turn: HeldOutTurn
    version: Version
    serving: Version
    """The version that answers users, with which a candidate is compared."""
    reply: Message | None
    """None if it gave none."""


@dataclass(frozen=True)
class ScorerContext:
    """What a scorer is made with."""

    folder: ServiceFolder
    config: ServiceConfig
    pool: Pool
    versions: Versions


class ReplayScorer(Protocol):
    """Scores replayed turns. A scorer of your own is one class, registered by name::

    @clawgym.registry.scorers.register("brief")
    class Brief:
        def __init__(self, context):
            pass

        async def score(self, replayed):
            return float(len(str((replayed.reply or {}).get("content"))) < 200)
    """

    async def score(self, replayed: Replayed) -> float:
        """In [0, 1]; 0.5 says nothing. Raises :class:`~clawgym.errors.ClawGymError` if it should be tried again."""
        ...


def held_out_turns(pool: Pool, episode: PooledEpisode, most: int) -> list[HeldOutTurn]:
    """The turns of a judged conversation with a vote, which answer no complaint and have no pictures: at most ``most``,
    chosen by a hash."""
    votes = pool.turn_rewards(episode.id).get(PROCESS_REWARD, {})
    turns = pool.turns(episode.id)
    found = [
        HeldOutTurn(
            episode.id,
            record.turn,
            episode.opened_at,
            turns,
            record,
            tools_of(pool, turns, record.turn),
            1 if votes[record.turn] > 0 else -1,
        )
        for record in judgeables("", turns, id=episode.id, setting="chat")
        if votes.get(record.turn)
        and not _answers_complaint(turns, record, votes)
        and not any(turn.images for turn in turns[: record.turn + 1])
    ]
    chosen = sorted(found, key=lambda turn: hashlib.sha256(turn.id.encode()).digest())[:most]
    return sorted(chosen, key=lambda turn: turn.index)


def _answers_complaint(turns: Sequence[Turn], record: Judgeable, votes: Mapping[int, float]) -> bool:
    """Whether a user has just complained of the reply before this turn."""
    roles = [message.get("role") for message in record.history]
    if "assistant" not in roles or roles[-1] != "user":
        return False
    earlier = [n for n, turn in enumerate(turns[: record.turn]) if turn.role == "main"]
    before = turns[record.turn].parent if turns[record.turn].parent is not None else max(earlier, default=None)
    return before is not None and votes.get(before, 0.0) < 0


async def replay(turn: HeldOutTurn, version: Version, serving: Version, engine: OpenAIEngine) -> list[Replayed]:
    """Ask ``version``, which answers ``engine``, for :data:`REPLAYS` replies. Raises as
    :func:`~clawgym.online.client.reply_of` does."""
    asked = turn.turns[turn.index]
    temperature = asked.sampling.get("temperature")

    async def once(number: int) -> Replayed:
        seed = int.from_bytes(hashlib.sha256(f"{turn.id}:{number}".encode()).digest()[:4], "big") >> 1
        sampling = Sampling(
            temperature=1.0 if temperature is None else float(temperature),
            max_tokens=min(_LONGEST, 2 * len(asked.sampled_ids) + 64),
            seed=seed,
        )
        got = await reply_of(engine, turn.record.history, tools=turn.tools, sampling=sampling)
        return Replayed(turn, version, serving, None if got is None else message_of(got))

    return await asyncio.gather(*map(once, range(REPLAYS)))


def message_of(got: Completion) -> Message:
    """A completion as an assistant's message."""
    calls = []
    for call in got.tool_calls:
        function = {"name": call.name, "arguments": json.dumps(dict(call.arguments))}
        calls.append({"id": call.id, "type": "function", "function": function})
    return {"role": "assistant", "content": got.text, **({"tool_calls": calls} if calls else {})}


@scorers.register("likelihood")
class Likelihood:
    """Whether a version prefers the replies that users approved of more than the serving one, and avoids the others."""

    def __init__(self, context: ScorerContext) -> None:
        self._context = context
        self._known: dict[tuple[str, int], float] = {}
        self._policy: Any = None
        self._loaded = 0

    async def score(self, replayed: Replayed) -> float:
        """See :class:`ReplayScorer`. 0.5 for turns without exact tokens."""
        turn = replayed.turn
        asked = turn.turns[turn.index]
        if asked.flaw is not None or not asked.sampled_ids:
            return 0.5
        moved = await self._logp(turn, replayed.version) - await self._logp(turn, replayed.serving)
        if not math.isfinite(moved):
            return 0.5
        return 1 / (1 + math.exp(-_STEEPNESS * turn.vote * max(-_MOST_NATS, min(_MOST_NATS, moved))))

    async def _logp(self, turn: HeldOutTurn, version: Version) -> float:
        """Log-probability of the reply that the user saw, in nats, under a version."""
        from clawgym.rewards.scoring import ScoreRequest

        if (known := self._known.get((turn.id, version.number))) is not None:
            return known
        policy = self._with(version)
        about = self._context.config.training
        scorer = policy.scorer(tokens=about.compute.micro_tokens)
        sampled = turn.turns[turn.index].sampled_ids
        temperature = turn.turns[turn.index].sampling.get("temperature") or 1.0
        request = ScoreRequest(prompt_ids(turn.turns, turn.index), sampled, temperature=float(temperature))
        (found,) = await scorer.score([request])
        self._known[turn.id, version.number] = logp = float(found.logprobs.sum())
        return logp

    def _with(self, version: Version) -> Any:
        """The policy with the weights of a version."""
        from clawgym.engines.folders import model_folder
        from clawgym.trainers.common.checkpoints import load_adapter
        from clawgym.trainers.common.policy import load_policy

        about = self._context.config.training
        if self._policy is None:
            folder = model_folder(about.model.path or "")
            self._policy = load_policy(about.model, folder, about.compute)
        if version.number != self._loaded:
            load_adapter(version.adapter, self._policy)
            self._loaded = version.number
        return self._policy


@scorers.register("judge")
class JudgedReplay:
    """A model judge, which reads the new reply beside what the user said about the old one: that of the service."""

    def __init__(self, context: ScorerContext) -> None:
        self._context = context

    async def score(self, replayed: Replayed) -> float:
        """See :class:`ReplayScorer`."""
        from clawgym.online.judging import open_judge
        from clawgym.rewards.model import ModelJudge

        if replayed.reply is None:
            return 0.0
        context = self._context
        async with AsyncExitStack() as stack:
            judge = await open_judge(context.folder, context.config, context.pool, stack)
            assert isinstance(judge, ModelJudge), "the configuration was checked"
            mean = await judge.judge_instead(replayed.turn.record, replayed.reply)
        return 0.5 if mean is None else (mean + 1) / 2
