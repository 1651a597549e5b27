"""Engine ``openai``: any OpenAI-compatible chat endpoint, for evaluation (text, no exact tokens).

Invariants: this is the one place that retries (the client's own retries are off); the API key appears in no
message, repr, log line or receipt; an optional parameter that the endpoint refuses is adapted once, and said
in the receipt; a request is never sent once the budget is used up.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

from clawgym.engines._chat import Problem, parse_completion, storable
from clawgym.engines._limits import Budget, Prices, RateLimiter, RateLimits
from clawgym.engines._retry import backoff, is_retryable, retry_after
from clawgym.engines.protocol import Completion, Sampling
from clawgym.errors import ClawGymError, ContextLengthExceeded, EngineError, MissingDependency
from clawgym.records import Usage

__all__ = ["Budget", "OpenAIEngine", "Prices", "RateLimits"]

OPENAI_URL = "https://api.openai.com/v1"
LONGEST_WAIT_SECONDS = 300.0
"""An endpoint that asks for a longer pause than this gets an error instead."""

_log = logging.getLogger("clawgym.engines")

_RENAMED = {"max_tokens": "max_completion_tokens"}
_OPTIONAL = ("max_tokens", "seed", "temperature", "top_p", "stop")
_REFUSED = re.compile(
    r"unsupported|unknown|unrecogni[sz]ed|not (?:supported|permitted|allowed|recogni[sz]ed)|does not support|"
    r"extra[_ ](?:inputs|forbidden|fields)|unexpected|not available|invalid_argument_name",
    re.IGNORECASE,
)
_CONTEXT = re.compile(
    r"context_length_exceeded|exceed_context_size|(?:maximum|max|exceeds?(?: the)?(?: available)?) context|"
    r"context (?:length|window|size)\b.*\bexceed|exceed\w*\b.*\bcontext (?:length|window|size)|prompt is too long",
    re.IGNORECASE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class _Failure:
    """A request that got no completion, before it is decided what that means."""

    text: str
    status: int | None = None
    param: str | None = None
    code: str | None = None
    asked_wait: float | None = None
    retryable: bool = False
    do: str = "check that the endpoint is up, and run again"


class OpenAIEngine:
    """Samples from ``model`` behind an OpenAI-compatible ``base_url`` with the official client.

    ``api_key`` and ``base_url`` default to ``OPENAI_API_KEY`` and ``OPENAI_BASE_URL``. ``extra_body`` holds
    further request fields (``{"reasoning_effort": "low"}``) and goes into the receipt. ``timeout`` bounds one
    request as a whole, in seconds. An engine belongs to the event loop that first uses it.
    """

    name = "openai"

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        prices: Prices | None = None,
        budget: Budget | None = None,
        limits: RateLimits | None = None,
        max_retries: int = 6,
        timeout: float = 300.0,
        extra_body: Mapping[str, Any] | None = None,
    ) -> None:
        try:
            import openai
        except ImportError as error:
            raise MissingDependency(
                "the openai engine needs the openai package: pip install 'clawgym[openai]'"
            ) from error
        if not model:
            raise EngineError("the openai engine needs a model name: pass model=")
        self.model = model
        self.usage = Usage()
        """Spent so far, over all requests."""
        self._url = base_url or os.environ.get("OPENAI_BASE_URL") or OPENAI_URL
        self._host = _host(self._url)
        self._key = api_key or os.environ.get("OPENAI_API_KEY") or ""
        if not self._key and self._host == _host(OPENAI_URL):
            raise EngineError(f"{self._host} needs an API key: set OPENAI_API_KEY or pass api_key=")
        self._prices = prices
        self._budget = budget or Budget()
        if self._budget.cost_usd is not None and prices is None:
            raise EngineError("a cost budget needs prices: pass prices=Prices(prompt=..., completion=...)")
        self._limits = limits or RateLimits()
        self._slots = asyncio.Semaphore(self._limits.concurrent)
        self._rate = RateLimiter(self._limits)
        self._max_retries = max_retries
        self._timeout = timeout
        self._extra_body = dict(extra_body or {})
        self._adapted: dict[str, str] = {}
        self._counts = {"requests": 0, "retries": 0, "throttled": 0, "without_usage": 0}
        self._version = openai.__version__
        self._openai = openai
        self._client = openai.AsyncOpenAI(
            api_key=self._key or "none", base_url=self._url, max_retries=0, timeout=timeout
        )

    def __repr__(self) -> str:
        return f"OpenAIEngine(model={self.model!r}, host={self._host!r})"

    async def complete(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] = (), sampling: Sampling
    ) -> Completion:
        """Answer ``messages``. See :class:`clawgym.engines.protocol.Engine`."""
        attempt = 0
        while True:
            body = self._body(messages, tools, sampling)
            answer = await self._request(body)
            if isinstance(answer, Completion):
                return answer
            if self._adapt(body, answer):
                continue
            error = self._error(answer)
            too_long = answer.asked_wait is not None and answer.asked_wait > LONGEST_WAIT_SECONDS
            if not answer.retryable or attempt >= self._max_retries or too_long:
                raise error
            delay = backoff(attempt, answer.asked_wait)
            attempt += 1
            self._counts["retries"] += 1
            _log.info("%s: try %d of %d in %.1f s", error, attempt + 1, self._max_retries + 1, delay)
            if answer.asked_wait is not None:
                self._rate.pause(answer.asked_wait)
            await asyncio.sleep(delay)

    def receipt(self) -> dict[str, Any]:
        """Model, host (without the port, which a local server may change), client version, what is added to
        requests, and the adaptations made so far."""
        return {
            "name": self.name,
            "model": self.model,
            "host": urlsplit(self._url).hostname,
            "client": f"openai-python {self._version}",
            "extra_body": self._extra_body,
            "prices_usd_per_million": None
            if self._prices is None
            else {name: getattr(self._prices, name) for name in self._prices.__slots__},
            "adaptations": dict(sorted(self._adapted.items())),
        }

    def stats(self) -> dict[str, Any]:
        """Requests sent, retries, answers that said "too many requests", answers without usage, seconds waited
        for the rate limits, and tokens and cost so far. For reports; not part of the receipt."""
        return {
            **self._counts,
            "waited_seconds": round(self._rate.waited, 3),
            "prompt_tokens": self.usage.prompt_tokens,
            "completion_tokens": self.usage.completion_tokens,
            "cached_tokens": self.usage.cached_tokens,
            "cost_usd": self.usage.cost_usd,
        }

    async def aclose(self) -> None:
        await self._client.close()

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
        if self._extra_body:
            body["extra_body"] = self._extra_body
        return body

    async def _request(self, body: dict[str, Any]) -> Completion | _Failure:
        """Send once, within budget, concurrency and rate limits, and account for the answer."""
        limit = body.get("max_tokens") or body.get("max_completion_tokens") or 0
        estimate = len(json.dumps([body["messages"], body.get("tools")])) / 4 + limit
        async with self._slots:
            self._budget.check(self.usage)
            reservation = await self._rate.acquire(estimate)
            self._budget.check(self.usage)
            self._counts["requests"] += 1
            payload = await self._send(body)
            if isinstance(payload, _Failure):
                reservation.tokens = 0.0
                self._counts["throttled"] += payload.status == 429
                return payload
            parsed = parse_completion(payload)
            if isinstance(parsed, Problem):
                retryable = parsed.status is None or is_retryable(parsed.status)
                return _Failure(parsed.message, status=parsed.status, retryable=retryable)
            completion, reported = parsed
            if reported:
                reservation.tokens = completion.usage.prompt_tokens + completion.usage.completion_tokens
            return self._account(completion, reported)

    async def _send(self, body: dict[str, Any]) -> Any | _Failure:
        """The decoded JSON of one HTTP exchange. Failures are values here, so that no exception chain holds
        the request, and with it the key."""
        openai = self._openai
        try:
            async with asyncio.timeout(self._timeout):
                raw = await self._client.chat.completions.with_raw_response.create(**body)
                text = raw.text
        except (TimeoutError, openai.APITimeoutError):
            return _Failure(f"no answer within {self._timeout:g} s", retryable=True)
        except openai.APIStatusError as error:
            detail = error.body if isinstance(error.body, dict) else {}
            text = error.response.text or error.message
            param, code = detail.get("param"), str(detail.get("code") or detail.get("type") or "")
            return _Failure(
                _message_of(error.body) or text,
                status=error.status_code,
                param=param if isinstance(param, str) else None,
                code=code,
                asked_wait=retry_after(error.response.headers),
                retryable=is_retryable(error.status_code) and code != "insufficient_quota",
            )
        except openai.APIConnectionError as error:
            return _Failure(f"no connection ({error.__cause__ or error})", retryable=True)
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            shown = text.strip()[:80]
            cut_off = not shown or shown.startswith("{")
            do = "check that base_url ends with /v1"
            return _Failure(f"an answer that is not JSON ({shown!r})", retryable=cut_off, do=do)

    def _account(self, completion: Completion, reported: bool) -> Completion:
        usage = completion.usage
        if not reported:
            self._counts["without_usage"] += 1
            if self._budget != Budget():
                raise EngineError(
                    f"{self._host} reports no token usage, so the budget cannot be kept: run without a budget, "
                    "or use an endpoint that reports usage"
                )
        elif self._prices is not None:
            usage = replace(usage, cost_usd=self._prices.cost(usage))
        self.usage += usage
        return replace(completion, usage=usage, model=completion.model or self.model)

    def _adapt(self, body: Mapping[str, Any], failure: _Failure) -> bool:
        """Whether the request was refused for an optional parameter that is left out or renamed from now on."""
        if failure.status not in (400, 422) or not _REFUSED.search(f"{failure.text} {failure.code}"):
            return False
        for name in (*_OPTIONAL, *_RENAMED.values()):
            named = failure.param == name or (
                failure.param is None and re.search(rf"(?<!\w){name}(?!\w)", failure.text)
            )
            if name not in body or not named:
                continue
            if name in self._adapted:
                return True  # another request found out while this one was under way
            renamed = _RENAMED.get(name)
            self._adapted[name] = f"sent as {renamed}" if renamed else "left out"
            _log.warning(
                "%s refuses %r for model %s: %s from now on", self._host, name, self.model, self._adapted[name]
            )
            return True
        return False

    def _error(self, failure: _Failure) -> ClawGymError:
        """The error that ``failure`` means to the caller, with what to do about it."""
        said = self._clean(failure.text)
        where = f"{self._host} ({failure.status})" if failure.status else self._host
        if failure.status in (400, 413, 422) and _CONTEXT.search(f"{failure.code} {failure.text}"):
            return ContextLengthExceeded(
                f"{where}: the conversation does not fit the context window of {self.model} ({said}): "
                "lower max_tokens or max_steps, or use a model with a larger window"
            )
        match failure.status:
            case 401:
                do = "set OPENAI_API_KEY or pass api_key="
            case 403:
                do = f"use a key that may use {self.model}, or another model"
            case 404:
                do = f"check the model name {self.model!r} and that base_url ends with /v1"
            case 429 if failure.code == "insufficient_quota":
                return EngineError(f"{where}: {said}: add credit to the account, or use another key")
            case 429:
                do = "lower RateLimits(concurrent=..., requests_per_minute=...), or run again later"
            case 400 | 413 | 422:
                do = "correct the request; for a model without tool calls, use protocol='text'"
            case _:
                do = failure.do
        return EngineError(f"{where}: {said}: {do}", retryable=failure.retryable)

    def _clean(self, text: str) -> str:
        """Text from outside, short, on one line, and without the key."""
        text = " ".join(storable(text).split())
        if self._key:
            text = text.replace(self._key, "***")
        text = re.sub(r"\bsk-[\w*-]{6,}", "sk-***", text)
        return text if len(text) <= 500 else text[:500] + "..."


def _host(url: str) -> str:
    """Host and port of ``url``; never its user info."""
    try:
        parts = urlsplit(url)
        port = f":{parts.port}" if parts.port else ""
    except ValueError:
        parts, port = urlsplit(""), ""
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise EngineError("base_url is not a web address: write it as http://127.0.0.1:8000/v1")
    return parts.hostname + port


def _message_of(body: object) -> str:
    """The message inside an error body, in the shapes that servers use."""
    if isinstance(body, dict):
        for key in ("message", "detail", "error"):
            value = body.get(key)
            if isinstance(value, str) and value:
                return value
            if value:
                return json.dumps(value)
    return body if isinstance(body, str) else ""
