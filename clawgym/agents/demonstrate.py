"""Demonstrations for supervised training: the reference solution, played back as the replies of a model.

:class:`DemonstrationEngine` is an engine, not an agent. The tool loop samples from it as from any model, so a
demonstration has the same prompts, replies and results as an episode of a model.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from clawgym.agents.oracle import solution_name
from clawgym.engines.protocol import CallDelta, Delta
from clawgym.errors import AgentError, EngineError
from clawgym.records import Task, ToolCall, Usage
from clawgym.tools import closing
from clawgym.tools.calls import read_calls
from clawgym.tools.shell import bash_call

__all__ = ["DemonstrationEngine", "reference_calls"]


def reference_calls(task: Task) -> list[ToolCall]:
    """Return the reference solution as tool calls, ending with ``submit``.

    A shell script becomes one call per line, or a single call if a construct spans several lines.

    Raises:
        AgentError: the task has no reference solution.
    """
    name = solution_name(task)
    entry = next((f for f in task.solution if f.path == name), None)
    if entry is None:
        raise AgentError(f"task {task.id} has no reference solution: add solution/{name}, or leave it out")
    if task.brings_tools:
        calls = list(read_calls(entry.read(), f"task {task.id}: {name}"))
    else:
        lines = [line for line in entry.read().decode().splitlines() if line.strip() and not line.startswith("#!")]
        multiline = any(
            "<<" in line or line[0].isspace() or line.rstrip().endswith(("\\", "do", "then", "{")) for line in lines
        )
        calls = [bash_call(text) for text in (["\n".join(lines)] if multiline else lines)]
    return _submitted(calls)


def _submitted(calls: Sequence[ToolCall]) -> list[ToolCall]:
    if calls and closing(calls[-1]) is not None:
        return list(calls)
    return [*calls, ToolCall("call_end", "submit", {"message": ""})]


class DemonstrationEngine:
    """A :class:`~clawgym.engines.protocol.TextEngine` that replies with the reference solution, one call per reply.

    The task is recognised by its instruction, the first user message.

    Args:
        tasks: the tasks that can be answered.
        protocol: the protocol of the tool loop that samples from this engine.
        calls: returns the calls of a task; by default its reference solution.
    """

    name = "demonstration"

    def __init__(
        self,
        tasks: Iterable[Task],
        protocol: Literal["tools", "text"] = "tools",
        *,
        calls: Callable[[Task], Sequence[ToolCall]] = reference_calls,
    ) -> None:
        self._protocol = protocol
        self._calls = {task.instruction: _submitted(calls(task)) for task in tasks}

    async def stream(self, body: Mapping[str, Any], *, session: str = "") -> AsyncIterator[Delta]:
        """See :class:`~clawgym.engines.protocol.TextEngine`."""
        messages: Sequence[Mapping[str, Any]] = body["messages"]
        content = next((m["content"] for m in messages if m["role"] == "user"), None)
        instruction = content if isinstance(content, str) else "".join(p.get("text", "") for p in content or ())
        number = sum(m["role"] == "assistant" for m in messages)
        calls = self._calls.get(instruction)
        if calls is None or number >= len(calls):
            raise EngineError(
                "the demonstration has no further reply: give the engine this task, and submit once", status=400
            )
        call = calls[number]
        if self._protocol == "text":
            text = f"```bash\n{call.arguments['command']}\n```" if call.name == "bash" else "<submit/>"
            yield Delta(text=text)
            yield Delta(finish_reason="stop", usage=Usage())
            return
        yield Delta(calls=(CallDelta(0, f"call_{number}", call.name, json.dumps(dict(call.arguments))),))
        yield Delta(finish_reason="tool_calls", usage=Usage())

    def identity(self) -> dict[str, Any]:
        """Return the name."""
        return {"name": self.name}

    async def aclose(self) -> None: ...
