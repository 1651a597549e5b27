"""What a model would have said that works as the reference solution does: demonstrations for supervised training.

An engine, not an agent: the tool loop asks it as it asks any model, so a demonstration has the prompts, the replies and
the results that an episode has.
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
    """The reference solution as calls of the task's tools, one after another, and a ``submit`` at the end.

    A shell script is cut into its lines where none of them needs another one. Raises
    :class:`~clawgym.errors.AgentError` if the task has no solution."""
    name = solution_name(task)
    entry = next((f for f in task.solution if f.path == name), None)
    if entry is None:
        raise AgentError(f"task {task.id} has no reference solution: add solution/{name}, or leave it out")
    if task.brings_tools:
        calls = list(read_calls(entry.read(), f"task {task.id}: {name}"))
    else:
        lines = [line for line in entry.read().decode().splitlines() if line.strip() and not line.startswith("#!")]
        whole = any(
            "<<" in line or line[0].isspace() or line.rstrip().endswith(("\\", "do", "then", "{")) for line in lines
        )
        calls = [bash_call(text) for text in (["\n".join(lines)] if whole else lines)]
    return _submitted(calls)


def _submitted(calls: Sequence[ToolCall]) -> list[ToolCall]:
    if calls and closing(calls[-1]) is not None:
        return list(calls)
    return [*calls, ToolCall("call_end", "submit", {"message": ""})]


class DemonstrationEngine:
    """A :class:`~clawgym.engines.protocol.TextEngine` that answers each task, known by its instruction, with its
    reference solution, or with other ``calls``, one a reply; ``protocol`` is the tool loop's."""

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
        asked = next((m["content"] for m in messages if m["role"] == "user"), None)
        text = asked if isinstance(asked, str) else "".join(p.get("text", "") for p in asked or ())
        number = sum(m["role"] == "assistant" for m in messages)
        calls = self._calls.get(text)
        if calls is None or number >= len(calls):
            raise EngineError("no demonstration goes on from here: give tasks whose solution is known", status=400)
        call = calls[number]
        if self._protocol == "text":
            said = f"```bash\n{call.arguments['command']}\n```" if call.name == "bash" else "<submit/>"
            yield Delta(text=said)
            yield Delta(finish_reason="stop", usage=Usage())
            return
        yield Delta(calls=(CallDelta(0, f"call_{number}", call.name, json.dumps(dict(call.arguments))),))
        yield Delta(finish_reason="tool_calls", usage=Usage())

    def identity(self) -> dict[str, Any]:
        """Its name."""
        return {"name": self.name}

    async def aclose(self) -> None: ...
