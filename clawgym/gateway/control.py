"""The control API, with which the owner of a gateway manages it from another process.

It has its own listeners and its own secret. The secret of a session does not work here, and the owner's secret does not
work for sessions. Bodies and responses are JSON objects:

==============================  ======================================================================
``POST /sessions``              open: ``channel``, ``task_id``, ``group``, ``sampling``, ... -> ``id``,
                                ``secret``, ``base_url``
``GET /sessions/{id}``          counts of its turns
``POST /sessions/{id}/turns``   white box: add turns that were sampled elsewhere
``POST /sessions/{id}/close``   refuse further requests; with ``outcome`` and ``reward`` also close the episode
``POST /groups``                open a group of attempts at one task -> ``id``
``POST /weights/hold``          hold new turns; answered when the last running turn has ended
``POST /weights/release``       continue, with ``policy_version``
``GET /stats``                  counts
==============================  ======================================================================
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from aiohttp import web

from clawgym.bounds import LARGEST_CONTROL_BODY
from clawgym.engines.protocol import Sampling
from clawgym.errors import GatewayError, PoolError
from clawgym.gateway.calls import Refusal, request_field
from clawgym.gateway.request import SessionRequest
from clawgym.gateway.server import Address, Gateway, Listeners, guarded, read_object
from clawgym.pool import EpisodeEnd, Pool
from clawgym.records import Turn, continued, prompt_ids

__all__ = ["Control", "turns_of_prompts"]

_OPENING: Mapping[str, type] = {
    "channel": str, "task_id": str, "task_hash": str, "group": str, "sample": int, "seed": int, "agent": str,
    "adapter": str, "meta": dict,
}  # fmt: skip
_CLOSING: Mapping[str, type | tuple[type, ...]] = {
    "outcome": str, "reward": (int, float), "rewards": dict, "penalties": dict, "cause": str, "meta": dict,
}  # fmt: skip


def turns_of_prompts(rows: list[Mapping[str, Any]], known: list[Turn]) -> list[Turn]:
    """Make turns from whole prompts.

    Each continues the longest turn without a flaw whose prompt and sampled ids are a prefix of its prompt.

    Args:
        rows: dicts with ``prompt_ids``, ``sampled_ids``, ``logprobs`` and other fields of
            :class:`~clawgym.records.Turn`.
        known: the turns of the episode so far.

    Raises:
        Refusal: a row is invalid; the message names the field.
    """
    histories = {n: (*prompt_ids(known, n), *turn.sampled_ids) for n, turn in enumerate(known) if turn.flaw is None}
    names = {f.name for f in fields(Turn)} - {"context_ids", "parent"}
    out: list[Turn] = []
    for n, row in enumerate(rows):
        where = f"turns[{n}]"
        if not isinstance(row, dict):
            raise Refusal(400, f"'{where}' is not an object: give prompt_ids, sampled_ids, logprobs", param=where)
        if extra := row.keys() - names - {"prompt_ids"}:
            raise Refusal(400, f"'{where}.{min(extra)}' is not a field of a turn: leave it out", param=where)
        prompt = _numbers(row, "prompt_ids", where, int)
        sampled = _numbers(row, "sampled_ids", where, int)
        parent = continued(prompt, histories)
        rest: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in row.items() if k in names}
        rest |= {"sampled_ids": sampled, "logprobs": _numbers(row, "logprobs", where, float)}
        try:
            turn = Turn(
                context_ids=prompt[len(histories[parent]) :] if parent is not None else prompt, parent=parent, **rest
            )
        except ValueError as error:
            raise Refusal(400, f"'{where}': {error}", param=where) from None
        if turn.flaw is None:
            histories[len(known) + n] = (*prompt, *sampled)
        out.append(turn)
    return out


def _numbers(row: Mapping[str, Any], name: str, where: str, kind: type) -> tuple[Any, ...]:
    values = row.get(name, [])
    kinds = (int, float) if kind is float else (int,)
    if not isinstance(values, list) or not all(isinstance(v, kinds) and not isinstance(v, bool) for v in values):
        raise Refusal(400, f"'{where}.{name}' is not an array of numbers: correct it", param=f"{where}.{name}")
    return tuple(map(kind, values))


class Control:
    """Serves the control API of a gateway. Use as ``async with``.

    ``token`` is the secret of the API; by default a random one.
    """

    def __init__(self, gateway: Gateway, *, token: str | None = None) -> None:
        self.token = token or secrets.token_urlsafe(32)
        self._gateway = gateway
        self._holding: contextlib.AbstractAsyncContextManager[None] | None = None
        app = web.Application()
        which = "the control token: use the one the gateway was started with"
        for method, path, handler in (
            ("POST", "/sessions", self._open), ("GET", "/sessions/{session}", self._show),
            ("POST", "/sessions/{session}/turns", self._add_turns), ("POST", "/sessions/{session}/close", self._close),
            ("POST", "/groups", self._group), ("POST", "/weights/hold", self._hold),
            ("POST", "/weights/release", self._release), ("GET", "/stats", self._stats),
            ("*", "/{path:.*}", self._not_found),
        ):  # fmt: skip
            answer = guarded(handler, PoolError, GatewayError, secret=self.token, which=which)
            app.router.add_route(method, path, answer)
        self._listeners = Listeners(app)

    async def __aenter__(self) -> Control:
        await self._listeners.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._listeners.aclose()
        await self._release_hold()

    async def listen(self, **where: Any) -> Address:
        """Listen on an address: see :meth:`~clawgym.gateway.server.Listeners.add`."""
        return await self._listeners.add(**where)

    async def _open(self, request: web.Request) -> dict[str, Any]:
        body = await read_object(request, most=LARGEST_CONTROL_BODY)
        about = _fields(body, _OPENING, {"sampling"})
        sampling = request_field(body, "sampling", dict, {})
        names = {f.name for f in fields(Sampling)}
        if extra := sampling.keys() - names:
            raise Refusal(400, f"'sampling.{min(extra)}' is unknown: use {', '.join(sorted(names))}", param="sampling")
        settings: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in sampling.items()}
        opened = await self._gateway.open_session(SessionRequest(sampling=Sampling(**settings), **about))
        return {"id": opened.id, "secret": opened.secret, "base_url": self._gateway.base_url(opened)}

    async def _show(self, request: web.Request) -> dict[str, Any]:
        session = await self._gateway.sessions.get(request.match_info["session"])
        if session is None:
            raise Refusal(404, "there is no such session: use the id that opening it gave")
        turns = await self._gateway.in_pool(lambda pool: pool.turns(session.id))
        roles: dict[str, int] = {}
        for turn in turns:
            roles[turn.role] = roles.get(turn.role, 0) + 1
        return {
            "id": session.id,
            "closed": session.closed,
            "turns": len(turns),
            "roles": roles,
            "flawed": sum(turn.flaw is not None for turn in turns),
            "sampled_tokens": sum(len(turn.sampled_ids) for turn in turns),
        }

    async def _add_turns(self, request: web.Request) -> dict[str, Any]:
        body = await read_object(request, most=LARGEST_CONTROL_BODY)
        rows = request_field(body, "turns", list, [])
        session = await self._gateway.sessions.get(request.match_info["session"])
        if session is None:
            raise Refusal(404, "there is no such session: use the id that opening it gave")
        if session.active:
            raise Refusal(409, "a turn of this session is running: add turns when it has ended")
        async with session.lock:
            known = await self._gateway.in_pool(lambda pool: pool.turns(session.id))
            turns = turns_of_prompts(rows, list(known))
            added = [(session.id, len(known) + n, turn) for n, turn in enumerate(turns)]
            await self._gateway.in_pool(lambda pool: pool.append(added))
            self._gateway.sessions.evict(session.id)  # the next request loads it with the added turns
        return {"turns": len(known) + len(turns)}

    async def _close(self, request: web.Request) -> dict[str, Any]:
        body = await read_object(request, most=LARGEST_CONTROL_BODY)
        about = _fields(body, _CLOSING, set())
        if "outcome" not in about and about:
            raise Refusal(400, f"'{min(about)}' requires 'outcome': give both, or neither", param="outcome")
        await self._gateway.close_session(request.match_info["session"], EpisodeEnd(**about) if about else None)
        return {"closed": True}

    async def _group(self, request: web.Request) -> dict[str, Any]:
        body = await read_object(request, most=LARGEST_CONTROL_BODY)
        kinds = {"id": str, "channel": str, "task_id": str, "size": int, "deadline": (int, float)}
        about = {"deadline": None, **_fields(body, kinds, set())}
        if "size" not in about:
            raise Refusal(400, "'size' is missing: give the number of attempts in the group", param="size")
        return {"id": await self._gateway.in_pool(lambda pool: pool.open_group(**about))}

    async def _hold(self, request: web.Request) -> dict[str, Any]:
        if self._holding is None:
            holding = self._gateway.weights_change()
            await holding.__aenter__()
            self._holding = holding
        return {"held": True}

    async def _release(self, request: web.Request) -> dict[str, Any]:
        body = await read_object(request, most=LARGEST_CONTROL_BODY)
        version = request_field(body, "policy_version", int)
        if version is not None:
            if not hasattr(self._gateway.engine, "policy_version"):
                raise Refusal(400, f"engine {self._gateway.engine.name} sets its policy_version itself: leave it out")
            self._gateway.engine.policy_version = version  # type: ignore[union-attr]
        await self._release_hold()
        return {"held": False}

    async def _release_hold(self) -> None:
        holding, self._holding = self._holding, None
        if holding is not None:
            await holding.__aexit__(None, None, None)

    async def _stats(self, request: web.Request) -> dict[str, Any]:
        return {"gateway": self._gateway.stats(), "pool": await self._gateway.in_pool(Pool.stats)}

    async def _not_found(self, request: web.Request) -> dict[str, Any]:
        raise Refusal(404, f"there is nothing at {request.method} {request.path!r}: see docs/reference/gateway-api.md")


def _fields(body: Mapping[str, Any], kinds: Mapping[str, type | tuple[type, ...]], others: set[str]) -> dict[str, Any]:
    """Return the fields of ``body`` that are in ``kinds``, checked.

    Raises :class:`~clawgym.gateway.calls.Refusal` for fields that are neither in ``kinds`` nor in ``others``.
    """
    if extra := body.keys() - kinds.keys() - others:
        raise Refusal(
            400, f"'{min(extra)}' is unknown: use {', '.join(sorted(kinds.keys() | others))}", param=min(extra)
        )
    values = {name: request_field(body, name, kind) for name, kind in kinds.items()}
    return {name: value for name, value in values.items() if value is not None}
