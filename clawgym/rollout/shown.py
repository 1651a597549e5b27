"""What :mod:`clawgym.live` shows of a running attempt.

Invariant: watching does not change the attempt. The picture is the last one that the agent saw.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from clawgym.records import Step, Task
from clawgym.records.atif import json_safe
from clawgym.tools import Tools

if TYPE_CHECKING:
    import numpy as np

__all__ = ["WatchedAttempt"]

_ACTION, _TEXT = 200, 2_000
"""Most characters that are shown."""


class WatchedAttempt:
    """See :class:`clawgym.live.Watched`."""

    def __init__(self, task: Task, agent: str, steps: Sequence[Step], tools: Tools) -> None:
        self._task = task
        self._agent = agent
        self._steps = steps
        """The transcript so far; it grows while the attempt runs."""
        self._tools = tools

    def about(self) -> dict[str, Any]:
        """See :class:`clawgym.live.Watched`."""
        screen = self._screen()
        done = [step for step in list(self._steps) if step.source == "agent"]
        calls = done[-1].tool_calls if done else ()
        text = done[-1].observations[-1].content if done and done[-1].observations else ""
        return json_safe(
            {
                "task": self._task.id,
                "instruction": self._task.instruction[:_TEXT],
                "agent": self._agent,
                "step": len(done),
                "action": json.dumps(json_safe(calls[-1].arguments))[:_ACTION] if calls else "",
                "text": (text or self._task.instruction)[-_TEXT:],
                "picture": screen[0] if screen else None,
            }
        )

    def picture(self) -> bytes | None:
        """See :class:`clawgym.live.Watched`."""
        from clawgym.tools.computer import encoded

        screen = self._screen()
        return encoded(screen[1]) if screen else None

    def _screen(self) -> tuple[int, np.ndarray] | None:
        from clawgym.tools.computer import ComputerTools

        return self._tools.desktop.screen.shown if isinstance(self._tools, ComputerTools) else None
