"""Make a transcript from the turns that the gateway recorded; the program's own transcript is not used.

If the program called the task's tools by MCP, the gateway also recorded what was executed. Both are kept: the calls of
a step are what the model wrote, by the program's names (``mcp__task__add``), and its ``executed_calls`` are what was
executed because of it, by the task's names (``add``), which is what verifiers get. A call that the model did not write,
sent by code in the sandbox, is executed and graded like any other, at the step that was the last when it came.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from clawgym.agents._calls import now
from clawgym.gateway.calls import text_of
from clawgym.gateway.tool_server import ExecutedCall
from clawgym.records import EXECUTED, Observation, Step, ToolCall, Turn

__all__ = ["steps_of", "with_executed"]


def steps_of(
    turns: Sequence[Turn], instruction: str, *, model: str | None = None, asked: Collection[str] | None = None
) -> Iterator[Step]:
    """Yield the steps of one episode from its ``turns``, without the ``instruction``, which is already recorded.

    Tool results are observations of the step with the call. ``extra`` holds the role of a turn unless it is ``main``.

    ``asked``: in a dialogue, the messages that the program was given, stripped. They are already recorded. The program
    wrote other messages of the user's role, so these become steps of the system.
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
            if asked is not None and entry[0] == "user":
                known = entry[1] in asked or entry in said
            if entry[0] in ("system", "developer", "user") and not known:
                said.add(entry)
                source = "user" if entry[0] == "user" and asked is None else "system"
                yield Step(source, text_of(message), written, extra=_extra(turn))
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


def with_executed(steps: Sequence[Step], first: int, executed: Sequence[ExecutedCall]) -> list[Step]:
    """Return ``steps`` with the calls that were executed (:data:`~clawgym.records.EXECUTED`).

    ``first``: the index of the turn of the first step of the agent. Each later one belongs to the next turn.
    """
    places = [n for n, step in enumerate(steps) if step.source == "agent"]
    if not places and executed:  # sent before the first reply of this message
        steps, places = [*steps, Step("agent", "", now())], [len(steps)]
    found: dict[int, list[dict[str, Any]]] = {n: [] for n in places}
    unmatched = {n: list(steps[n].tool_calls) for n in places}
    for one in executed:
        possible = places[: max(1, one.turns - first + 1)]  # a call may come before its turn is stored
        place, call = next(
            ((n, call) for n in possible for call in unmatched[n] if _same(call, one.call)), (possible[-1], None)
        )
        if call is not None:
            unmatched[place].remove(call)
        seen = None if one.observation is None else one.observation.content
        about = {"id": one.call.id, "name": one.call.name, "arguments": dict(one.call.arguments), "content": seen}
        found[place].append({**about, "sampled": call is not None})
    return [
        replace(step, extra={**step.extra, EXECUTED: found[n]}) if n in found else step for n, step in enumerate(steps)
    ]


def _same(sampled: ToolCall, executed: ToolCall) -> bool:
    """Programs add prefixes to names, and some take arguments of their own out of a call."""
    kept = {name: value for name, value in sampled.arguments.items() if name in executed.arguments}
    return sampled.name.endswith(executed.name) and kept == dict(executed.arguments)


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
