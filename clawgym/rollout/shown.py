"""What somebody who watches is shown of an attempt (:mod:`clawgym.live`).

Invariant: watching changes nothing: the picture is the one that the agent saw last.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from clawgym.records.atif import json_safe

if TYPE_CHECKING:
    import numpy as np

    from clawgym.rollout.attempt import Attempt

__all__ = ["Shown"]

_ACTION, _TEXT = 200, 2_000
"""Characters."""


class Shown:
    """See :class:`clawgym.live.Watched`."""

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt

    def about(self) -> dict[str, Any]:
        """See :class:`clawgym.live.Watched`."""
        attempt, screen = self._attempt, self._screen()
        done = [step for step in list(attempt.steps) if step.source == "agent"]
        calls = done[-1].tool_calls if done else ()
        text = done[-1].observations[-1].content if done and done[-1].observations else ""
        return json_safe(
            {
                "task": attempt.task.id,
                "agent": attempt.agent,
                "step": len(done),
                "action": json.dumps(json_safe(calls[-1].arguments))[:_ACTION] if calls else "",
                "text": (text or attempt.task.instruction)[-_TEXT:],
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

        tools = self._attempt.tools
        return tools.desktop.screen.shown if isinstance(tools, ComputerTools) else None
