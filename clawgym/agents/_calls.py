"""What agents without a model share: calls that are known beforehand, carried out and recorded."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from importlib import metadata

from clawgym.agents.protocol import AgentContext, AgentReport
from clawgym.records import Observation, Step, ToolCall
from clawgym.tools import CallRefused, aimed, closing

__all__ = ["VERSION", "now", "run_calls"]

VERSION = metadata.version("clawgym")


def now() -> str:
    """The time, as a transcript writes it."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


async def run_calls(context: AgentContext, calls: Iterable[ToolCall], *, timeout: float | None = None) -> AgentReport:
    """Carry out ``calls`` one after another up to one that closes the work, each recorded as a step, also when the box
    dies under it. A coordinate of a desktop may be a CSS selector here: the middle of what it names is meant."""
    for planned in calls:
        call = await aimed(context.tools, planned)
        started = now()
        observations: list[Observation] = []
        try:
            observations += await context.tools.call_all([call], timeout=timeout)
        finally:
            context.record(Step("agent", "", started, tool_calls=(call,), observations=tuple(observations)))
        said = closing(call)
        if said is not None and not isinstance(observations[0], CallRefused):
            return AgentReport(final_message=said)
    return AgentReport()
