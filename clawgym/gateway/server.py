"""The gateway's HTTP server: listeners, routes, and the methods for its owner.

Invariants: an agent reaches only its own session, with the session's secret. Opening and closing sessions is on other
listeners with another secret (:mod:`clawgym.gateway.control`). Listeners are on loopback or a unix socket, unless there
is a certificate.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import os
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import orjson
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from clawgym.bounds import BODY_SECONDS, LARGEST_BODY, OutOfBounds, read_json
from clawgym.engines.protocol import TextEngine, TokenEngine
from clawgym.errors import ClawGymError, GatewayError
from clawgym.gateway._origin import check_request, is_loopback
from clawgym.gateway._site import LimitedSite
from clawgym.gateway.calls import ChatCall, Refusal, check_length
from clawgym.gateway.core import Core
from clawgym.gateway.dialects import Dialect
from clawgym.gateway.dialects._sse import send_events
from clawgym.gateway.dialects.chat import ChatDialect
from clawgym.gateway.dialects.errors import ApiFailure, failure_of
from clawgym.gateway.gate import Gate
from clawgym.gateway.render import Renderer
from clawgym.gateway.request import SessionCredentials, SessionRequest
from clawgym.gateway.sessions import Session, Sessions
from clawgym.gateway.tool_server import OfferedTools, answer_message
from clawgym.pool import EpisodeEnd, Pool, PoolWriter
from clawgym.records import Turn
from clawgym.registry import dialects as known_dialects

__all__ = ["Address", "Admission", "Caller", "Gateway", "Listeners", "check_encrypted"]

_T = TypeVar("_T")
_log = logging.getLogger("clawgym.gateway")


class _DropMalformedHttp(logging.Filter):
    """Drops log records about malformed HTTP, which a sandbox could use to fill the log."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


_http_log = logging.getLogger("clawgym.gateway.http")
_http_log.addFilter(_DropMalformedHttp())

MOST_CONNECTIONS = 8192
_PLAIN = ChatDialect()
"""The dialect of errors on routes without a dialect."""


@dataclass(frozen=True, slots=True)
class Address:
    """The address of a listener."""

    url: str
    """``http(s)://host:port``, or ``unix:/path``."""
    site: web.BaseSite = field(repr=False, compare=False)


class Listeners:
    """One aiohttp application on any number of sockets."""

    def __init__(self, app: web.Application) -> None:
        app.middlewares.append(check_request)
        self._runner = web.AppRunner(
            app,
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=5.0,
            logger=_http_log,
            auto_decompress=False,
        )

    async def start(self) -> None:
        """Prepare the application; nothing listens yet."""
        await self._runner.setup()

    async def add(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        path: str | Path | None = None,
        sock: socket.socket | None = None,
        tls: ssl.SSLContext | None = None,
        connections: int = MOST_CONNECTIONS,
    ) -> Address:
        """Listen on a loopback port (0: any free one), a unix socket ``path``, or a listening ``sock``.

        ``connections`` is the limit of concurrent connections; set it low for a sandbox, which could otherwise use up
        the descriptors of this process.

        Raises:
            GatewayError: the address is not on loopback and there is no ``tls``, or it cannot be used.
        """
        try:
            if path is not None:
                unix = web.UnixSite(self._runner, path)
                await unix.start()
                os.chmod(path, 0o600)
                return Address(f"unix:{path}", unix)
            if sock is None:
                check_encrypted(host, tls)
                sock = socket.create_server((host, port), family=_family(host), backlog=1024)
            site = LimitedSite(self._runner, sock, most=connections, tls=tls)
            await site.start()
        except OSError as error:
            where = path or f"{host}:{port}"
            raise GatewayError(f"cannot listen on {where} ({error.strerror or error}): choose another one") from error
        name = sock.getsockname()
        if sock.family == socket.AF_UNIX:
            return Address(f"unix:{name}", site)
        shown = f"[{name[0]}]" if ":" in name[0] else name[0]
        return Address(f"{'https' if tls else 'http'}://{shown}:{name[1]}", site)

    async def remove(self, address: Address) -> None:
        """Stop listening on ``address`` and close the socket. Running requests continue. Idempotent."""
        with contextlib.suppress(RuntimeError):  # removed before
            await address.site.stop()

    async def aclose(self) -> None:
        """Stop listening and end running requests."""
        await self._runner.cleanup()


