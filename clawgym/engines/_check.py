"""One call before a run: does the endpoint answer, take the key, and have the model?

Invariants: at most two requests (a completion of few tokens; only where that is refused, the list of models), bounded
in time and bytes as all requests are; the error names what is wrong and which URL, model or environment variable it is
about, and never holds the key.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from clawgym.engines._failures import EndpointFailure, RequestFailed, clean
from clawgym.engines._http import HttpEndpoint
from clawgym.engines.chat import Problem, parse_completion, storable
from clawgym.errors import ContextLengthExceeded, EngineError
from clawgym.registry import did_you_mean

__all__ = ["CHECK_SECONDS", "Asked", "check"]

CHECK_SECONDS = 60.0
"""Longest wait for the answer, in seconds."""
_TOKENS = 16
_NO_COMPLETION = "clawgym-no-completion"
_SHOWN = 12
"""Names of models that a message lists."""
_COMPARED = 1000
"""Names of models that a suggestion is looked for among."""
_NO_SUCH_PATH = (404, 405, 410, 501)


@dataclass(frozen=True, slots=True)
class Asked:
    """What the messages are about."""

    url: str
    """Without credentials."""
    model: str
    key: str
    key_env: str
    """The environment variable that the key was read from; empty where it was given otherwise."""


async def check(endpoint: HttpEndpoint, asked: Asked, body: dict[str, Any]) -> None:
    """Ask for a short completion. ``body`` has the model and what every request has beside its messages.

    Returns where a run can start, also where the endpoint is busy (429) or does not like this one request. Raises
    :class:`~clawgym.errors.EngineError` otherwise.
    """
    message = {"role": "user", "content": "Say OK."}
    models = None
    try:
        async with asyncio.timeout(CHECK_SECONDS):
            try:
                parsed = parse_completion(
                    await endpoint.post("/chat/completions", {**body, "messages": [message], "max_tokens": _TOKENS})
                )
            except ContextLengthExceeded:
                return
            except RequestFailed as error:
                failure = error.failure
                models = await _models(endpoint, failure)
            else:
                if not isinstance(parsed, Problem):
                    return
                text = f"an answer that is no chat completion ({parsed.message})"
                failure = EndpointFailure(text, parsed.status, code=_NO_COMPLETION)
    except TimeoutError:
        failure = EndpointFailure(f"no answer within {CHECK_SECONDS:g} s")
    problem = _problem(asked, failure, models)
    if problem is not None:
        raise EngineError(problem, status=failure.status)


async def _models(endpoint: HttpEndpoint, failure: EndpointFailure) -> Sequence[str] | None:
    """The names that the endpoint lists, where the failure may be about the model; None where it has no list."""
    if failure.status is None or failure.status in (401, 403, 429) or failure.status < 400:
        return None
    try:
        rows = (await endpoint.get("/models")).get("data")
    except RequestFailed:
        return None
    if not isinstance(rows, list):
        return None
    names = (row.get("id") for row in rows if isinstance(row, dict))
    return [storable(name) for name in names if isinstance(name, str)]


def _problem(asked: Asked, failure: EndpointFailure, models: Sequence[str] | None) -> str | None:
    """What is wrong and what to do; None where the run may start."""
    url, model, status = asked.url, asked.model, failure.status
    said = clean(failure.text, asked.key)
    not_openai = (
        f"{url} does not answer as an OpenAI-compatible server ({f'{status}: ' if status else ''}{said}): check the "
        "URL (--base-url); it usually ends with /v1"
    )
    if failure.code == _NO_COMPLETION:
        return not_openai
    match status:
        case 401 | 403:
            whose = f"the environment variable {asked.key_env}" if asked.key_env else "api_key="
            unset = "" if asked.key else ", which is not set"
            do = f"set it to a key that may use {model!r}"
            do += ", or name another variable with --api-key-env" if asked.key_env else ""
            return f"{url} refuses the API key ({status}: {said}). The key was read from {whose}{unset}: {do}"
        case 429 if failure.code == "insufficient_quota":
            return f"{url} ({status}: {said}): add credit to the account, or use another key"
        case 429:
            return None
        case None:
            return f"{url}: {said}: {failure.do}"
    if models is not None and model not in models:
        return _unknown_model(asked, models)
    about_model = failure.code == "model_not_found" or failure.param == "model"
    if about_model and (models is None or status in (400, 404, 422)):
        return f"{url} does not serve the model {model!r} ({status}: {said}): check the name of the model (--model)"
    if status in (400, 413, 422):
        return None  # it is there and has the model: what it does not like is adapted, or shown, in the run
    if status in _NO_SUCH_PATH or 300 <= status < 400:
        return not_openai
    return f"{url} fails ({status}: {said}): see the log of the server, then run again"


def _unknown_model(asked: Asked, models: Sequence[str]) -> str:
    hint = did_you_mean(asked.model, [clean(name) for name in models[:_COMPARED]])
    listed = ", ".join(clean(name)[:80] for name in models[:_SHOWN]) or "none"
    more = f" and {len(models) - _SHOWN:,} more" if len(models) > _SHOWN else ""
    return f"{asked.url} does not serve the model {asked.model!r}.{hint} It serves: {listed}{more}"
