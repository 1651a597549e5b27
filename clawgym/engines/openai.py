"""Engine ``openai``: any OpenAI-compatible chat endpoint, for evaluation (text, no exact tokens).

Invariants: a request is not retried after a piece of its answer has been yielded. The API key is in no message, repr,
log line or run manifest. An optional parameter that the endpoint refuses is adapted once, and recorded in the run
manifest. No request is sent once the budget is used up. Responses are bounded by :mod:`clawgym.bounds`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from clawgym.bounds import LARGEST_BODY
from clawgym.engines._check import Asked, check
from clawgym.engines._chunks import Chunks
from clawgym.engines._failures import EndpointFailure, RequestFailed, host_of, url_of
from clawgym.engines._http import HttpEndpoint
from clawgym.engines._limits import AnswerBudget, Prices, RateLimiter, RateLimits, Reservation
from clawgym.engines._retry import backoff, is_retryable, persist, persist_call
from clawgym.engines.chat import Problem, ReplyCounter, parse_completion
from clawgym.engines.protocol import Completion, Delta, Sampling, request_seed
from clawgym.errors import ClawGymError, ContextLengthExceeded, EngineError
from clawgym.records import Usage
from clawgym.registry import engines

__all__ = ["AnswerBudget", "OpenAIEngine", "Prices", "RateLimits"]

OPENAI_URL = "https://api.openai.com/v1"
LONGEST_WAIT_SECONDS = 300.0
"""Longest pause in seconds that an endpoint may ask for; beyond it an error is raised."""

_log = logging.getLogger("clawgym.engines")

_RENAMED = {"max_tokens": "max_completion_tokens"}
_OPTIONAL = ("max_tokens", "seed", "temperature", "top_p", "stop")
KEY_ENV = "OPENAI_API_KEY"
_PATH = "/chat/completions"
_HINTS = {
    429: "lower RateLimits(concurrent=..., requests_per_minute=...), or run again later",
    **dict.fromkeys((400, 413, 422), "correct the request; for a model without tool calls, use protocol='text'"),
}
_REFUSED = re.compile(
    r"unsupported|unknown|unrecogni[sz]ed|not (?:supported|permitted|allowed|recogni[sz]ed)|does not support|"
    r"extra[_ ](?:inputs|forbidden|fields)|unexpected|not available|invalid_argument_name",
    re.IGNORECASE,
)


@engines.register("openai")
class OpenAIEngine:
    """Samples from ``model`` behind an OpenAI-compatible ``base_url``.

    An engine belongs to the event loop that first uses it.

    Args:
        model: its name at the endpoint.
        base_url: URL of the endpoint; the environment variable ``OPENAI_BASE_URL`` by default, or OpenAI's.
        api_key: its key; the value of the environment variable ``api_key_env`` by default.
        api_key_env: name of the environment variable that holds the key.
        prices: of tokens, for a budget in dollars.
        budget: most tokens or dollars that it may spend.
        limits: most requests at once, and requests and tokens in a minute.
        max_retries: how often a request that failed for a passing reason is sent again.
        timeout: seconds for one request as a whole; of a stream, to its first piece and between two.
        extra_body: further request fields (``{"reasoning_effort": "low"}``), recorded in the run manifest.
    """

    name = "openai"

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        api_key_env: str = KEY_ENV,
        prices: Prices | None = None,
        budget: AnswerBudget | None = None,
        limits: RateLimits | None = None,
        max_retries: int = 6,
        timeout: float = 300.0,
        extra_body: Mapping[str, Any] | None = None,
    ) -> None:
        if not model:
            raise EngineError("the openai engine needs a model name: pass model=")
        self.model = model
        self.usage = Usage()
        """Usage of all requests so far."""
        self._url = base_url or os.environ.get("OPENAI_BASE_URL") or OPENAI_URL
        self._host = host_of(self._url)
        self._key_env, self._key_given = api_key_env, bool(api_key)
        self._key = api_key or os.environ.get(api_key_env) or ""
        if not self._key and (self._host == host_of(OPENAI_URL) or api_key_env != KEY_ENV):
            raise EngineError(f"{self._host} needs an API key: set {api_key_env} or pass api_key=")
        self._prices = prices
        self._budget = budget or AnswerBudget()
        if self._budget.cost_usd is not None and prices is None:
            raise EngineError("a cost budget needs prices: pass prices=Prices(prompt=..., completion=...)")
        self._limits = limits or RateLimits()
        self._slots = asyncio.Semaphore(self._limits.concurrent)
        self._rate = RateLimiter(self._limits)
        self._max_retries = max_retries
        self._extra_body = dict(extra_body or {})
        self._adapted: dict[str, str] = {}
        self._counts = {"requests": 0, "retries": 0, "throttled": 0, "without_usage": 0}
        self._endpoint = HttpEndpoint(
            self._url,
            model,
            api_key=self._key,
            first=timeout,
            between=timeout,
            proxies=True,
            hints={401: f"set {api_key_env} or pass api_key=", **_HINTS},
        )

    def __repr__(self) -> str:
        return f"OpenAIEngine(model={self.model!r}, host={self._host!r})"

    async def complete(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] = (), sampling: Sampling
    ) -> Completion:
        """Answer ``messages``. See :class:`clawgym.engines.protocol.Engine`."""
        return await persist_call(lambda: self._request(self._body(messages, tools, sampling)), self._pause)

    async def check(self) -> None:
        """Ask once for a short answer. See :class:`clawgym.engines.protocol.Checkable`."""
        asked = Asked(url_of(self._url), self.model, self._key, "" if self._key_given else self._key_env)
        await check(self._endpoint, asked, {"model": self.model, **self._extra_body})

    async def stream(self, body: Mapping[str, Any], *, session: str = "") -> AsyncGenerator[Delta, None]:
        """Answer a chat-completions request as it comes. See :class:`clawgym.engines.protocol.TextEngine`.

        The model is this engine's, whatever ``body`` says. Raises the errors of :meth:`complete`.
        """
        attempts = persist(lambda: self._stream_once(self._stream_body(body)), self._pause)
        async with aclosing(attempts) as pieces:
            async for piece in pieces:
                yield piece

    def identity(self) -> dict[str, Any]:
        """Model, endpoint (host, and its URL without credentials), client version, what is added to requests, and the
        adaptations made so far."""
        return {
            "name": self.name,
            "model": self.model,
            "host": urlsplit(self._url).hostname,
            "base_url": url_of(self._url),
            "client": self._endpoint.version,
            "extra_body": self._extra_body,
            "prices_usd_per_million": None
            if self._prices is None
            else {name: getattr(self._prices, name) for name in self._prices.__slots__},
            "adaptations": dict(sorted(self._adapted.items())),
        }

    def stats(self) -> dict[str, Any]:
        """Counters for reports: requests, retries, "too many requests" responses, responses without usage, seconds
        waited for rate limits, tokens and cost."""
        return {
            **self._counts,
            "waited_seconds": round(self._rate.waited, 3),
            "prompt_tokens": self.usage.prompt_tokens,
            "completion_tokens": self.usage.completion_tokens,
            "cached_tokens": self.usage.cached_tokens,
            "cost_usd": self.usage.cost_usd,
        }

    async def aclose(self) -> None:
        await self._endpoint.aclose()

    def _body(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], sampling: Sampling
    ) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.model, "messages": [dict(m) for m in messages]}
        if tools:
            body["tools"] = [dict(t) for t in tools]
        for name in _OPTIONAL:
            value = getattr(sampling, name)
            if value is None or value == ():
                continue
            name = _RENAMED[name] if name in _RENAMED and name in self._adapted else name
            if name not in self._adapted:
                body[name] = list(value) if name == "stop" else value
        return _with_own_seed(body) | self._extra_body

    def _stream_body(self, body: Mapping[str, Any]) -> dict[str, Any]:
        sent = {name: value for name, value in body.items() if name not in self._adapted and name != "n"}
        for name, renamed in _RENAMED.items():
            if name in self._adapted and name in body:
                sent[renamed] = body[name]
        sent = _with_own_seed(sent) | {"model": self.model, "stream": True, **self._extra_body}
        if "stream_options" not in self._adapted:
            sent["stream_options"] = {"include_usage": True}
        return sent

    async def _reserve(self, body: Mapping[str, Any]) -> Reservation:
        """Wait until ``body`` may be sent, by budget and rate limits."""
        limit = body.get("max_tokens") or body.get("max_completion_tokens") or 0
        size = len(json.dumps([body["messages"], body.get("tools")]))
        if size > LARGEST_BODY:
            raise ContextLengthExceeded(
                f"the conversation is larger than {LARGEST_BODY >> 20} MiB (LARGEST_BODY): lower max_steps"
            )
        estimate = size / 4 + limit
        self._budget.check(self.usage)
        reservation = await self._rate.acquire(estimate)
        self._budget.check(self.usage)
        self._counts["requests"] += 1
        return reservation

    def _pause(self, error: EngineError, retries: int) -> float | None:
        """Seconds to wait before the next try; None after an adaptation. Raises ``error`` where there is none."""
        if not isinstance(error, RequestFailed):
            raise error
        if error.adapted:
            return None
        asked = error.retry_after
        if not error.retryable or retries >= self._max_retries or (asked or 0.0) > LONGEST_WAIT_SECONDS:
            raise error
        delay = backoff(retries, asked)
        self._counts["retries"] += 1
        _log.info("%s: try %d of %d in %.1f s", error, retries + 2, self._max_retries + 1, delay)
        if asked is not None:
            self._rate.pause(asked)
        return delay

    async def _request(self, body: dict[str, Any]) -> Completion:
        """Send once, within budget and limits, and account for the response."""
        async with self._slots:
            reservation = await self._reserve(body)
            try:
                parsed = parse_completion(await self._endpoint.post(_PATH, body))
            except (RequestFailed, ContextLengthExceeded) as error:
                reservation.tokens = 0.0
                self._note(error, body)
                raise
            if isinstance(parsed, Problem):
                retryable = parsed.status is None or is_retryable(parsed.status)
                raise self._endpoint.error(EndpointFailure(parsed.message, parsed.status, retryable=retryable))
            completion, reported = parsed
            usage = self._account(completion.usage if reported else None, reservation)
            reply, calls = ReplyCounter(), len(completion.tool_calls) + len(completion.malformed_calls)
            reply.add(len(completion.text) + len(completion.reasoning or ""), range(calls))
            return replace(completion, usage=usage, model=completion.model or self.model)

    def _account(self, usage: Usage | None, reservation: Reservation) -> Usage:
        """Account for the usage of a response; None if the endpoint does not report it."""
        if usage is None:
            usage = Usage()
            self._counts["without_usage"] += 1
            if self._budget != AnswerBudget():
                raise EngineError(
                    f"{self._host} reports no token usage, so the budget cannot be kept: run without a budget, "
                    "or use an endpoint that reports usage"
                )
        else:
            reservation.tokens = usage.prompt_tokens + usage.completion_tokens
            if self._prices is not None:
                usage = replace(usage, cost_usd=self._prices.cost(usage))
        self.usage += usage
        return usage

    async def _stream_once(self, body: dict[str, Any]) -> AsyncGenerator[Delta, None]:
        """Send once and yield the pieces of the answer."""
        async with self._slots:
            reservation = await self._reserve(body)
            chunks, ended = Chunks(), False
            try:
                async with aclosing(self._endpoint.events(_PATH, body)) as batches:
                    async for batch in batches:
                        for event in batch:
                            if event.get("error"):
                                raise self._endpoint.error(self._endpoint.failure_of(event["error"]))
                            if (piece := chunks.take(event)) is not None:
                                yield piece
                if chunks.finish_reason is None:
                    failure = EndpointFailure("the stream ended before the answer did", retryable=True)
                    raise self._endpoint.error(failure)
                ended = True
            except RequestFailed as error:
                self._note(error, {} if chunks.any else body)
                raise
            finally:
                if not ended and not chunks.any:
                    reservation.tokens = 0.0
                elif not ended:  # interrupted: the tokens were used all the same
                    self._counts["without_usage"] += 1
            usage = self._account(chunks.usage, reservation)
            yield Delta(finish_reason=chunks.finish_reason, usage=None if chunks.usage is None else usage)

    def _note(self, error: ClawGymError, body: Mapping[str, Any]) -> None:
        """Count a failure, and adapt what ``body`` was refused for."""
        if isinstance(error, RequestFailed):
            self._counts["throttled"] += error.status == 429
            error.adapted = self._adapt(body, error.failure)

    def _adapt(self, body: Mapping[str, Any], failure: EndpointFailure) -> bool:
        """If an optional parameter was refused, omit or rename it from now on. Returns whether to try again."""
        if failure.status not in (400, 422) or not _REFUSED.search(f"{failure.text} {failure.code}"):
            return False
        for name in (*_OPTIONAL, *_RENAMED.values(), "stream_options"):
            named = failure.param == name or (
                failure.param is None and re.search(rf"(?<!\w){name}(?!\w)", failure.text)
            )
            if name not in body or not named:
                continue
            if name in self._adapted:
                return True  # a concurrent request has adapted it already
            renamed = _RENAMED.get(name)
            self._adapted[name] = f"sent as {renamed}" if renamed else "left out"
            _log.warning(
                "%s refuses %r for model %s: %s from now on", self._host, name, self.model, self._adapted[name]
            )
            return True
        return False


def _with_own_seed(body: dict[str, Any]) -> dict[str, Any]:
    """A request body whose seed, if it has one, is that of this request."""
    if (seed := body.get("seed")) is None:
        return body
    return {**body, "seed": request_seed(seed, json.dumps(body["messages"], default=str).encode())}
