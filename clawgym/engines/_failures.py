"""Error messages for failures of an endpoint: short, on one line, without the API key.

Invariant: every error ends with what to do, has the endpoint's status, and names its host. A conversation that is too
long is distinguished from all other refusals.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit, urlunsplit

from clawgym.bounds import read_json
from clawgym.credentials import without_secrets
from clawgym.engines._retry import is_retryable, retry_after
from clawgym.engines.chat import storable
from clawgym.errors import ContextLengthExceeded, EngineError

__all__ = [
    "EndpointFailure",
    "RequestFailed",
    "clean",
    "error_of",
    "host_of",
    "is_context_overflow",
    "message_of",
    "out_of_bounds",
    "refusal_of",
    "url_of",
]

LONGEST_TEXT = 500
_CONTEXT = re.compile(
    r"context_length_exceeded|exceed_context_size|(?:maximum|max|exceeds?(?: the)?(?: available)?) context|"
    r"context (?:length|window|size)\b.*\bexceed|exceed\w*\b.*\bcontext (?:length|window|size)|prompt is too long|"
    r"longer than the model's context",
    re.IGNORECASE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class EndpointFailure:
    """A failed request, before it becomes an exception or a retry."""

    text: str
    status: int | None = None
    param: str | None = None
    code: str | None = None
    asked_wait: float | None = None
    retryable: bool = False
    do: str = "check that the endpoint is up, and run again"


class RequestFailed(EngineError):
    """One request failed. Its message is complete; ``failure`` says what the endpoint answered."""

    def __init__(self, message: str, failure: EndpointFailure) -> None:
        super().__init__(message, retryable=failure.retryable, status=failure.status, retry_after=failure.asked_wait)
        self.failure = failure
        self.adapted = False
        """The next request leaves out or renames what this one was refused for."""


def host_of(url: str) -> str:
    """Host and port of ``url``, without user info. Raises :class:`EngineError` for an invalid URL."""
    try:
        parts = urlsplit(url)
        port = f":{parts.port}" if parts.port else ""
    except ValueError:
        parts, port = urlsplit(""), ""
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise EngineError("base_url is not a web address: write it as http://127.0.0.1:8000/v1")
    return parts.hostname + port


def url_of(url: str) -> str:
    """``url`` as it may be shown and stored: without user info, query and fragment, and no slash at its end."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, host_of(url), parts.path.rstrip("/"), "", ""))


def message_of(body: object) -> str:
    """The message in an error body, in the formats that servers use; empty if there is none."""
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


def refusal_of(status: int, headers: Mapping[str, str], raw: bytes) -> EndpointFailure:
    """The failure for a status other than 200; ``raw`` is the beginning of the body."""
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
    return EndpointFailure(
        text,
        status,
        param=param if isinstance(param, str) else None,
        code=code,
        asked_wait=retry_after(headers),
        retryable=is_retryable(status) and code != "insufficient_quota",
    )


def out_of_bounds(what: str) -> EndpointFailure:
    """The failure for a response beyond the bounds, or a compressed one. Never retried."""
    do = "check base_url, or use an endpoint that keeps the bounds (docs/reference/gateway-api.md)"
    return EndpointFailure(what, 502, do=do)


def clean(text: str, key: str = "") -> str:
    """An untrusted text: shortened, on one line, and without the key."""
    text = " ".join(storable(text).split())
    if key:
        text = text.replace(key, "***")
    text = without_secrets(text)
    return text if len(text) <= LONGEST_TEXT else text[:LONGEST_TEXT] + "..."


def is_context_overflow(failure: EndpointFailure) -> bool:
    """Whether the endpoint refused because the conversation is too long for the model."""
    return failure.status in (400, 413, 422) and bool(_CONTEXT.search(f"{failure.code} {failure.text}"))


def error_of(
    failure: EndpointFailure, *, host: str, model: str, key: str = "", hints: Mapping[int, str] | None = None
) -> RequestFailed | ContextLengthExceeded:
    """The exception for ``failure``. ``hints``: the engine's own advice for some statuses."""
    message = clean(failure.text, key)
    where = f"{host} ({failure.status})" if failure.status else host
    if is_context_overflow(failure):
        return ContextLengthExceeded(
            f"{where}: the conversation does not fit the context window of {model} ({message}): "
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
    return RequestFailed(f"{where}: {message}: {do}", failure)
