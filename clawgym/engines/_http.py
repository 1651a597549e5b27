"""An HTTP endpoint: a pooled client, time limits, JSON and event streams, error messages.

Invariants: each engine has one client session. The API key is in no message and is sent to no other host (redirects are
not followed). Nothing is decompressed, and responses are bounded by :mod:`clawgym.bounds`. Closing a stream closes its
connection, which tells the server to stop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from clawgym.bounds import LARGEST_ANSWER, LARGEST_ERROR, OutOfBounds, read_json
from clawgym.engines._failures import EndpointFailure, error_of, host_of, message_of, out_of_bounds, refusal_of
from clawgym.engines._retry import is_retryable
from clawgym.engines._sse import EventReader
from clawgym.errors import ClawGymError, MissingDependency

if TYPE_CHECKING:
    import aiohttp

__all__ = ["HttpEndpoint"]

_T = TypeVar("_T")


class HttpEndpoint:
    """A server at ``base_url`` (with or without ``/v1``), serving ``model``.

    Time limits in seconds: ``connect``, ``first`` (from sending a request to the first event), ``between`` (two
    events), and ``patience`` (how long a request is retried after its first failure). Belongs to the event loop that
    first uses it.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api_key: str | None = None,
        patience: float = 120.0,
        connect: float = 10.0,
        first: float = 300.0,
        between: float = 60.0,
    ) -> None:
        try:
            import aiohttp
            import orjson
        except ImportError as error:
            raise MissingDependency("this engine needs aiohttp and orjson: pip install 'clawgym[gateway]'") from error
        self._aiohttp = aiohttp
        self._loads = orjson.loads
        self._dumps = orjson.dumps
        self.host = host_of(base_url)
        self.hostname = urlsplit(base_url).hostname
        self.model = model
        self.patience = patience
        self._root = base_url.rstrip("/").removesuffix("/v1")
        self._key = api_key or ""
        self._connect = connect
        self._first = first
        self._between = between
        self._session: aiohttp.ClientSession | None = None

    def __repr__(self) -> str:
        return f"HttpEndpoint(host={self.host!r}, model={self.model!r})"

    def error(self, failure: EndpointFailure) -> ClawGymError:
        """The exception for ``failure``."""
        return error_of(failure, host=self.host, model=self.model, key=self._key)

    def failure_of(self, error: Any) -> EndpointFailure:
        """The failure for an error object inside a response."""
        code = error.get("code", error.get("status_code")) if isinstance(error, dict) else None
        status = code if isinstance(code, int) and 400 <= code < 600 else None
        text = message_of(error) or "an error without a message"
        return EndpointFailure(text, status, retryable=status is None or is_retryable(status))

    async def get(self, path: str) -> dict[str, Any]:
        """GET the JSON at ``path``, without retries."""
        return await self._json("GET", path, None)

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """POST ``body`` and return the JSON response, without retries."""
        return await self._json("POST", path, body)

    async def tell(self, path: str, body: dict[str, Any]) -> None:
        """POST ``body`` and ignore the content of the response, without retries."""
        response = await self._within(self._first, self._request("POST", path, body), "answer")
        async with response:
            await self._refuse(response)

    async def events(self, path: str, body: dict[str, Any], most: int) -> AsyncGenerator[list[dict[str, Any]], None]:
        """POST ``body`` and yield the JSON of the response's events, in batches as they arrive, without retries.

        Ends at ``[DONE]`` or the end of the stream, and fails after ``most`` events. Raises
        :class:`~clawgym.errors.EngineError` for a refusal, a broken connection, or a time limit.
        """
        clock = asyncio.get_running_loop().time
        seconds, what = self._first, "first answer"
        due = clock() + seconds  # for the next event; keep-alive comments do not count
        response = await self._within(seconds, self._request("POST", path, body), what)
        try:
            await self._refuse(response)
            reader = EventReader()
            while True:
                piece = await self._within(seconds, response.content.readany(), what, due)
                if not piece:
                    return
                came = reader.feed(piece)
                done = b"[DONE]" in came
                if done:
                    came = came[: came.index(b"[DONE]")]
                most -= len(came)
                if most < 0:
                    raise self.error(out_of_bounds("more events than the tokens that were asked for (MOST_EVENTS)"))
                if came:
                    yield [self._decoded(data) for data in came]
                    seconds, what = self._between, "next part of the answer"
                    due = clock() + seconds
                if done:
                    await self._finish(response)
                    return
        finally:
            response.close()  # no effect once it was read to the end

    async def aclose(self) -> None:
        """Close every connection. Idempotent."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _json(self, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        response = await self._within(self._first, self._request(method, path, body), "answer")
        async with response:
            await self._refuse(response)
            return self._decoded(await self._within(self._first, self._whole(response), "answer"))

    async def _whole(self, response: aiohttp.ClientResponse) -> bytes:
        whole = bytearray()
        while piece := await response.content.readany():
            whole += piece
            if len(whole) > LARGEST_ANSWER:
                raise self.error(out_of_bounds(f"an answer of more than {LARGEST_ANSWER >> 20} MiB (LARGEST_ANSWER)"))
        return bytes(whole)

    async def _request(self, method: str, path: str, body: dict[str, Any] | None) -> aiohttp.ClientResponse:
        if self._session is None:
            headers = {"authorization": f"Bearer {self._key}"} if self._key else {}
            self._session = self._aiohttp.ClientSession(
                headers=headers,
                connector=self._aiohttp.TCPConnector(limit=0),
                cookie_jar=self._aiohttp.DummyCookieJar(),
                timeout=self._aiohttp.ClientTimeout(total=None, sock_connect=self._connect),
                auto_decompress=False,
            )
        data = None if body is None else self._dumps(body)
        headers = {
            "content-type": "application/json",
            "accept": "text/event-stream, application/json",
            "accept-encoding": "identity",
        }
        return await self._session.request(method, self._root + path, data=data, headers=headers, allow_redirects=False)

    async def _within(self, seconds: float, what: Awaitable[_T], named: str, due: float | None = None) -> _T:
        """Await ``what``, and turn transport failures into retryable errors.

        ``due``: the deadline on the loop's clock, if the ``seconds`` started earlier.
        """
        try:
            async with asyncio.timeout(seconds) if due is None else asyncio.timeout_at(due):
                return await what
        except self._aiohttp.ConnectionTimeoutError:
            failure = EndpointFailure(f"no connection within {self._connect:g} s", 503, retryable=True)
        except TimeoutError:
            failure = EndpointFailure(f"no {named} within {seconds:g} s", 504, retryable=True)
        except (self._aiohttp.ClientError, OSError) as error:
            failure = EndpointFailure(f"no connection ({type(error).__name__}: {error})", 503, retryable=True)
        # Raised outside of the handler, so that the exception chain does not contain the request with the key.
        raise self.error(failure)

    async def _refuse(self, response: aiohttp.ClientResponse) -> None:
        """Raise for a status other than 200, and for a compressed response."""
        if response.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
            raise self.error(out_of_bounds("a compressed answer, which was not asked for"))
        if response.status == 200:
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

    def _decoded(self, data: bytes) -> dict[str, Any]:
        """Decode the JSON object ``data``."""
        try:
            decoded = read_json(data, self._loads)
            if isinstance(decoded, dict):
                return decoded
            raise ValueError
        except OutOfBounds as error:
            raise self.error(out_of_bounds(f"an answer that cannot be read: {error}")) from None
        except ValueError:
            shown = data[:80].decode("utf-8", "replace")
            raise self.error(
                EndpointFailure(f"an answer that is no JSON object ({shown!r})", 502, do="check base_url")
            ) from None
