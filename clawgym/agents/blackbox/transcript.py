"""Make a transcript from the turns that the gateway recorded; the program's own transcript is not used."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from clawgym.agents._calls import now
from clawgym.gateway.calls import text_of
from clawgym.records import Observation, Step, ToolCall, Turn

__all__ = ["steps_of"]


def steps_of(turns: Sequence[Turn], instruction: str, *, model: str | None = None) -> Iterator[Step]:
    """Yield the steps of one episode from its ``turns``, without the ``instruction``, which is already recorded.

    Tool results are observations of the step with the call. ``extra`` holds the role of a turn unless it is ``main``.
    """
    results = {
        message["tool_call_id"]: text_of(message) for turn in turns for message in turn.messages if _is_result(message)
    }
    instruction = instruction.strip()  # programs strip user messages
    said: set[tuple[str, str]] = {("user", instruction)}
    written = now()
    for turn in turns:
        for message in turn.messages:
            entry = (str(message.get("role")), text_of(message).strip())
            known = entry in said and (turn.parent is None or entry[1] == instruction)
            if entry[0] in ("system", "developer", "user") and not known:
                said.add(entry)
                yield Step("user" if entry[0] == "user" else "system", text_of(message), written, extra=_extra(turn))
        calls = tuple(map(_call, turn.reply.get("tool_calls") or ()))
        yield Step(
            "agent",
            text_of(turn.reply),
            written,
            tool_calls=calls,
            observations=tuple(Observation(results[c.id], c.id) for c in calls if c.id in results),
            reasoning=turn.reply.get("reasoning_content") or None,
            model=model,
            extra=_extra(turn) | ({"finish_reason": turn.finish_reason} if turn.finish_reason == "error" else {}),
        )


def _extra(turn: Turn) -> dict[str, Any]:
    return {} if turn.role == "main" else {"role": turn.role}


def _is_result(message: Mapping[str, Any]) -> bool:
    return message.get("role") == "tool" and isinstance(message.get("tool_call_id"), str)


def _call(call: Mapping[str, Any]) -> ToolCall:
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        arguments = {"arguments": function["arguments"]}
    return ToolCall(call["id"], function["name"], arguments)
