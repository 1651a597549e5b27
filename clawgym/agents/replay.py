"""Agent ``replay``: repeats recorded tool calls, without a model.

Invariant: the final message names every recorded call that the task has no tool for.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from clawgym.agents._calls import VERSION, run_calls
from clawgym.agents.protocol import AgentContext, AgentReport
from clawgym.errors import AgentError, ClawGymError
from clawgym.records import Step, ToolCall, executed_step
from clawgym.records.atif import steps_from_atif
from clawgym.records.run_folder import TRANSCRIPT, RunFolder
from clawgym.tools.shell import bash_call

__all__ = ["ReplayAgent"]


class ReplayAgent:
    """Repeats recorded tool calls.

    Args:
        recorded: the attempts of each task by task id; an attempt is a sequence of calls. Sample ``n`` repeats attempt
            ``n``, or the first attempt if there are not so many.
    """

    name = "replay"
    version = VERSION

    def __init__(self, recorded: Mapping[str, Sequence[Sequence[ToolCall]]]) -> None:
        self._recorded = {task: [tuple(calls) for calls in attempts] for task, attempts in recorded.items()}
        plain = {t: [[(c.name, dict(c.arguments)) for c in a] for a in runs] for t, runs in self._recorded.items()}
        self._digest = hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()

    @classmethod
    def from_path(cls, path: str | Path) -> ReplayAgent:
        """Read the transcripts of a run folder, or a file of JSON lines ``{"task_id": ..., "commands": [...]}``.

        Raises:
            AgentError: the path cannot be read, or a line or transcript is malformed.
        """
        path = Path(path)
        return cls(_from_run(path) if path.is_dir() else _from_lines(path))

    async def run(self, context: AgentContext) -> AgentReport:
        """Make the recorded calls, in order.

        Raises:
            AgentError: no attempt at this task was recorded.
        """
        attempts = self._recorded.get(context.task.id)
        if not attempts:
            raise AgentError(f"nothing is recorded for task {context.task.id}: record it first, or leave it out")
        calls = attempts[context.sample] if context.sample < len(attempts) else attempts[0]
        available = {tool["function"]["name"] for tool in context.tools.schemas}
        report = await run_calls(context, [c for c in calls if c.name in available])
        if skipped := sorted({c.name for c in calls} - available):
            message = f"{report.final_message}\nNot replayed: calls of {', '.join(skipped)}."
            return replace(report, final_message=message.strip())
        return report

    def identity(self) -> dict[str, Any]:
        """Return name, version and the SHA-256 of the recording."""
        return {"name": self.name, "version": self.version, "recording_sha256": self._digest}

    async def aclose(self) -> None: ...


def _calls(steps: Iterable[Step]) -> list[ToolCall]:
    return [call for step in steps for call in executed_step(step).tool_calls]


def _from_run(path: Path) -> dict[str, list[list[ToolCall]]]:
    run = RunFolder.read(path)
    rows = sorted(run.latest.values(), key=lambda row: (row["task_id"], row["sample"]))
    recorded: dict[str, list[list[ToolCall]]] = {}
    for row in rows:
        try:
            calls = _calls(steps_from_atif(json.loads(run.read_of(row, TRANSCRIPT))))
        except (OSError, ValueError, ClawGymError) as error:
            transcript = run.path / run.place_of(row) / TRANSCRIPT
            raise AgentError(f"{transcript}: no transcript to replay ({error}): run the episode again") from error
        recorded.setdefault(row["task_id"], []).append(calls)
    return recorded


def _from_lines(path: Path) -> dict[str, list[list[ToolCall]]]:
    try:
        lines = path.read_text("utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise AgentError(f"{path}: recorded commands cannot be read ({error}): give a file or run folder") from error
    recorded: dict[str, list[list[ToolCall]]] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            data = json.loads(line)
            task_id, commands = data["task_id"], data["commands"]
        except (ValueError, TypeError, KeyError) as error:
            raise AgentError(f"{path}:{number}: no task_id and commands ({error!r}): correct the line") from error
        if (
            not isinstance(task_id, str)
            or not isinstance(commands, list)
            or not all(isinstance(c, str) for c in commands)
        ):
            raise AgentError(f"{path}:{number}: task_id must be text and commands a list of texts: correct the line")
        calls = [bash_call(command, n) for n, command in enumerate(commands, start=1)]
        recorded.setdefault(task_id, []).append(calls)
    return recorded
