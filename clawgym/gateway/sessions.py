"""Sessions of the gateway: their secrets, their turns, and the settings of their model calls.

Invariants: a session is an episode of the pool and can be loaded from it, so a gateway may be killed, and idle sessions
are evicted from memory. Only the digest of a secret is stored. An unknown session and a wrong secret give the same
error.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from clawgym.bounds import HELD_BODIES
from clawgym.engines.protocol import Sampling
from clawgym.errors import PoolError
from clawgym.gateway.calls import Message, Refusal
from clawgym.gateway.request import SessionCredentials, SessionRequest, reserve_session
from clawgym.gateway.roles import evidence_of, opening_of, system_of
from clawgym.gateway.stitch import UNFINISHED, Key, Node, Tree, message_keys
from clawgym.pool import EpisodeEnd, Pool, PoolWriter
from clawgym.records import Role, Turn, Usage, ids_array

__all__ = ["HeldBodies", "Session", "Sessions"]


class HeldBodies:
    """The bodies of the running requests of ``whose``, which may have ``HELD_BODIES`` bytes together."""

    def __init__(self, whose: str) -> None:
        self._whose = whose
        self._held = 0

    @contextlib.contextmanager
    def holding(self) -> Iterator[Callable[[int], None]]:
        """Count the body of a request until its end: yields a function to call with the size of each chunk.

        The function raises :class:`~clawgym.gateway.calls.Refusal` (429) if the running requests are too large
        together.
        """
        held = 0

        def hold(size: int) -> None:
            nonlocal held
            held += size
            self._held += size
            if self._held > HELD_BODIES:
                raise Refusal(
                    429,
                    f"the running requests of this {self._whose} have over {HELD_BODIES >> 20} MiB together "
                    "(HELD_BODIES): try again when one has been answered",
                    code="rate_limit_exceeded",
                    retry_after=1.0,
                )

        try:
            yield hold
        finally:
            self._held -= held


@dataclass(eq=False)
class Session:
    """One agent, possibly with several conversations (sub-agents, compactions)."""

    id: str
    secret_sha256: str
    sampling: Sampling = field(default_factory=Sampling)
    """Overrides the sampling parameters of requests."""
    adapter: str | None = None
    most_turns: int | None = None
    """Most model calls; further ones are refused."""
    tree: Tree = field(default_factory=Tree)
    """The finished turns."""
    closed: bool = False
    active: int = 0
    """Number of running requests."""
    turns: int = 0
    """Number of stored turns, which is the index of the next one."""
    usage: Usage = field(default_factory=Usage)
    """Usage of the turns since the session was opened or loaded."""
    failure: Exception | None = None
    """Why the last model call failed; ``None`` if a later one succeeded. Agents may hide such failures."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a turn gets its index and is stored."""
    bodies: HeldBodies = field(default_factory=lambda: HeldBodies("session"))

    handlers: set[asyncio.Task[Any]] = field(default_factory=set)
    """The tasks that serve running requests."""

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """Mark the current task as serving a request of this session."""
        task = asyncio.current_task()
        assert task is not None
        self.handlers.add(task)
        try:
            yield
        finally:
            self.handlers.discard(task)

    def holding(self) -> contextlib.AbstractContextManager[Callable[[int], None]]:
        """See :meth:`HeldBodies.holding`."""
        return self.bodies.holding()

    def accepts(self, secret: str) -> bool:
        """Whether ``secret`` is the secret of this session."""
        return hmac.compare_digest(_digest(secret), self.secret_sha256)

    def record_usage(self, usage: Usage, role: Role) -> None:
        """Record a successful turn."""
        self.usage += usage
        if role != "subagent":  # its success says nothing about the agent that waits for it
            self.failure = None

    def grow(
        self, index: int, turn: Turn, parent: Node | None, keys: Sequence[Key], messages: Sequence[Message]
    ) -> Node:
        """Add a stored turn to the tree."""
        node = Node(
            index=index,
            parent=parent,
            keys=tuple(keys),
            given=tuple(m if m["role"] == "assistant" else None for m in messages),
            reply=turn.reply,
            tools=turn.tools,
            role=turn.role,
            ids=ids_array(turn.context_ids + turn.sampled_ids),
            sampled=len(turn.sampled_ids),
            system="" if parent else system_of(messages),
            opening="" if parent else opening_of(messages),
            evidence=evidence_of(messages),
        )
        self.tree.add(node)
        return node