def check_encrypted(host: str, tls: ssl.SSLContext | None) -> None:
    """Raise :class:`~clawgym.errors.GatewayError` if ``host`` is not on loopback and there is no ``tls``."""
    if tls is None and not is_loopback(host):
        raise GatewayError(
            f"{host} is reachable from other machines, and secrets would be sent unencrypted: "
            "give a certificate (--tls-cert, --tls-key), or listen on 127.0.0.1"
        )


class Caller(Protocol):
    """Who sends a request, as known before its body is read."""

    def holding(self) -> contextlib.AbstractContextManager[Callable[[int], None]]:
        """See :meth:`clawgym.gateway.sessions.Session.holding`."""
        ...


class Admission(Protocol):
    """Finds the sessions of requests. A gateway has its own; :mod:`clawgym.online` adds one."""

    async def caller(self, request: web.Request) -> Caller:
        """Return who sends the request. Raises :class:`~clawgym.gateway.calls.Refusal` for a wrong secret."""
        ...

    async def session(self, request: web.Request, body: Mapping[str, Any], call: ChatCall, *, counts: bool) -> Session:
        """Return the session of a call; ``counts``: only its tokens are counted, and nothing is stored. Raises
        :class:`~clawgym.gateway.calls.Refusal`."""
        ...


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


