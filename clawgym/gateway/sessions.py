"""Sessions: who may speak, what was said, and where the next turn goes on.

Invariants: a session is an episode of the pool and can be made again from what is stored there, so that a gateway may
be killed and a quiet session may leave memory; a secret is kept as its digest only; an unknown session and a wrong
secret look the same from outside.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from clawgym.bounds import HELD_BODIES
from clawgym.engines.protocol import Sampling
from clawgym.errors import PoolError
from clawgym.gateway.calls import Message, Refusal
from clawgym.gateway.request import Opened, SessionRequest, reserve
from clawgym.gateway.roles import opening_of, system_of, told_by
from clawgym.gateway.stitch import UNFINISHED, Key, Node, Tree, message_keys
from clawgym.pool import EpisodeEnd, Pool, PoolWriter
from clawgym.records import Role, Turn, Usage

__all__ = ["Session", "Sessions"]


@dataclass(eq=False)
class Session:
    """One conversation partner, possibly with several conversations (sub-agents, summaries)."""

    id: str
    secret_sha256: str
    sampling: Sampling = field(default_factory=Sampling)
    """Wins over what requests ask: who opens a session decides how it is sampled."""
    adapter: str | None = None
    most_turns: int | None = None
    """Further calls are refused."""
    tree: Tree = field(default_factory=Tree)
    closed: bool = False
    active: int = 0
    """Requests under way."""
    turns: int = 0
    """Stored so far: the next one's index."""
    usage: Usage = field(default_factory=Usage)
    """Of the turns since it was opened, or read again."""
    failure: Exception | None = None
    """Why the last call of the agent failed; ``None`` once a later one did not. Agents hide such failures."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a turn gets its index and is stored."""
    _held: int = 0
    """Bytes of the bodies of requests under way."""

    handlers: set[asyncio.Task[Any]] = field(default_factory=set)
    """What serves the requests under way."""

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """The current task serves a request of this session."""
        task = asyncio.current_task()
        assert task is not None
        self.handlers.add(task)
        try:
            yield
        finally:
            self.handlers.discard(task)

    @contextlib.contextmanager
    def holding(self) -> Iterator[Callable[[int], None]]:
        """What is called with the size of each piece of a request's body, which counts until the end of it. Raises
        :class:`~clawgym.gateway.calls.Refusal` (429) where this session's requests are too large together."""
        held = 0

        def hold(size: int) -> None:
            nonlocal held
            held += size
            self._held += size
            if self._held > HELD_BODIES:
                raise Refusal(
                    429,
                    f"this session's requests under way have over {HELD_BODIES >> 20} MiB together (HELD_BODIES): come "
                    "back when one has been answered",
                    code="rate_limit_exceeded",
                    retry_after=1.0,
                )

        try:
            yield hold
        finally:
            self._held -= held

    def admits(self, secret: str) -> bool:
        """Whether ``secret`` is this session's."""
        return hmac.compare_digest(_digest(secret), self.secret_sha256)

    def spent(self, usage: Usage, role: Role) -> None:
        """A turn has ended well."""
        self.usage += usage
        if role != "subagent":  # whose success says nothing of the one who waits for it
            self.failure = None

    def grow(
        self, index: int, turn: Turn, parent: Node | None, keys: Sequence[Key], messages: Sequence[Message]
    ) -> Node:
        """Put a stored turn into the tree."""
        ids = array("i", turn.context_ids)
        ids.extend(turn.sampled_ids)
        node = Node(
            index=index,
            parent=parent,
            keys=tuple(keys),
            given=tuple(m if m["role"] == "assistant" else None for m in messages),
            reply=turn.reply,
            tools=turn.tools,
            role=turn.role,
            ids=ids,
            sampled=len(turn.sampled_ids),
            system="" if parent else system_of(messages),
            opening="" if parent else opening_of(messages),
            told=told_by(messages),
        )
        self.tree.add(node)
        return node


class Sessions:
    """All sessions of a gateway. At most ``resident`` quiet ones stay in memory; the others are read again."""

    def __init__(self, pool: Pool, writer: PoolWriter, *, resident: int = 2048) -> None:
        self._pool = pool
        self._writer = writer
        self._resident = resident
        self._here: OrderedDict[str, Session] = OrderedDict()
        self._coming: dict[str, asyncio.Future[Session | None]] = {}

    def __len__(self) -> int:
        return len(self._here)

    async def open(self, request: SessionRequest, *, reserved: Opened | None = None) -> Opened:
        """Open a session and its episode in the pool; with ``reserved``, under that id and key.

        Raises :class:`~clawgym.errors.PoolError` as :meth:`~clawgym.pool.Pool.open_episode` does.
        """
        opened = reserved or reserve()
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
        """The session, if ``secret`` is its own. Raises :class:`~clawgym.gateway.calls.Refusal` (401; 403 when it
        is closed)."""
        session = await self.get(session_id)
        if session is None or not session.admits(secret):
            raise Refusal(
                401,
                "there is no such session, or this is not its key: use the base_url and key it was opened with",
                code="invalid_api_key",
            )
        if session.closed:
            raise Refusal(403, "this session is closed: open another one", code="session_closed")
        return session

    async def get(self, session_id: str) -> Session | None:
        """The session, from memory or the pool."""
        session = self._here.get(session_id)
        if session is not None:
            self._here.move_to_end(session_id)
            return session
        if (coming := self._coming.get(session_id)) is not None:
            return await asyncio.shield(coming)
        coming = self._coming[session_id] = asyncio.ensure_future(self._read(session_id))
        coming.add_done_callback(lambda _: self._coming.pop(session_id, None))
        return await asyncio.shield(coming)

    async def close(self, session_id: str, end: EpisodeEnd | None = None) -> None:
        """Refuse further requests of a session; with ``end``, close its episode in the pool as well.

        Raises :class:`~clawgym.errors.PoolError` for an unknown session, and for another end than it has."""
        session = await self.get(session_id)
        if session is not None:
            session.closed = True
        async with session.lock if session else contextlib.nullcontext():  # a turn being stored goes first
            if end is None:
                await self._writer.run(self._pool.revoke, session_id)
            else:
                await self._writer.run(self._pool.close_episode, session_id, end)
                self.forget(session_id)

    def forget(self, session_id: str) -> None:
        """Read the session again with its next request."""
        self._here.pop(session_id, None)

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
        self._here[session.id] = session
        self._here.move_to_end(session.id)
        if len(self._here) <= self._resident:
            return
        for quiet in [s.id for s in self._here.values() if not s.active and s is not session]:
            del self._here[quiet]
            if len(self._here) <= self._resident:
                return


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "replace")).hexdigest()