class Sessions:
    """All sessions of a gateway. Of the idle ones, at most ``resident`` stay in memory; others are loaded on demand."""

    def __init__(self, pool: Pool, writer: PoolWriter, *, resident: int = 2048) -> None:
        self._pool = pool
        self._writer = writer
        self._resident = resident
        self._loaded: OrderedDict[str, Session] = OrderedDict()
        self._loading: dict[str, asyncio.Future[Session | None]] = {}

    def __len__(self) -> int:
        return len(self._loaded)

    async def open(self, request: SessionRequest, *, reserved: SessionCredentials | None = None) -> SessionCredentials:
        """Open a session and its episode in the pool; with ``reserved``, under these credentials.

        Raises :class:`~clawgym.errors.PoolError` as :meth:`~clawgym.pool.Pool.open_episode` does.
        """
        opened = reserved or reserve_session()
        digest = _digest(opened.secret)
        sampling = request.sampling or Sampling()
        about = {
            "sampling": asdict(sampling),
            "adapter": request.adapter,
            "most_turns": request.most_turns,
        }
        await self._writer.run(
            self._pool.open_episode,
            id=opened.id,
            secret_sha256=digest,
            channel=request.channel,
            group=request.group,
            task_id=request.task_id,
            task_hash=request.task_hash,
            sample=request.sample,
            seed=request.seed,
            agent=request.agent,
            meta={**request.meta, "gateway": about},
        )
        self._keep(Session(opened.id, digest, sampling, request.adapter, request.most_turns))
        return opened

    async def find(self, session_id: str, secret: str) -> Session:
        """Return the session if ``secret`` is right.

        Raises :class:`~clawgym.gateway.calls.Refusal`: 401 for a wrong id or secret, 403 if the session is closed.
        """
        session = await self.get(session_id)
        if session is None or not session.accepts(secret):
            raise Refusal(
                401,
                "no such session, or the wrong key: use the base_url and the key that the session was opened with",
                code="invalid_api_key",
            )
        if session.closed:
            raise Refusal(403, "this session is closed: open another one", code="session_closed")
        return session

    async def get(self, session_id: str) -> Session | None:
        """Return the session from memory or the pool, or None if there is none."""
        session = self._loaded.get(session_id)
        if session is not None:
            self._loaded.move_to_end(session_id)
            return session
        if (loading := self._loading.get(session_id)) is not None:
            return await asyncio.shield(loading)
        loading = self._loading[session_id] = asyncio.ensure_future(self._read(session_id))
        loading.add_done_callback(lambda _: self._loading.pop(session_id, None))
        return await asyncio.shield(loading)

    async def close(self, session_id: str, end: EpisodeEnd | None = None) -> None:
        """Refuse further requests of a session; with ``end``, also close its episode in the pool.

        Raises :class:`~clawgym.errors.PoolError` for an unknown session, or if it was closed with a different end.
        """
        session = await self.get(session_id)
        if session is not None:
            session.closed = True
        async with session.lock if session else contextlib.nullcontext():  # a turn being stored goes first
            if end is None:
                await self._writer.run(self._pool.revoke, session_id)
            else:
                await self._writer.run(self._pool.close_episode, session_id, end)
                self.evict(session_id)

    def evict(self, session_id: str) -> None:
        """Drop the session from memory; its next request loads it from the pool."""
        self._loaded.pop(session_id, None)

    async def _read(self, session_id: str) -> Session | None:
        try:
            episode = await self._writer.run(self._pool.episode, session_id)
            turns = await self._writer.run(self._pool.turns, session_id)
        except PoolError:
            return None
        about = episode.meta.get("gateway")
        if about is None or not episode.secret_sha256:
            return None
        known = {f.name for f in fields(Sampling)}
        settings: dict[str, Any] = {k: v for k, v in about["sampling"].items() if k in known}
        sampling = Sampling(**{**settings, "stop": tuple(settings.get("stop", ()))})
        session = Session(session_id, episode.secret_sha256, sampling, about["adapter"], about.get("most_turns"))
        session.closed = episode.state != "open"
        nodes: dict[int, Node] = {}
        for index, turn in enumerate(turns):
            parent = None if turn.parent is None else nodes.get(turn.parent)
            if turn.parent is not None and parent is None:
                continue
            before: list[Message] = [dict(parent.reply)] if parent else []
            messages = [dict(m) for m in turn.messages]
            keys = message_keys([*before, *messages])[len(before) :]
            session.turns = index + 1
            if turn.finish_reason not in UNFINISHED and turn.reply:
                nodes[index] = session.grow(index, turn, parent, keys, messages)
        self._keep(session)
        return session

    def _keep(self, session: Session) -> None:
        self._loaded[session.id] = session
        self._loaded.move_to_end(session.id)
        if len(self._loaded) <= self._resident:
            return
        for quiet in [s.id for s in self._loaded.values() if not (s.active or s.handlers) and s is not session]:
            del self._loaded[quiet]
            if len(self._loaded) <= self._resident:
                return


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "replace")).hexdigest()
