"""The door of a service: one ``base_url`` and one key for a person's own programs.

==========================  ==========================================================================
``POST /v1/...``            the dialects of the gateway (:mod:`clawgym.gateway.dialects`)
``POST /v1/feedback``       ``{"id": id of a reply, "score": 1 or -1}``
``POST /v1/private``        ``{"id": id of a reply}``: do not train on its conversation, and delete it at its end
``POST /v1/end``            ``{"id": id of a reply}``: the conversation is over
==========================  ==========================================================================

Invariants: nothing is answered without a key. A key is the name of a source: it reaches the conversations of this
source only. The running requests of a source have a limit, and so have their bodies together.
"""

from __future__ import annotations

import contextlib
import hmac
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from clawgym.errors import PoolError, ServiceError
from clawgym.gateway.calls import ChatCall, Refusal, request_field
from clawgym.gateway.server import Address, Gateway, Listeners, guarded, read_object, secret_of
from clawgym.gateway.sessions import HeldBodies, Session
from clawgym.online.config import secret_in
from clawgym.online.conversations import Conversations
from clawgym.online.elsewhere import TrainingDoor

__all__ = ["FEEDBACK", "OFF", "Door", "Keys"]

FEEDBACK = "feedback"
"""The name of the turn rewards that the user gave."""
OFF = "x-clawgym-training"
"""A header of requests: with the value ``off``, the conversation is private, as with ``POST /v1/private``."""

MOST_RUNNING = 64
"""Most requests of one source at a time."""
_LARGEST = 2**14
"""Most bytes of a request that is no call of the model."""


