"""The official client, with failures as values: no chain of exceptions holds a request, and with it the key."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import lru_cache
from typing import Any

from clawgym.engines._failures import Failure, message_of
from clawgym.engines._retry import is_retryable, retry_after
from clawgym.errors import MissingDependency

__all__ = ["Client"]


class Client:
    """Chat completions at ``base_url``. ``timeout``, in seconds, bounds one request as a whole; of a stream, the time
    to its first chunk and between two."""

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
        http = openai.DefaultAsyncHttpxClient(verify=_trusted(), timeout=timeout)
        self._client = openai.AsyncOpenAI(
            api_key=api_key or "none", base_url=base_url, max_retries=0, timeout=timeout, http_client=http
        )
        libraries = _http_libraries()
        failures = tuple(library.HTTPError for library in libraries)
        self._failures = (TimeoutError, openai.APIError, ValueError, RecursionError, *failures)
        self._late = (TimeoutError, openai.APITimeoutError, *(library.TimeoutException for library in libraries))
        self._cut = (openai.APIConnectionError, *failures)

    async def send(self, body: dict[str, Any]) -> Any | Failure:
        """The decoded JSON of one exchange."""
        try:
            async with asyncio.timeout(self._timeout):
                raw = await self._client.chat.completions.with_raw_response.create(**body)
                text = raw.text
        except self._failures as error:
            return await self._failure(error)
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            shown = text.strip()[:80]
            cut_off = not shown or shown.startswith("{")
            do = "check that base_url ends with /v1"
            return Failure(f"an answer that is not JSON ({shown!r})", retryable=cut_off, do=do)

    async def stream(self, body: dict[str, Any]) -> AsyncGenerator[Any | Failure, None]:
        """The chunks of one exchange; last a failure, if one ended it."""
        named = {name: body[name] for name in ("model", "messages")}
        rest = {name: value for name, value in body.items() if name not in named}
        try:
            async with asyncio.timeout(self._timeout):
                # Whatever else is asked for goes as it came: the client would refuse what it does not know.
                stream = await self._client.chat.completions.create(**named, stream=True, extra_body=rest)
            async with aclosing(self._each(stream)) as chunks:
                async for chunk in chunks:
                    yield chunk
            return
        except self._failures as error:
            failure = await self._failure(error)
        yield failure

    async def _each(self, stream: Any) -> AsyncGenerator[Any, None]:
        try:
            items = aiter(stream)
            while True:
                try:
                    async with asyncio.timeout(self._timeout):
                        chunk = await anext(items)
                except StopAsyncIteration:
                    return
                yield chunk
        finally:
            await stream.close()

    async def _failure(self, error: Exception) -> Failure:
        if isinstance(error, self._late):
            return Failure(f"no answer within {self._timeout:g} s", status=None, retryable=True)
        if isinstance(error, self._openai.APIStatusError):
            detail = error.body if isinstance(error.body, dict) else {}
            text = (await error.response.aread()).decode("utf-8", "replace") or error.message
            param, code = detail.get("param"), str(detail.get("code") or detail.get("type") or "")
            return Failure(
                message_of(error.body) or text,
                status=error.status_code,
                param=param if isinstance(param, str) else None,
                code=code,
                asked_wait=retry_after(error.response.headers),
                retryable=is_retryable(error.status_code) and code != "insufficient_quota",
            )
        if isinstance(error, self._cut):
            return Failure(f"no connection ({error.__cause__ or error!r})", retryable=True)
        if isinstance(error, self._openai.APIError):  # inside a stream
            return Failure(message_of(error.body) or error.message, code=str(error.code or ""), retryable=True)
        return Failure(f"a stream that is not JSON ({error})", do="check that base_url ends with /v1")

    async def aclose(self) -> None:
        await self._client.close()


@lru_cache(maxsize=1)
def _trusted() -> Any:
    """The certificates of all clients: reading them takes longer than everything else about making one."""
    import openai

    library = importlib.import_module(openai.DefaultAsyncHttpxClient.__mro__[1].__module__.partition(".")[0])
    return library.create_ssl_context()


def _http_libraries() -> list[Any]:
    """What releases of the SDK speak HTTP with, as far as it is here: their errors come through."""
    found: list[Any] = []
    for name in ("httpx", "httpx2"):
        with contextlib.suppress(ImportError):
            found.append(importlib.import_module(name))
    return found