class Gateway:
    """A server for clients of OpenAI, Anthropic and Google between agents and one engine; records all turns in a pool.

    Use as ``async with``. The pool and the engine are not closed.

    Args:
        engine: an engine that takes token ids, for which the gateway renders prompts with the model's chat template; or
            one that takes text. With a text engine no tokens are recorded, and every turn has the flaw ``text-only``.
        pool: stores sessions and turns.
        renderer: renders prompts; by default one for the engine's tokenizer.
        model: the name of the model for agents.
        dialects: names of ``clawgym list dialects``; by default all.
        streams: most turns that run at the same time.
        waiting: most turns that wait; further ones are refused with status 429.
        stored: makes what is stored of a turn, on a thread of its own; the agent gets the turn as it is.
    """

    def __init__(
        self,
        engine: TokenEngine | TextEngine,
        pool: Pool,
        *,
        renderer: Renderer | None = None,
        model: str = "policy",
        dialects: Sequence[str] | None = None,
        streams: int = 256,
        waiting: int = 4096,
        stored: Callable[[Turn], Turn] | None = None,
    ) -> None:
        if renderer is None and isinstance(engine, TokenEngine):
            renderer = Renderer(engine.tokenizer)
        self.engine = engine
        self.pool = pool
        self.model = model
        self._writer = PoolWriter(pool)
        self.gate = Gate(streams=streams, waiting=waiting)
        self.core = Core(engine, self._writer, self.gate, renderer=renderer, stored=stored)
        self.sessions = Sessions(pool, self._writer)
        self.dialects = _dialects(dialects)
        """Name -> dialect."""
        self.offered: dict[str, OfferedTools] = {}
        """Session id -> the tools that are served to its program."""
        self._listeners = Listeners(self._app())
        self._address: Address | None = None

    async def __aenter__(self) -> Gateway:
        await self._listeners.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Stop listening and end running turns, which are recorded."""
        await self._listeners.aclose()
        await self._writer.aclose()

    async def listen(self, **where: Any) -> Address:
        """Listen for agents: see :meth:`Listeners.add`. :meth:`base_url` uses the first address."""
        address = await self._listeners.add(**where)
        self._address = self._address or address
        return address

    async def unlisten(self, address: Address) -> None:
        """Stop listening on ``address``. Call it before closing the sandbox of its ``sock``."""
        await self._listeners.remove(address)
        if self._address is address:
            self._address = None

    async def open_session(
        self, request: SessionRequest | None = None, *, reserved: SessionCredentials | None = None
    ) -> SessionCredentials:
        """Open a session for one agent: see :meth:`~clawgym.gateway.sessions.Sessions.open`."""
        return await self.sessions.open(request or SessionRequest(), reserved=reserved)

    async def close_session(self, session_id: str, end: EpisodeEnd | None = None) -> None:
        """Close a session: see :meth:`~clawgym.gateway.sessions.Sessions.close`."""
        await self.sessions.close(session_id, end)

    async def stop_session(self, session_id: str) -> None:
        """Refuse further calls of a session and end the running ones, which are recorded."""
        session = await self.sessions.get(session_id)
        await self.sessions.close(session_id)
        self.offered.pop(session_id, None)
        if session is not None and session.handlers:
            for task in session.handlers:
                task.cancel()
            await asyncio.wait(session.handlers)

    async def in_pool(self, work: Callable[[Pool], _T]) -> _T:
        """Return ``work(pool)``, run on the thread that writes to the pool, after all earlier writes."""
        return await self._writer.run(work, self.pool)

    def base_url(self, session: SessionCredentials | str, address: Address | None = None) -> str:
        """Return the ``base_url`` of a session for clients of OpenAI, Anthropic and Google. Raises GatewayError before
        :meth:`listen`."""
        address = address or self._address
        if address is None:
            raise GatewayError("the gateway does not listen yet: call listen() first")
        return f"{address.url}/s/{session if isinstance(session, str) else session.id}/v1"

    @contextlib.asynccontextmanager
    async def weights_change(self) -> AsyncIterator[None]:
        """Change the weights inside: running turns have ended on the old weights, new ones wait for the new weights."""
        async with self.gate.closed():
            yield

    def stats(self) -> dict[str, Any]:
        """Return counts since the start, and the numbers of running and waiting turns."""
        return {
            **asdict(self.core.counts),
            "running": self.gate.running,
            "waiting": self.gate.queued,
            "sessions_in_memory": len(self.sessions),
        }

    def _app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/s/{session}/mcp", guarded(self._tools))
        app.router.add_route("*", "/s/{session}/mcp", guarded(self._no_stream))
        self.add_routes(app.router, "/s/{session}/v1", _BySession(self.sessions))
        return app

    def add_routes(self, router: web.UrlDispatcher, root: str, admission: Admission) -> None:
        """Serve all dialects below the path ``root``, which ends with ``/v1``. Add other routes before: the last one
        answers everything else with 404."""
        router.add_get("/healthz", self._health)
        # Anthropic's client adds /v1 to its base_url, Google's /v1beta, OpenAI's nothing: one base_url serves all.
        for each in (root, f"{root}/v1", f"{root}/v1beta"):
            router.add_get(f"{each}/models", _Models(self, admission).handle)
            for dialect in self.dialects.values():
                router.add_post(f"{each}/{dialect.path}", _Endpoint(self, admission, dialect).handle)
                if dialect.stream_path:
                    streamed = _Endpoint(self, admission, dialect, streams=True)
                    router.add_post(f"{each}/{dialect.stream_path}", streamed.handle)
                if dialect.count_path:
                    router.add_post(f"{each}/{dialect.count_path}", _Count(self, admission, dialect).handle)
        router.add_route("*", "/{path:.*}", self._not_found)

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _tools(self, request: web.Request) -> web.Response:
        session = await self.sessions.find(request.match_info["session"], secret_of(request))
        with session.holding() as hold, session.handled():
            body = await read_object(request, hold)
            if (tools := self.offered.get(session.id)) is None:
                raise Refusal(404, "this session has no tools: use the shell of the sandbox")
            return await answer_message(body, tools, session)

    async def _no_stream(self, request: web.Request) -> web.Response:
        await self.sessions.find(request.match_info["session"], secret_of(request))
        raise Refusal(405, "tools are called by POST, and nothing is streamed: send a POST")

    async def _not_found(self, request: web.Request) -> web.Response:
        paths = ", ".join(f"/v1/{dialect.path}" for dialect in self.dialects.values())
        failure = ApiFailure(404, f"no route {request.path!r}: a session has {paths}, /v1/models")
        return answer_error(_PLAIN, failure)


def _dialects(names: Sequence[str] | None) -> dict[str, Dialect]:
    """Make the dialects of ``names``, by default all.

    Raises :class:`~clawgym.errors.GatewayError` for an unknown name, or if two have the same path.
    """
    chosen = known_dialects.things() if names is None else ((name, known_dialects.get(name)) for name in names)
    made: dict[str, Dialect] = {name: dialect() for name, dialect in chosen}
    by_path: dict[str, str] = {}
    for name, dialect in made.items():
        for path in filter(None, (dialect.path, dialect.stream_path, dialect.count_path)):
            if (other := by_path.setdefault(path, name)) != name:
                raise GatewayError(
                    f"the dialects {other!r} and {name!r} both serve /v1/{path}: choose one of them (--dialect), or "
                    "change the path of one"
                )
    return made


def secret_of(request: web.Request) -> str:
    """Return the secret of a request, from the header of OpenAI's, Anthropic's or Google's clients."""
    kind, _, value = request.headers.get("Authorization", "").partition(" ")
    if kind.lower() == "bearer":
        return value.strip()
    return request.headers.get("x-api-key") or request.headers.get("x-goog-api-key", "")