class Keys:
    """The keys of the sources of a service: one file for each in ``folder``, readable by its owner only."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: tuple[int, dict[str, str]] = (-1, {})

    def make(self, name: str) -> str:
        """Return the key of the source ``name``, which is made if there is none.

        Raises :class:`~clawgym.errors.ServiceError` for a name that is not a plain word."""
        if not name.replace("-", "").replace("_", "").isalnum() or len(name) > 64:
            raise ServiceError(f"{name!r} is no name for a key: use letters, digits, - and _")
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return secret_in(self._folder / name)

    def remove(self, name: str) -> None:
        """Remove the key of a source: from the next request on it is refused. Raises
        :class:`~clawgym.errors.ServiceError` if there is none."""
        if name not in self._known():
            raise ServiceError(f"there is no key {name!r}: the keys are {', '.join(self.names()) or 'none'}")
        (self._folder / name).unlink(missing_ok=True)

    def source(self, secret: str) -> str | None:
        """The source whose key this is; None if there is none."""
        found = None
        for name, key in self._known().items():
            if hmac.compare_digest(secret.encode("utf-8", "replace"), key.encode()):
                found = name
        return found

    def names(self) -> list[str]:
        """The sources that have a key."""
        return sorted(self._known())

    def _known(self) -> dict[str, str]:
        """Name -> key, read again when the folder has changed."""
        try:
            changed = self._folder.stat().st_mtime_ns
        except FileNotFoundError:
            return {}
        if changed != self._read[0]:
            keys = {file.name: file.read_text("utf-8").strip() for file in self._folder.iterdir() if file.is_file()}
            self._read = changed, {name: key for name, key in keys.items() if key}
        return self._read[1]


@dataclass
class _Source:
    """The owner of a key."""

    name: str
    running: int = 0
    bodies: HeldBodies = field(default_factory=lambda: HeldBodies("key"))

    @contextlib.contextmanager
    def holding(self) -> Iterator[Callable[[int], None]]:
        """See :class:`~clawgym.gateway.server.Caller`. Raises :class:`~clawgym.gateway.calls.Refusal` (429) if too many
        requests of this source run, so that one source cannot take all places."""
        if self.running >= MOST_RUNNING:
            raise Refusal(
                429,
                f"{self.running} requests with this key are running: try again when one has been answered",
                code="rate_limit_exceeded",
                retry_after=1.0,
            )
        self.running += 1
        try:
            with self.bodies.holding() as hold:
                yield hold
        finally:
            self.running -= 1


class Door:
    """Serves a model to the owners of keys. Use as ``async with``. It is the
    :class:`~clawgym.gateway.server.Admission` of its requests."""

    def __init__(
        self, gateway: Gateway, conversations: Conversations, keys: Keys, *, trainer: TrainingDoor | None = None
    ) -> None:
        self._gateway = gateway
        self._conversations = conversations
        self._keys = keys
        self._sources: dict[str, _Source] = {}
        app = web.Application()
        for name, handler in (("feedback", self._feedback), ("private", self._private), ("end", self._end)):
            app.router.add_post(f"/v1/{name}", guarded(handler, PoolError))
        if trainer is not None:
            trainer.add_routes(app.router)
        gateway.add_routes(app.router, "/v1", self)
        self._listeners = Listeners(app)

    async def __aenter__(self) -> Door:
        await self._listeners.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._listeners.aclose()

    async def listen(self, **where: Any) -> Address:
        """Listen for clients: see :meth:`~clawgym.gateway.server.Listeners.add`."""
        return await self._listeners.add(**where)

    async def caller(self, request: web.Request) -> _Source:
        """See :class:`~clawgym.gateway.server.Admission`."""
        name = self._keys.source(secret_of(request))
        if name is None:
            raise Refusal(
                401, "no key of this service: use the one that `clawgym serve` printed", code="invalid_api_key"
            )
        return self._sources.setdefault(name, _Source(name))

    async def session(self, request: web.Request, body: Mapping[str, Any], call: ChatCall, *, counts: bool) -> Session:
        """See :class:`~clawgym.gateway.server.Admission`."""
        self._check_window(call)
        source = (await self.caller(request)).name
        session = await self._conversations.session(source, request.headers, body, call, counts=counts)
        if not counts and request.headers.get(OFF, "").strip().lower() == "off":
            await self._gateway.in_pool(lambda pool: pool.curate(session.id, trainable=False))
        return session

    def _check_window(self, call: ChatCall) -> None:
        """Refuse a client that is set up for a larger window: it would not shorten its conversations in time. OpenClaw
        (2026.4.1) asks for 32,000 tokens if it is set to that or more."""
        window = getattr(self._gateway.engine, "context_window", None)
        wanted = call.sampling.max_tokens
        if window is not None and wanted is not None and 4 * wanted > 3 * window:
            raise Refusal(
                400,
                f"this client asks for replies of up to {wanted} tokens, but the model's whole window has {window}: "
                f"set the model's context window to {window} and its longest reply to at most {window // 4} in the "
                "client's configuration, or serve a model with a larger window",
                param="max_tokens",
            )

    async def _feedback(self, request: web.Request) -> dict[str, Any]:
        session, turn, body = await self._turn(request)
        score = request_field(body, "score", int)
        if score not in (-1, 1):
            raise Refusal(400, "'score' is not 1 or -1: give one of them", param="score")
        await self._gateway.in_pool(lambda pool: pool.set_turn_rewards(session, {turn: float(score)}, name=FEEDBACK))
        return {"session": session, "turn": turn, "score": score}

    async def _private(self, request: web.Request) -> dict[str, Any]:
        session, _, _ = await self._turn(request)
        await self._gateway.in_pool(lambda pool: pool.curate(session, trainable=False))
        return {"session": session, "private": True}

    async def _end(self, request: web.Request) -> dict[str, Any]:
        session, _, _ = await self._turn(request)
        return {"session": session, "ended": await self._conversations.end(session)}

    async def _turn(self, request: web.Request) -> tuple[str, int, dict[str, Any]]:
        """The conversation, the index of the turn, and the body of a request that names a reply."""
        caller = await self.caller(request)
        with caller.holding() as hold:
            body = await read_object(request, hold, _LARGEST)
        reply = request_field(body, "id", str)
        if not reply:
            raise Refusal(400, "'id' is missing: give the id of a reply", param="id")
        found = await self._conversations.of_reply(caller.name, reply)
        if found is None:
            raise Refusal(404, "no reply with this id waits for feedback: it is unknown, or was judged already")
        return *found, body
