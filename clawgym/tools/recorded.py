"""Functions whose calls are recorded and not run (:class:`RecordedTools`): the transcript is what is graded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from clawgym.records import Observation, ToolCall
from clawgym.tools.protocol import ignore

__all__ = ["RecordedTools"]


class RecordedTools:
    """The functions of a dialogue; see :class:`~clawgym.tools.protocol.Tools`. Every call is accepted as it is."""

    def __init__(self, schemas: Sequence[Mapping[str, Any]]) -> None:
        self.schemas = tuple(schemas)

    async def call_all(
        self,
        calls: Sequence[ToolCall],
        *,
        timeout: float | None = None,
        on_observation: Callable[[Observation], None] = ignore,
    ) -> list[Observation]:
        """See :class:`~clawgym.tools.protocol.Tools`."""
        observations = [Observation("recorded", call.id) for call in calls]
        for observation in observations:
            on_observation(observation)
        return observations

    async def aclose(self) -> None: ...
