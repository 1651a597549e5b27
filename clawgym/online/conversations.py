"""Which conversation a request belongs to, when it begins, and when it ends.

Clients need not say it. A request continues the conversation whose turns are in its history; so do the calls that an
agent makes beside it (sub-agents, compactions, titles, :mod:`clawgym.gateway.roles`). A client that sends the id of its
session (:data:`HEADERS`, or ``prompt_cache_key`` in the body) is taken at its word.

Invariants: a request reaches only conversations of its own source. A conversation is one session of the gateway, in the
channel of its source, or in that of held-out conversations, which is decided by chance when it begins. It ends when it
was idle for long enough, heartbeats apart; then its session takes no more requests, and its episode stays open until it
is judged.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from clawgym.gateway.calls import ChatCall, Refusal
from clawgym.gateway.request import SessionRequest
from clawgym.gateway.roles import belongs
from clawgym.gateway.server import Gateway
from clawgym.gateway.sessions import Session
from clawgym.gateway.stitch import message_keys, tools_key
from clawgym.online.openclaw import is_heartbeat
from clawgym.pool import Pool, PooledEpisode

__all__ = [
    "CHANNEL",
    "HEADERS",
    "HELD_OUT",
    "Conversations",
    "active_sources",
    "channel_of",
    "source_of",
    "waiting_sources",
]

HEADERS = ("x-session-id", "x-openclaw-session-key")
"""Headers with the client's id of its session."""
CHANNEL, HELD_OUT = "live:", "held-out:"
"""The channel of a conversation of SOURCE is ``live:SOURCE`` or ``held-out:SOURCE``."""
_LONGEST_ID = 256
_ACTIVE_SECONDS = 7 * 86400.0
_MOST_RECENT = 4096
"""Replies whose conversation is remembered, for feedback."""


def channel_of(source: str, *, held_out: bool) -> str:
    """The channel of the pool for conversations of a source."""
    return f"{HELD_OUT if held_out else CHANNEL}{source}"


def source_of(channel: str) -> str | None:
    """The source of a channel of conversations; None for another channel."""
    for prefix in (CHANNEL, HELD_OUT):
        if channel.startswith(prefix):
            return channel.removeprefix(prefix)
    return None


def active_sources(stats: Mapping[str, Any]) -> set[str]:
    """The sources that spoke in the last week, by :meth:`~clawgym.pool.Pool.stats`. They share what is trained on and
    what the gate counts. A source that is silent for the night counts, or another could take its share."""
    since = time.time() - _ACTIVE_SECONDS
    channels = stats["channels"].items()
    return {source for name, about in channels if (source := source_of(name)) and about["newest"] > since}


def waiting_sources(stats: Mapping[str, Any]) -> dict[str, int]:
    """Source -> how many of its judged conversations wait to be trained on."""
    waiting = {channel: about["groups"].get("ready", 0) for channel, about in stats["channels"].items()}
    return {c.removeprefix(CHANNEL): n for c, n in sorted(waiting.items()) if n and c.startswith(CHANNEL)}


@dataclass(eq=False)
class _Open:
    """A conversation that takes requests."""

    id: str
    """Of the session in the gateway."""
    key: str | None
    """The client's id."""
    used: float
    """When its last request came, by ``Conversations``' clock."""


@dataclass
class _Source:
    conversations: OrderedDict[str, _Open] = field(default_factory=OrderedDict)
    """By id; the most recently used is last."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a conversation is found or opened, so that two requests do not open the same one."""