def answer_error(dialect: Dialect, failure: ApiFailure) -> web.Response:
    """Return an error as an HTTP response."""
    return web.Response(
        body=orjson.dumps(dialect.error(failure)),
        status=failure.status,
        headers=failure.headers,
        content_type="application/json",
    )


def guarded(
    handler: Callable[[web.Request], Awaitable[web.StreamResponse | dict[str, Any]]],
    *conflicts: type[ClawGymError],
    secret: str | None = None,
    which: str = "",
) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """Return ``handler`` with its errors answered as HTTP responses, and an object that it returns sent as JSON.

    Errors of the classes ``conflicts`` have the status 409. If there is a ``secret``, a request with another one gets
    the status 401; ``which`` says which secret to use.
    """

    async def answer(request: web.Request) -> web.StreamResponse:
        try:
            if secret is not None and not hmac.compare_digest(
                secret_of(request).encode("utf-8", "replace"), secret.encode()
            ):
                raise Refusal(401, f"this is not {which}")
            found = await handler(request)
            return found if isinstance(found, web.StreamResponse) else _json(found)
        except ConnectionError:
            raise
        except Exception as error:
            failure = _failure(error)
            if isinstance(error, conflicts) and not isinstance(error, Refusal):
                failure = ApiFailure(409, str(error))
            return answer_error(_PLAIN, failure)

    return answer


def _failure(error: Exception) -> ApiFailure:
    if not isinstance(error, ClawGymError):
        _log.exception("a request failed", exc_info=error)
    return failure_of(error)


def _json(found: Any) -> web.Response:
    return web.Response(body=orjson.dumps(found), content_type="application/json")


async def read_object(
    request: web.Request, hold: Callable[[int], None] = lambda size: None, most: int = LARGEST_BODY
) -> dict[str, Any]:
    """Read the JSON object in the body of a request of at most ``most`` bytes.

    ``hold`` is called with the size of each chunk. Raises :class:`~clawgym.gateway.calls.Refusal`.
    """
    try:
        raw = await _body(request, hold, most)
    except TimeoutError:
        raise Refusal(408, f"the body was not sent within {BODY_SECONDS:g} s (BODY_SECONDS): send it again") from None
    try:
        body = read_json(raw, orjson.loads)
    except OutOfBounds as error:
        raise Refusal(413, f"the request cannot be read: {error}: shorten it") from None
    except ValueError as error:
        raise Refusal(400, f"the body is not JSON ({error}): correct the request") from None
    if not isinstance(body, dict):
        raise Refusal(400, "the body is not a JSON object: correct the request")
    return body


