"""Parse an untrusted OpenAI chat completion.

Invariant: :func:`parse_completion` never raises for a JSON value; invalid ones are returned as a :class:`Problem`. No
returned string contains a lone surrogate, which could not be stored.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from clawgym.bounds import LARGEST_USAGE, LONGEST_REPLY, MOST_CALLS
from clawgym.engines.protocol import Completion
from clawgym.errors import BudgetExceeded
from clawgym.records import ToolCall, Usage

__all__ = ["Problem", "ReplyCounter", "count_of", "parse_completion", "refuse_constant", "storable"]


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a payload is not a completion. ``status``: the HTTP status reported inside of a 200 response, if any."""

    message: str
    status: int | None = None


class ReplyCounter:
    """Bounds the length of one reply. An endless reply is caused by the model, so it counts as an exceeded budget."""

    def __init__(self) -> None:
        self._characters = 0
        self._calls: set[int] = set()

    def add(self, characters: int, calls: Iterable[int]) -> None:
        """Count more ``characters``, and pieces of these ``calls``. Raises :class:`~clawgym.errors.BudgetExceeded`."""
        self._characters += characters
        self._calls.update(calls)
        if self._characters > LONGEST_REPLY:
            raise BudgetExceeded(
                f"the model's reply is longer than {LONGEST_REPLY} characters (LONGEST_REPLY): set max_tokens",
                cause="reply-length",
            )
        if len(self._calls) > MOST_CALLS:
            raise BudgetExceeded(
                f"the model's reply has more than {MOST_CALLS} tool calls (MOST_CALLS): set max_tokens",
                cause="reply-calls",
            )


def storable(value: Any) -> Any:
    """``value`` with every lone surrogate in its strings replaced, so that it can be written as UTF-8."""
    if isinstance(value, str):
        if value.isascii():
            return value
        try:
            value.encode()
        except UnicodeEncodeError:
            return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return value
    if isinstance(value, list):
        return [storable(v) for v in value]
    if isinstance(value, dict):
        return {storable(k): storable(v) for k, v in value.items()}
    return value


def parse_completion(payload: Any) -> tuple[Completion, bool] | Problem:
    """Parse ``payload``. Returns the completion and whether it reports usage, or the problem."""
    try:
        return _parse(payload)
    except RecursionError:
        return Problem("a completion nested too deeply to read")


def _parse(payload: Any) -> tuple[Completion, bool] | Problem:
    if not isinstance(payload, dict):
        return Problem(f"a {type(payload).__name__} instead of a chat completion")
    choices = payload.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    message = choice.get("message") if isinstance(choice, dict) else None
    if not isinstance(choice, dict) or not isinstance(message, dict):
        error = payload.get("error")
        detail = error.get("message") if isinstance(error, dict) else error
        code = error.get("code") if isinstance(error, dict) else None
        status = code if isinstance(code, int) and 400 <= code < 600 else None
        return Problem(str(storable(str(detail))) if detail else "a completion without choices", status)
    calls, malformed = _tool_calls(message.get("tool_calls"))
    usage, reported = _usage(payload.get("usage"))
    reasoning = _text(message.get("reasoning_content")) or _text(message.get("reasoning"))
    completion = Completion(
        text=_text(message.get("content")) or _text(message.get("refusal")),
        tool_calls=calls,
        malformed_calls=malformed,
        reasoning=reasoning or None,
        finish_reason=_text(choice.get("finish_reason")) or "stop",
        usage=usage,
        model=_text(payload.get("model")),
    )
    return completion, reported


def _text(value: Any) -> str:
    """A string, or the text parts of a list of content parts; anything else is empty."""
    if isinstance(value, list):
        parts = [p.get("text") for p in value if isinstance(p, dict)]
        value = "".join(p for p in parts if isinstance(p, str))
    return storable(value) if isinstance(value, str) else ""


def _tool_calls(raw: Any) -> tuple[tuple[ToolCall, ...], tuple[str, ...]]:
    calls: list[ToolCall] = []
    malformed: list[str] = []
    for index, item in enumerate(raw if isinstance(raw, list) else []):
        function = item.get("function") if isinstance(item, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(function, dict) or not isinstance(name, str) or not name:
            malformed.append(storable(json.dumps(item, ensure_ascii=False)))
            continue
        raw_arguments = function.get("arguments")
        arguments = _arguments(raw_arguments)
        if arguments is None:
            as_text = raw_arguments if isinstance(raw_arguments, str) else json.dumps(raw_arguments)
            malformed.append(storable(f"{name}({as_text})"))
            continue
        call_id = _text(item.get("id")) or f"call_{index + 1}"
        calls.append(ToolCall(id=call_id, name=storable(name), arguments=arguments))
    return tuple(calls), tuple(malformed)


def _arguments(raw: Any) -> Mapping[str, Any] | None:
    """The arguments as a mapping, or None if invalid. Some models write nothing for a tool without arguments."""
    if raw is None or (isinstance(raw, str) and not raw.strip()):
        return {}
    try:
        value = json.loads(raw, parse_constant=refuse_constant) if isinstance(raw, str) else raw
        return storable(value) if isinstance(value, dict) else None
    except (ValueError, RecursionError):
        return None


def refuse_constant(name: str) -> Any:
    """The ``parse_constant`` of :func:`json.loads` that accepts neither NaN nor infinities."""
    raise ValueError(f"{name} is not JSON")


def count_of(value: Any) -> int | None:
    """``value`` if it is a plausible number of tokens, else None."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    return value if whole and 0 <= value <= LARGEST_USAGE else None


def _usage(raw: Any) -> tuple[Usage, bool]:
    if not isinstance(raw, dict):
        return Usage(), False
    prompt, completion = count_of(raw.get("prompt_tokens")), count_of(raw.get("completion_tokens"))
    details = raw.get("prompt_tokens_details")
    cached = count_of(details.get("cached_tokens")) if isinstance(details, dict) else None
    reported = prompt is not None and completion is not None
    return Usage(prompt or 0, completion or 0, cached or 0), reported
