"""What went wrong at an endpoint, in words that may be shown: short, on one line, without the key.

Invariant: every error that leaves here ends with what to do, carries the endpoint's status, and names its host; a
conversation that is too long is told apart from every other refusal.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from clawgym.bounds import read_json
from clawgym.engines._retry import is_retryable, retry_after
from clawgym.engines.chat import storable
from clawgym.errors import ContextLengthExceeded, EngineError

__all__ = [
    "Failure",
    "clean",
    "error_of",
    "host_of",
    "is_context_overflow",
    "message_of",
    "out_of_bounds",
    "refusal_of",
]

LONGEST_TEXT = 500
_CONTEXT = re.compile(
    r"context_length_exceeded|exceed_context_size|(?:maximum|max|exceeds?(?: the)?(?: available)?) context|"
    r"context (?:length|window|size)\b.*\bexceed|exceed\w*\b.*\bcontext (?:length|window|size)|prompt is too long|"
    r"longer than the model's context",
    re.IGNORECASE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Failure:
    """A request that got no answer, before it is decided what that means."""

    text: str
    status: int | None = None
    param: str | None = None
    code: str | None = None
    asked_wait: float | None = None
    retryable: bool = False
    do: str = "check that the endpoint is up, and run again"


def host_of(url: str) -> str:
    """Host and port of ``url``; never its user info. Raises :class:`EngineError` for what is no web address."""
    try:
        parts = urlsplit(url)
        port = f":{parts.port}" if parts.port else ""
    except ValueError:
        parts, port = urlsplit(""), ""
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise EngineError("base_url is not a web address: write it as http://127.0.0.1:8000/v1")
    return parts.hostname + port


def message_of(body: object) -> str:
    """The message inside an error body, in the shapes that servers use; empty where there is none."""
    if isinstance(body, dict):
        for key in ("message", "detail", "error"):
            value = body.get(key)
            if isinstance(value, str) and value:
                return value
            if isinstance(value, dict) and isinstance(value.get("message"), str):
                return value["message"]
            if value:
                try:
                    return json.dumps(value)
                except RecursionError:
                    return "an error nested too deeply to read"
    return body if isinstance(body, str) else ""


def refusal_of(status: int, headers: Mapping[str, str], raw: bytes) -> Failure:
    """What an answer other than 200 means, whose body begins with ``raw``."""
    try:
        body = read_json(raw)
    except ValueError:
        body = raw.decode("utf-8", "replace")
    inner = body.get("error") if isinstance(body, dict) else None
    detail = inner if isinstance(inner, dict) else body if isinstance(body, dict) else {}
    text = message_of(inner) or message_of(body) or "an error without a message"
    if 300 <= status < 400:
        text = f"a redirect to {headers.get('location', 'nowhere')}, which is not followed"
    param, code = detail.get("param"), str(detail.get("code") or detail.get("type") or "")
    return Failure(
        text,
        status,
        param=param if isinstance(param, str) else None,
        code=code,
        asked_wait=retry_after(headers),
        retryable=is_retryable(status) and code != "insufficient_quota",
    )


def out_of_bounds(what: str) -> Failure:
    """An answer that no model gives: larger or deeper than the bounds, or packed. Never tried again."""
    do = "check base_url, or use an endpoint that keeps the bounds (docs/gateway.md)"
    return Failure(what, 502, do=do)


def clean(text: str, key: str = "") -> str:
    """Text from outside, short, on one line, and without the key."""
    text = " ".join(storable(text).split())
    if key:
        text = text.replace(key, "***")
    text = re.sub(r"\bsk-[\w*-]{6,}", "sk-***", text)
    return text if len(text) <= LONGEST_TEXT else text[:LONGEST_TEXT] + "..."


def is_context_overflow(failure: Failure) -> bool:
    """Whether the endpoint refused because the conversation is too long for the model."""
    return failure.status in (400, 413, 422) and bool(_CONTEXT.search(f"{failure.code} {failure.text}"))


def error_of(
    failure: Failure, *, host: str, model: str, key: str = "", hints: dict[int, str] | None = None
) -> EngineError | ContextLengthExceeded:
    """The error that ``failure`` means to the caller. ``hints`` says what to do about a status where the engine knows
    better."""
    said = clean(failure.text, key)
    where = f"{host} ({failure.status})" if failure.status else host
    if is_context_overflow(failure):
        return ContextLengthExceeded(
            f"{where}: the conversation does not fit the context window of {model} ({said}): "
            "lower max_tokens or max_steps, or use a model with a larger window"
        )
    match failure.status:
        case 429 if failure.code == "insufficient_quota":
            do = "add credit to the account, or use another key"
        case status if status is not None and hints and status in hints:
            do = hints[status]
        case 401:
            do = "set the API key (api_key=)"
        case 403:
            do = f"use a key that may use {model}, or another model"
        case 404:
            do = f"check the model name {model!r} and that base_url ends with /v1"
        case 429:
            do = "send less at once, or run again later"
        case 400 | 413 | 422:
            do = "correct the request"
        case _:
            do = failure.do
    return EngineError(
        f"{where}: {said}: {do}",
        retryable=failure.retryable,
        status=failure.status,
        retry_after=failure.asked_wait,
    )
