"""What agents without a model share: calls that are known beforehand, carried out and recorded."""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib import metadata

from clawgym.agents.protocol import AgentContext, AgentReport
from clawgym.errors import AgentError
from clawgym.records import Observation, Step, ToolCall
from clawgym.tools import SUBMIT, Refused

__all__ = ["VERSION", "now", "read_calls", "run_calls"]

VERSION = metadata.version("clawgym")


def now() -> str:
    """The time, as a transcript writes it."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def read_calls(text: bytes, where: str) -> list[ToolCall]:
    """A solution of a task with tools: a JSON list of ``{"name", "arguments"}``. Raises :class:`AgentError`."""
    try:
        items = json.loads(text)
        if not isinstance(items, list):
            raise TypeError("it is no list")
        calls = [ToolCall(f"call_{n}", item["name"], item.get("arguments", {})) for n, item in enumerate(items, 1)]
        if not all(isinstance(call.name, str) and isinstance(call.arguments, dict) for call in calls):
            raise TypeError("a name is no text, or arguments are no object")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise AgentError(f'{where}: is no list of calls {{"name", "arguments"}} ({error!r}): correct it') from error
    return calls


async def run_calls(context: AgentContext, calls: Iterable[ToolCall], *, timeout: float | None = None) -> AgentReport:
    """Carry out ``calls`` one after another up to a ``submit``, each recorded as a step, also when the box dies
    under it."""
    for call in calls:
        started = now()
        observations: list[Observation] = []
        try:
            observations += await context.tools.call_all([call], timeout=timeout)
        finally:
            context.record(Step("agent", "", started, tool_calls=(call,), observations=tuple(observations)))
        if call.name == SUBMIT and not isinstance(observations[0], Refused):
            return AgentReport(final_message=call.arguments.get("message") or "")
    return AgentReport()
