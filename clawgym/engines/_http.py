"""An HTTP endpoint: a pooled client, time limits, JSON and event streams, error messages.

Invariants: each engine has one client session. The API key is in no message and is sent to no other host (redirects are
not followed). Nothing is decompressed, and responses are bounded by :mod:`clawgym.bounds`. Closing a stream closes its
connection, which tells the server to stop.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import secrets
import socket
import ssl
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit, urlunsplit
from urllib.request import getproxies, proxy_bypass

from clawgym._version import __version__
from clawgym.bounds import HELD_ANSWERS, LARGEST_ANSWER, LARGEST_ERROR, LARGEST_STREAM, OutOfBounds, read_json
from clawgym.engines._failures import EndpointFailure, error_of, host_of, message_of, out_of_bounds, refusal_of
from clawgym.engines._retry import is_retryable
from clawgym.engines._sse import EventReader
from clawgym.engines.chat import refuse_constant
from clawgym.errors import ClawGymError, MissingDependency

if TYPE_CHECKING:
    import aiohttp

__all__ = ["SAME", "UNREACHABLE", "HttpEndpoint"]

_T = TypeVar("_T")
SAME = secrets.token_hex(16)
"""Stands for ids that a server repeated as they were sent. No server knows it."""
_SAME_JSON = f'"{SAME}"'.encode()
_BETWEEN = b"," + _SAME_JSON + b","
UNREACHABLE = "unreachable"
"""Code of the failure of a request whose connection could not be made, or broke."""
_PIECE = 64
"""Least bytes that a piece counts for: a response in single bytes takes as much work."""
_MOST_INTERIM = 100
"""Most interim responses (such as 103 Early Hints) before a response."""


class HttpEndpoint:
    """A server, whose paths begin with ``base_url``, serving ``model``.

    Time limits in seconds: ``connect``, ``first`` (from sending a request to the first event, or to the end of an
    answer that is not streamed), and ``between`` (two events). ``proxies``: use the proxy that the environment names
    (``HTTPS_PROXY``, ``NO_PROXY``). ``hints``: the engine's own advice for some statuses. Belongs to the event loop
    that first uses it.

    Failures raise :class:`~clawgym.engines._failures.RequestFailed`, or
    :class:`~clawgym.errors.ContextLengthExceeded`.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api_key: str | None = None,
        connect: float = 10.0,
        first: float = 300.0,
        between: float = 60.0,
        proxies: bool = False,
        hints: Mapping[int, str] | None = None,
    ) -> None:
        try:
            import aiohttp
            import numpy
            import orjson
        except ImportError as error:
            raise MissingDependency("this engine needs aiohttp and orjson: pip install 'clawgym[openai]'") from error
        self._aiohttp = aiohttp
        self._orjson = orjson
        self._numpy = numpy
        self.version = f"aiohttp {aiohttp.__version__}"
        self.host = host_of(base_url)
        parts = urlsplit(base_url)
        self.hostname = parts.hostname
        self.model = model
        self._root = urlunsplit((parts.scheme, parts.netloc, parts.path.rstrip("/"), "", ""))
        self._query = f"?{parts.query}" if parts.query else ""
        self._key = api_key or ""
        self._headers = {
            "user-agent": f"clawgym/{__version__}",
            "content-type": "application/json",
            "accept": "text/event-stream, application/json",
            "accept-encoding": "identity",
        }
        if self._key and parts.username is None:  # user and password in the URL are sent instead of the key
            self._headers["authorization"] = f"Bearer {self._key}"
        self._proxy = _proxy(parts.scheme, parts.hostname or "") if proxies else None
        self._connect = connect
        self._first = first
        self._between = between
        self._hints = hints
        self._held = 0
        """Bytes of all responses that are being read."""
        self._session: aiohttp.ClientSession | None = None

    def __repr__(self) -> str:
        return f"HttpEndpoint(host={self.host!r}, model={self.model!r})"

    def error(self, failure: EndpointFailure) -> ClawGymError:
        """The exception for ``failure``."""
        return error_of(failure, host=self.host, model=self.model, key=self._key, hints=self._hints)

    def failure_of(self, error: Any) -> EndpointFailure:
        """The failure for an error object inside a response."""
        code = error.get("code", error.get("status_code")) if isinstance(error, dict) else None
        status = code if isinstance(code, int) and 400 <= code < 600 else None
        text = message_of(error) or "an error without a message"
        return EndpointFailure(text, status, code=str(code or ""), retryable=status is None or is_retryable(status))

    async def get(self, path: str) -> dict[str, Any]:
        """GET the JSON at ``path``, without retries."""
        return await self._json("GET", path, None)

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """POST ``body`` and return the JSON response, without retries."""
        return await self._json("POST", path, body)

    async def tell(self, path: str, body: dict[str, Any]) -> None:
        """POST ``body`` and ignore the content of the response, without retries."""
        response = await self._within(self._first, self._request("POST", path, self._encoded(body)), "answer")
        async with response:
            await self._refuse(response)

    async def events(
        self, path: str, body: dict[str, Any], most: int | None = None, echo: tuple[str, str] | None = None
    ) -> AsyncGenerator[list[dict[str, Any]], None]:
        """POST ``body`` and yield the JSON of the response's events, in batches as they arrive, without retries.

        Ends at ``[DONE]`` or the end of the stream, and fails after ``most`` events, or after
        :data:`~clawgym.bounds.LARGEST_STREAM` bytes where ``most`` is None.

        ``echo``: the name of the token ids in ``body``, and the name under which the server repeats them. Where they
        are the same, byte for byte, they are not parsed again, and :data:`SAME` takes their place.
        """
        name = ids = b""
        if echo is None:
            sent = self._encoded(body)
        else:
            name, ids = f'"{echo[1]}":'.encode(), self._ids(body[echo[0]])
            sent = self._encoded(body | {echo[0]: SAME}).replace(_SAME_JSON, ids, 1)
        seconds, what = self._first, "first answer"
        due = asyncio.get_running_loop().time() + seconds
        response = await self._within(seconds, self._request("POST", path, sent), what)
        watch = _Watch(response.content, seconds, due)  # for the next event; keep-alive comments do not count
        try:
            await self._refuse(response)
            reader, size = EventReader(), 0
            while True:
                piece = await self._within(seconds, response.content.readany(), what, math.inf)
                if not piece:
                    return
                size += max(len(piece), _PIECE)
                if most is None and size > LARGEST_STREAM:
                    raise self.error(
                        out_of_bounds(f"a stream of more than {LARGEST_STREAM >> 20} MiB (LARGEST_STREAM)")
                    )
                try:
                    came = reader.feed(piece)
                except OutOfBounds as error:
                    raise self.error(out_of_bounds(str(error))) from None
                end = next((n for n, data in enumerate(came) if data.startswith(b"[DONE]")), None)
                came = came[:end]
                if most is not None and (most := most - len(came)) < 0:
                    raise self.error(out_of_bounds("more events than the tokens that were asked for (MOST_EVENTS)"))
                if came:
                    watch.pause()
                    if name and len(came[0]) > len(ids):
                        came[0] = _without(came[0], name, ids)
                    yield self._all_decoded(came)
                    seconds, what = self._between, "next part of the answer"
                    watch.set(seconds)
                if end is not None:
                    await self._finish(response)
                    return
        finally:
            watch.stop()
            response.close()  # no effect once it was read to the end

    async def aclose(self) -> None:
        """Close every connection. Idempotent."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _json(self, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        due = asyncio.get_running_loop().time() + self._first
        data = None if body is None else self._encoded(body)
        response = await self._within(self._first, self._request(method, path, data), "answer", due)
        async with response:
            await self._refuse(response)
            return self._decoded(await self._within(self._first, self._whole(response), "answer", due), again=True)

    async def _whole(self, response: aiohttp.ClientResponse) -> bytes:
        whole, size = bytearray(), 0
        try:
            async for piece, _ in response.content.iter_chunks():  # one by one, to count each
                cost = max(len(piece), _PIECE)
                size += cost
                self._held += cost
                if size > LARGEST_ANSWER:
                    most = f"{LARGEST_ANSWER >> 20} MiB (LARGEST_ANSWER)"
                    raise self.error(out_of_bounds(f"an answer of more than {most}"))
                if self._held > HELD_ANSWERS:
                    most = f"{HELD_ANSWERS >> 20} MiB (HELD_ANSWERS)"
                    raise self.error(out_of_bounds(f"answers of more than {most} at once"))
                whole += piece
            return bytes(whole)
        finally:
            self._held -= size

    async def _request(self, method: str, path: str, data: bytes | None) -> aiohttp.ClientResponse:
        if self._session is None:
            self._session = self._aiohttp.ClientSession(
                headers=self._headers,
                connector=_connector(self._aiohttp),
                cookie_jar=self._aiohttp.DummyCookieJar(),
                timeout=self._aiohttp.ClientTimeout(total=None, sock_connect=self._connect),
                auto_decompress=False,
            )
        url = self._root + path + self._query
        return await self._session.request(method, url, data=data, proxy=self._proxy, allow_redirects=False)

    async def _within(self, seconds: float, what: Awaitable[_T], named: str, due: float | None = None) -> _T:
        """Await ``what``, and turn transport failures into retryable errors.

        ``due``: the deadline on the loop's clock, if the ``seconds`` started earlier; inf: ``what`` times out itself.
        """
        try:
            if due == math.inf:
                return await what
            async with asyncio.timeout(seconds) if due is None else asyncio.timeout_at(due):
                return await what
        except self._aiohttp.ConnectionTimeoutError:
            failure = EndpointFailure(f"no connection within {self._connect:g} s", code=UNREACHABLE, retryable=True)
        except TimeoutError:
            failure = EndpointFailure(f"no {named} within {seconds:g} s", retryable=True)
        except (self._aiohttp.ClientError, OSError) as error:
            text = f"no connection ({type(error).__name__}: {error})"
            failure = EndpointFailure(text, code=UNREACHABLE, retryable=True, do=self._remedy(error))
        # Raised outside of the handler, so that the exception chain does not contain the request with the key.
        raise self.error(failure)

    def _remedy(self, error: BaseException) -> str:
        """What to do about a connection that failed, by the type of what lies below it."""
        below: BaseException | None = error
        while below is not None:
            match below:
                case ssl.SSLError():
                    return "the server speaks no TLS that is trusted here: check http:// or https:// in base_url"
                case socket.gaierror() | self._aiohttp.ClientConnectorDNSError():
                    return "the host name is not known: check the host in base_url"
                case ConnectionRefusedError():
                    return "nothing listens there: start the endpoint, or check host and port in base_url"
            below = below.__cause__
        return EndpointFailure("").do

    async def _refuse(self, response: aiohttp.ClientResponse) -> None:
        """Raise for a status that is no success, and for a compressed response."""
        if response.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
            raise self.error(out_of_bounds("a compressed answer, which was not asked for"))
        if 200 <= response.status < 300:
            return
        raw = await self._within(self._first, response.content.read(LARGEST_ERROR), "answer")
        raise self.error(refusal_of(response.status, response.headers, raw))

    async def _finish(self, response: aiohttp.ClientResponse) -> None:
        """Read the rest, so that the connection can be reused; there should be none."""
        try:
            async with asyncio.timeout(1.0):
                while await response.content.readany():
                    pass
        except (TimeoutError, self._aiohttp.ClientError, OSError):
            pass  # the response is complete; the connection is closed

    def _encoded(self, body: dict[str, Any]) -> bytes:
        try:
            return self._orjson.dumps(body)
        except TypeError:  # such as whole numbers of more than 64 bits
            pass
        try:
            return json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
        except (TypeError, ValueError, RecursionError) as error:
            failure = EndpointFailure(f"a request that is not JSON ({error})", do="correct the request")
        raise self.error(failure)

    def _ids(self, ids: Sequence[int]) -> bytes:
        """Token ids as JSON. Those of an array are written without making an object of each."""
        if isinstance(ids, list | tuple):
            return self._orjson.dumps(ids)
        return self._orjson.dumps(self._numpy.asarray(ids), list, self._orjson.OPT_SERIALIZE_NUMPY)

    def _loads(self, data: bytes) -> Any:
        """Decode JSON, also where orjson refuses it: whole numbers of more than 64 bits, half of a surrogate pair."""
        try:
            return self._orjson.loads(data)
        except ValueError:
            return json.loads(data, parse_constant=refuse_constant)

    def _all_decoded(self, came: list[bytes]) -> list[dict[str, Any]]:
        """Decode JSON objects: at once, where each is one alone. :data:`SAME` between them shows where each ends."""
        if len(came) > 1:
            with contextlib.suppress(ValueError):
                together = read_json(b"[" + _BETWEEN.join(came) + b"]", self._orjson.loads)
                found, between = together[::2], together[1::2]
                if len(found) == len(came) and {*map(type, found)} == {dict} and between == [SAME] * len(between):
                    return found
        return [self._decoded(data) for data in came]

    def _decoded(self, data: bytes, *, again: bool = False) -> dict[str, Any]:
        """Decode the JSON object ``data``. With ``again``, the error for one that was cut off is retryable."""
        try:
            decoded = read_json(data, self._loads)
            if isinstance(decoded, dict):
                return decoded
            raise ValueError
        except OutOfBounds as error:
            raise self.error(out_of_bounds(f"an answer that cannot be read: {error}")) from None
        except ValueError:
            shown = data.decode("utf-8", "replace").strip()[:80]
            text = f"an answer that is not JSON of an object ({shown!r})"
            do = "check that base_url ends with /v1"
            raise self.error(EndpointFailure(text, retryable=again and shown[:1] in "{", do=do)) from None


class _Watch:
    """Breaks off the reading of a stream at a deadline. Its timer is not set again for each piece."""

    def __init__(self, content: aiohttp.StreamReader, seconds: float, due: float) -> None:
        self._content, self._seconds, self._due = content, seconds, due
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_at(due, self._look)

    def pause(self) -> None:
        """Nothing is awaited from the server."""
        self._due = math.inf

    def set(self, seconds: float) -> None:
        """Set the deadline ``seconds`` from now."""
        self._due = self._loop.time() + seconds
        if seconds < self._seconds:  # before the timer goes off
            self._timer.cancel()
            self._timer = self._loop.call_at(self._due, self._look)
        self._seconds = seconds

    def stop(self) -> None:
        """Forget the deadline."""
        self._timer.cancel()

    def _look(self) -> None:
        now = self._loop.time()
        if now >= self._due:
            self._content.set_exception(TimeoutError())
        else:
            self._timer = self._loop.call_at(min(self._due, now + self._seconds), self._look)


def _without(data: bytes, name: bytes, value: bytes) -> bytes:
    """JSON with :data:`SAME` for ``value`` after the first ``name``, whose quotes would be escaped in a string."""
    head, _, rest = data.partition(name)
    rest = rest.lstrip()
    return b"".join((head, name, _SAME_JSON, rest[len(value) :])) if rest.startswith(value) else data


def _connector(aiohttp: Any) -> aiohttp.TCPConnector:
    """A connector that breaks the connection of a server that sends interim responses (1xx) without end."""
    from aiohttp.client_proto import ResponseHandler

    class Handler(ResponseHandler):
        interim = 0
        """Interim responses since the last final one."""

        def feed_data(self, data: Any, size: int = 0) -> None:
            self.interim = self.interim + 1 if data[0].code < 200 else 0
            if self.interim <= _MOST_INTERIM:
                super().feed_data(data, size)
            elif self.transport is not None:
                self.transport.abort()  # type: ignore[attr-defined]

    made = aiohttp.TCPConnector(limit=0)
    made._factory = partial(Handler, loop=asyncio.get_running_loop())
    return made


def _proxy(scheme: str, host: str) -> str | None:
    """The URL of the proxy that the environment names for ``host``; None without one."""
    named = getproxies()
    return None if proxy_bypass(host) else named.get(scheme) or named.get("all")
