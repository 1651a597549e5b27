"""Shared by the agents without a model: run a fixed list of tool calls and record them."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from importlib import metadata

from clawgym.agents._dialogue import Conversation
from clawgym.agents.protocol import AgentContext, AgentReport
from clawgym.records import Observation, Step, ToolCall
from clawgym.tools import SUBMIT, CallRefused, aimed, closing

__all__ = ["VERSION", "now", "run_calls"]

VERSION = metadata.version("clawgym")


def now() -> str:
    """Return the current time in the format of transcripts: ISO 8601, UTC, with milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


async def run_calls(context: AgentContext, calls: Iterable[ToolCall], *, timeout: float | None = None) -> AgentReport:
    """Run ``calls`` one after another, up to the first that ends the episode (such as ``submit``).

    Each call is recorded as one step, also if the sandbox ends while it runs. A coordinate of a desktop call may be a
    CSS selector: the call then goes to the centre of the element. ``timeout`` is in seconds, for each call.

    In a dialogue, the calls before a ``submit`` are made together, and its message goes to the user.
    """
    if context.task.dialogue is not None:
        return await _converse(context, list(calls), timeout)
    for planned in calls:
        call = await aimed(context.tools, planned)
        started = now()
        observations: list[Observation] = []
        try:
            observations += await context.tools.call_all([call], timeout=timeout)
        finally:
            context.record(Step("agent", "", started, tool_calls=(call,), observations=tuple(observations)))
        final_message = closing(call)
        if final_message is not None and not isinstance(observations[0], CallRefused):
            return AgentReport(final_message=final_message)
    return AgentReport()


async def _converse(context: AgentContext, calls: list[ToolCall], timeout: float | None) -> AgentReport:
    conversation = Conversation(context)
    messages = await conversation.open()
    while calls:
        end = next((n for n, call in enumerate(calls) if call.name == SUBMIT), len(calls))
        made, said, calls = tuple(calls[:end]), calls[end : end + 1], calls[end + 1 :]
        text = closing(said[0]) or "" if said else ""
        observations: list[Observation] = []
        started = now()
        try:
            await context.tools.call_all(made, timeout=timeout, on_observation=observations.append)
        finally:
            if made:
                context.record(Step("agent", "", started, tool_calls=made, observations=tuple(observations)))
        if context.user is not None or not made:
            context.record(Step("agent", text, now()))
        if not await conversation.say(text, messages):
            return AgentReport(final_message=text)
    return AgentReport()
