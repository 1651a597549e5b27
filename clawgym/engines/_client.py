"""The official OpenAI client, with failures as values, so that no exception chain contains a request with the key."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import socket
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import AsyncExitStack
from functools import lru_cache
from typing import Any

from clawgym.bounds import HELD_ANSWERS, LARGEST_ANSWER, LARGEST_ERROR, LARGEST_STREAM, OutOfBounds, read_json
from clawgym.engines._failures import EndpointFailure, message_of, out_of_bounds, refusal_of
from clawgym.engines._sse import EventReader
from clawgym.engines.chat import storable
from clawgym.errors import EngineError, MissingDependency

__all__ = ["Client"]

_PIECE = 64
"""Least bytes that a piece counts for: a response in single bytes takes as much work."""


class _Refused(Exception):
    """A response that is not read any further."""

    def __init__(self, failure: EndpointFailure) -> None:
        super().__init__(failure.text)
        self.failure = failure


class Client:
    """Chat completions at ``base_url``.

    ``timeout`` in seconds bounds a request as a whole; for a stream, the time to its first chunk and between chunks.
    Responses are bounded by :mod:`clawgym.bounds`; redirects are not followed, and nothing is decompressed.
    """

    def __init__(self, base_url: str, api_key: str, timeout: float) -> None:
        try:
            import openai
        except ImportError as error:
            raise MissingDependency(
                "the openai engine needs the openai package: pip install 'clawgym[openai]'"
            ) from error
        self.version = openai.__version__
        self._openai = openai
        self._timeout = timeout
        self._held = 0
        http = openai.DefaultAsyncHttpxClient(
            verify=_trusted(),
            timeout=timeout,
            follow_redirects=False,
            headers={"accept-encoding": "identity"},
            event_hooks={"response": [_look]},
        )
        self._http, self._key = http, api_key or "none"
        self._client = openai.AsyncOpenAI(
            api_key=self._key, base_url=base_url, max_retries=0, timeout=timeout, http_client=http
        )
        libraries = _http_libraries()
        failures = tuple(library.HTTPError for library in libraries)
        self._failures = (TimeoutError, openai.APIError, ValueError, RecursionError, _Refused, *failures)
        self._late = (TimeoutError, openai.APITimeoutError, *(library.TimeoutException for library in libraries))
        self._cut = (openai.APIConnectionError, *failures)

    async def send(self, body: dict[str, Any]) -> Any | EndpointFailure:
        """Send one request. Returns the decoded JSON, or the failure."""
        asked = self._client.chat.completions.with_streaming_response.create(**body)
        try:
            async with asyncio.timeout(self._timeout), asked as response:
                raw = await self._whole(response.iter_bytes())
        except self._failures as error:
            return self._failure(error)
        try:
            return read_json(raw)
        except OutOfBounds as error:
            return out_of_bounds(f"an answer that cannot be read: {error}")
        except ValueError:
            shown = raw.decode("utf-8", "replace").strip()[:80]
            cut_off = not shown or shown.startswith("{")
            do = "check that base_url ends with /v1"
            return EndpointFailure(f"an answer that is not JSON ({shown!r})", retryable=cut_off, do=do)

    async def models(self) -> list[str] | EndpointFailure:
        """The names that the endpoint lists (``GET /models``)."""
        headers = {"authorization": f"Bearer {self._key}"}
        url = str(self._client.base_url).rstrip("/") + "/models"
        try:
            async with asyncio.timeout(self._timeout), self._http.stream("GET", url, headers=headers) as response:
                raw = await self._whole(response.aiter_bytes())
        except self._failures as error:
            return self._failure(error)
        try:
            listed = read_json(raw)
        except ValueError:  # also for what is out of bounds
            return EndpointFailure("a list of models that cannot be read")
        rows = listed.get("data") if isinstance(listed, dict) else None
        if not isinstance(rows, list):
            return EndpointFailure("a list of models that cannot be read")
        names = (row.get("id") for row in rows if isinstance(row, dict))
        return [storable(name) for name in names if isinstance(name, str)]

    async def _whole(self, pieces: AsyncIterator[bytes]) -> bytes:
        """Read the body of a response."""
        whole, size = bytearray(), 0
        try:
            async for piece in pieces:
                cost = max(len(piece), _PIECE)
                size += cost
                self._held += cost
                if size > LARGEST_ANSWER:
                    raise _Refused(out_of_bounds(f"an answer of more than {LARGEST_ANSWER >> 20} MiB (LARGEST_ANSWER)"))
                if self._held > HELD_ANSWERS:
                    most = f"{HELD_ANSWERS >> 20} MiB (HELD_ANSWERS)"
                    raise _Refused(out_of_bounds(f"answers of more than {most} at once"))
                whole += piece
            return bytes(whole)
        finally:
            self._held -= size

    async def stream(self, body: dict[str, Any]) -> AsyncGenerator[Mapping[str, Any] | EndpointFailure, None]:
        """Send one request and yield its chunks; the last item is the failure, if there is one."""
        named = {name: body[name] for name in ("model", "messages")}
        rest = {name: value for name, value in body.items() if name not in named}
        try:
            # Unknown parameters are sent as extra fields: the client would refuse them.
            asked = self._client.chat.completions.with_streaming_response.create(**named, stream=True, extra_body=rest)
            async with AsyncExitStack() as stack:
                async with asyncio.timeout(self._timeout):
                    response = await stack.enter_async_context(asked)
                async for chunk in self._chunks(response.iter_bytes()):
                    yield chunk
            return
        except self._failures as error:
            failure = self._failure(error)
        except EngineError as error:  # from the event parser
            failure = out_of_bounds(str(error))
        yield failure

    async def _chunks(self, pieces: AsyncIterator[bytes]) -> AsyncGenerator[Mapping[str, Any], None]:
        """Yield the decoded events. The time limit is for each event; comments do not extend it."""
        clock, reader, size = asyncio.get_running_loop().time, EventReader(), 0
        due = clock() + self._timeout
        while True:
            try:
                async with asyncio.timeout_at(due):
                    piece = await anext(pieces)
            except StopAsyncIteration:
                return
            size += max(len(piece), _PIECE)
            if size > LARGEST_STREAM:
                raise _Refused(out_of_bounds(f"a stream of more than {LARGEST_STREAM >> 20} MiB (LARGEST_STREAM)"))
            for data in reader.feed(piece):
                due = clock() + self._timeout
                if data.startswith(b"[DONE]"):
                    return
                yield _chunk(data)

    def _failure(self, error: Exception) -> EndpointFailure:
        if isinstance(error, _Refused):
            return error.failure
        if isinstance(error, self._late):
            return EndpointFailure(f"no answer within {self._timeout:g} s", status=None, retryable=True)
        if isinstance(error, self._cut):
            return EndpointFailure(f"no connection ({error.__cause__ or error!r})", retryable=True, do=_remedy(error))
        return EndpointFailure(f"a request that the client refuses ({error})", do="correct the request")

    async def aclose(self) -> None:
        await self._client.close()


def _remedy(error: BaseException) -> str:
    """What to do about a connection that failed, by the type of what lies below it."""
    seen: set[int] = set()
    below: BaseException | None = error
    while below is not None and id(below) not in seen:
        seen.add(id(below))
        match below:
            case ssl.SSLError():
                return "the server speaks no TLS that is trusted here: check http:// or https:// in base_url"
            case socket.gaierror():
                return "the host name is not known: check the host in base_url"
            case ConnectionRefusedError():
                return "nothing listens there: start the endpoint, or check host and port in base_url"
        inner = below.exceptions[0] if isinstance(below, BaseExceptionGroup) else None
        below = inner or below.__cause__ or below.__context__
    return EndpointFailure("").do


async def _look(response: Any) -> None:
    """Raise for a response with an error status, or a compressed one."""
    if response.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
        raise _Refused(out_of_bounds("a compressed answer, which was not asked for"))
    if 200 <= response.status_code < 300:
        return
    raw = bytearray()
    async for piece in response.aiter_raw():
        raw += piece
        if len(raw) >= LARGEST_ERROR:
            break
    raise _Refused(refusal_of(response.status_code, response.headers, bytes(raw[:LARGEST_ERROR])))


def _chunk(data: bytes) -> Mapping[str, Any]:
    """Decode the chunk of an event. Raises :class:`_Refused` for an error object."""
    try:
        chunk = read_json(data)
    except OutOfBounds as error:
        raise _Refused(out_of_bounds(f"an event that cannot be read: {error}")) from None
    except ValueError as error:
        text = f"a stream that is not JSON ({error})"
        raise _Refused(EndpointFailure(text, do="check that base_url ends with /v1")) from None
    if not isinstance(chunk, dict):
        return {}
    if error_object := chunk.get("error"):
        code = error_object.get("code") if isinstance(error_object, dict) else None
        text = message_of(error_object) or "an error without a message"
        raise _Refused(EndpointFailure(text, code=str(code or ""), retryable=True))
    return chunk


@lru_cache(maxsize=1)
def _trusted() -> Any:
    """The TLS context of all clients: loading the certificates is the slowest part of making one."""
    import openai

    library = importlib.import_module(openai.DefaultAsyncHttpxClient.__mro__[1].__module__.partition(".")[0])
    return library.create_ssl_context()


def _http_libraries() -> list[Any]:
    """The installed HTTP libraries of SDK releases, whose exceptions are not wrapped."""
    found: list[Any] = []
    for name in ("httpx", "httpx2"):
        with contextlib.suppress(ImportError):
            found.append(importlib.import_module(name))
    return found