class Conversations:
    """The conversations of one service, on one event loop.

    Args:
        gateway: records the conversations.
        idle: seconds without a request after which a conversation ends.
        held_out: share of conversations that are never trained on.
        most: most open conversations of a source; the least recently used one ends when there are more.
    """

    def __init__(
        self,
        gateway: Gateway,
        *,
        idle: float,
        held_out: float,
        most: int = 256,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._gateway = gateway
        self._idle, self._held_out, self._most = idle, held_out, most
        self._clock = clock
        self._sources: dict[str, _Source] = {}
        self._recent = OrderedDict[str, str]()
        """Id of a reply -> id of its conversation."""
        self._chance = random.SystemRandom()

    async def restore(self) -> None:
        """Take up the conversations that a service that stopped left open in the pool."""
        for episode in await self._gateway.in_pool(_left_open):
            source = source_of(episode.channel)
            if source is not None:
                open_ = _Open(episode.id, episode.meta.get("client_session"), self._clock())
                self._of(source).conversations[episode.id] = open_

    async def session(
        self, source: str, headers: Mapping[str, str], body: Mapping[str, Any], call: ChatCall, *, counts: bool = False
    ) -> Session:
        """Return the session of a call. A new conversation is opened, unless the call only ``counts`` tokens."""
        key = _client_session(headers, body)
        about = self._of(source)
        async with about.lock:
            found = await self._find(about, key, call)
            if found is None and counts:
                return Session("", "")
            if found is None:
                found = await self._open(source, about, key)
            open_ = about.conversations[found.id]
            if not is_heartbeat(call.messages):
                open_.used = self._clock()
            about.conversations.move_to_end(found.id)
        if not counts:
            self._recent[call.id] = found.id
            if len(self._recent) > _MOST_RECENT:
                self._recent.popitem(last=False)
        return found

    async def of_reply(self, source: str, reply: str) -> tuple[str, int] | None:
        """The conversation of ``source`` with the reply of this id, and the index of the turn; None if there is none,
        or if it is judged already."""
        ids = [self._recent[reply]] if reply in self._recent else [e.id for e in await self._unjudged(source)]

        def look(pool: Pool) -> tuple[str, int] | None:
            for id in ids:
                episode = pool.episode(id)
                if source_of(episode.channel) == source and episode.state == "open":
                    for index, turn in enumerate(pool.turns(id)):
                        if turn.id == reply:
                            return id, index
            return None

        return await self._gateway.in_pool(look)

    async def end_idle(self) -> int:
        """End the conversations that are idle. Returns how many."""
        due = self._clock() - self._idle
        ended = 0
        for about in list(self._sources.values()):
            for open_ in [one for one in about.conversations.values() if one.used <= due]:
                ended += await self._end(about, open_)
        return ended

    async def end(self, id: str) -> bool:
        """End a conversation now. False if there is no open one with this id."""
        for about in self._sources.values():
            if (open_ := about.conversations.get(id)) is not None:
                return await self._end(about, open_)
        return False

    def _of(self, source: str) -> _Source:
        return self._sources.setdefault(source, _Source())

    async def _find(self, about: _Source, key: str | None, call: ChatCall) -> Session | None:
        if key is not None:
            ids = [one.id for one in reversed(about.conversations.values()) if one.key == key][:1]
            return await self._gateway.sessions.get(ids[0]) if ids else None
        tools = tools_key([] if call.tool_choice == "none" else call.tools)
        keys = message_keys(call.messages)
        best: tuple[int, Session] | None = None
        related: Session | None = None
        for one in list(reversed(about.conversations.values())):
            session = await self._gateway.sessions.get(one.id) if one.key is None else None
            if session is None or session.closed:
                continue
            match = session.tree.match(call.messages, keys, tools, by_ids=self._gateway.core.exact)
            if match.used > (best[0] if best else 0):
                best = match.used, session
            if related is None and belongs(session.tree, match, call.messages, tools):
                related = session
        return best[1] if best else related

    async def _open(self, source: str, about: _Source, key: str | None) -> Session:
        while len(about.conversations) >= self._most:
            quiet = [one for one in about.conversations.values() if not await self._busy(one)]
            if not quiet:
                raise Refusal(
                    429,
                    f"{self._most} conversations of this key wait for replies: try again when one has been answered",
                    code="rate_limit_exceeded",
                    retry_after=1.0,
                )
            await self._end(about, quiet[0])
        held_out = self._chance.random() < self._held_out
        meta = {"setting": "chat", **({} if key is None else {"client_session": key})}
        request = SessionRequest(channel=channel_of(source, held_out=held_out), agent=source, meta=meta)
        opened = await self._gateway.open_session(request)
        about.conversations[opened.id] = _Open(opened.id, key, self._clock())
        session = await self._gateway.sessions.get(opened.id)
        assert session is not None
        return session

    async def _busy(self, open_: _Open) -> bool:
        session = await self._gateway.sessions.get(open_.id)
        return session is not None and bool(session.handlers)

    async def _end(self, about: _Source, open_: _Open) -> bool:
        if await self._busy(open_):
            open_.used = self._clock()
            return False
        if about.conversations.pop(open_.id, None) is None:
            return False
        await self._gateway.close_session(open_.id)
        self._gateway.sessions.evict(open_.id)
        return True

    async def _unjudged(self, source: str) -> list[PooledEpisode]:
        return await self._gateway.in_pool(
            lambda pool: [e for e in pool.episodes(state="open") if source_of(e.channel) == source]
        )


def _client_session(headers: Mapping[str, str], body: Mapping[str, Any]) -> str | None:
    given = [*(headers.get(name) for name in HEADERS), body.get("prompt_cache_key")]
    return next((one[:_LONGEST_ID] for one in given if isinstance(one, str) and one), None)


def _left_open(pool: Pool) -> list[PooledEpisode]:
    return [episode for episode in pool.episodes(state="open") if episode.secret_sha256]