async def _body(request: web.Request, hold: Callable[[int], None], most: int) -> bytes:
    body = bytearray()

    def check(size: int) -> None:
        if size > most:
            raise Refusal(413, f"the request is larger than {most >> 20} MiB (LARGEST_BODY): shorten it")

    def take(piece: bytes) -> None:
        body.extend(piece)
        check(len(body))
        hold(len(piece))

    check(request.content_length or 0)
    if request.content.is_eof():  # it came with the headers
        take(request.content.read_nowait())
    else:
        async with asyncio.timeout(BODY_SECONDS):
            async for piece in request.content.iter_any():
                take(piece)
    return bytes(body)


class _BySession:
    """The :class:`Admission` of agents, whose base_url names the session and whose key is its secret."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    async def caller(self, request: web.Request) -> Session:
        return await self._sessions.find(request.match_info["session"], secret_of(request))

    async def session(self, request: web.Request, body: Mapping[str, Any], call: ChatCall, *, counts: bool) -> Session:
        return await self.caller(request)  # again: it may have been evicted while the body was read


class _Models:
    """The list of models."""

    def __init__(self, gateway: Gateway, admission: Admission) -> None:
        self._gateway = gateway
        self._admission = admission

    async def handle(self, request: web.Request) -> web.Response:
        try:
            await self._admission.caller(request)
        except Refusal as error:
            return answer_error(_PLAIN, failure_of(error))
        model = {"id": self._gateway.model, "object": "model", "created": 0, "owned_by": "clawgym"}
        window = getattr(self._gateway.engine, "context_window", None)
        return web.json_response({"object": "list", "data": [model | ({"max_model_len": window} if window else {})]})


class _Endpoint:
    """The endpoint of one dialect."""

    def __init__(self, gateway: Gateway, admission: Admission, dialect: Dialect, *, streams: bool = False) -> None:
        self._gateway = gateway
        self._admission = admission
        self._dialect = dialect
        self._streams = streams

    async def handle(self, request: web.Request) -> web.StreamResponse:
        try:
            return await self._answer(request)
        except (ConnectionError, asyncio.CancelledError):
            raise
        except Exception as error:
            return answer_error(self._dialect, _failure(error))

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        caller = await self._admission.caller(request)  # before the body is read
        with caller.holding() as hold:
            body = await read_object(request, hold)
            call = self._dialect.call(body, request.headers.get("x-clawgym-role"))
            check_length(call)
            session = await self._admission.session(request, body, call, counts=False)
            with session.handled():
                return await self._stream(request, session, call, body)

    async def _stream(
        self, request: web.Request, session: Session, call: ChatCall, body: dict[str, Any]
    ) -> web.StreamResponse:
        gateway, dialect = self._gateway, self._dialect
        deltas = gateway.core.answer(session, call)
        if self._streams or body.get("stream"):
            events = dialect.events(deltas, call, body)
            return await send_events(
                request, events, lambda e: dialect.error_event(_failure(e)), comment=dialect.comment
            )
        async with contextlib.aclosing(deltas):
            return _json(await dialect.whole(deltas, call, body))


class _Count(_Endpoint):
    """The endpoint that counts the prompt tokens of a request."""

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        caller = await self._admission.caller(request)
        with caller.holding() as hold:
            body = await read_object(request, hold)
            call = self._dialect.call({**body, "max_tokens": 1}, None)
            check_length(call)
            session = await self._admission.session(request, body, call, counts=True)
            return web.json_response({"input_tokens": self._gateway.core.prompt_tokens(session, call)})
