"""Engine ``replay``: answers from recorded completions, for tests and demos without a model.

Invariant: the answer depends on the conversation alone (the n-th answer of a conversation is its n-th
recorded completion), so any number of episodes may share one engine, in any order, and be resumed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clawgym.engines.protocol import Completion, Sampling
from clawgym.errors import EngineError
from clawgym.records import ToolCall, Usage

__all__ = ["Recorded", "ReplayEngine", "completion_from_json", "completion_to_json"]


@dataclass(frozen=True, slots=True)
class Recorded:
    """A completion, and the conversations it belongs to."""

    completion: Completion
    match: str = ""
    """Text that the first user message must contain; empty for every conversation."""


class ReplayEngine:
    """Answers each conversation from ``recorded``, in order."""

    name = "replay"

    def __init__(self, recorded: Iterable[Recorded | Completion]) -> None:
        self._recorded = tuple(r if isinstance(r, Recorded) else Recorded(r) for r in recorded)
        rows = [(r.match, completion_to_json(r.completion)) for r in self._recorded]
        self._digest = hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()

    @classmethod
    def from_file(cls, path: str | Path) -> ReplayEngine:
        """Read JSON lines, one completion each: ``{"text": ..., "tool_calls": [{"id", "name", "arguments"}]}``,
        with an optional ``match``."""
        recorded: list[Recorded] = []
        try:
            lines = Path(path).read_text("utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise EngineError(f"{path}: recorded completions cannot be read ({error}): check the path") from error
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                data = json.loads(line)
                recorded.append(Recorded(completion_from_json(data), str(data.get("match", ""))))
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise EngineError(
                    f"{path}:{number}: not a recorded completion ({error!r}): correct the line"
                ) from error
        return cls(recorded)

    async def complete(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] = (), sampling: Sampling
    ) -> Completion:
        """The next recorded answer of this conversation."""
        first = next((str(m.get("content")) for m in messages if m.get("role") == "user"), "")
        index = sum(m.get("role") == "assistant" for m in messages)
        mine = [r.completion for r in self._recorded if r.match in first]
        if index >= len(mine):
            raise EngineError(
                f"the recording has {len(mine)} answers for this conversation and number {index + 1} was asked for: "
                "record more, or lower max_steps"
            )
        return mine[index]

    def receipt(self) -> dict[str, Any]:
        """A digest of the recording."""
        return {"name": self.name, "recording_sha256": self._digest}

    async def aclose(self) -> None: ...


def completion_to_json(completion: Completion) -> dict[str, Any]:
    """A JSON-ready dict that :func:`completion_from_json` reads back (without exact tokens)."""
    usage = completion.usage
    return {
        "text": completion.text,
        "tool_calls": [{"id": c.id, "name": c.name, "arguments": dict(c.arguments)} for c in completion.tool_calls],
        "malformed_calls": list(completion.malformed_calls),
        "reasoning": completion.reasoning,
        "finish_reason": completion.finish_reason,
        "usage": {name: getattr(usage, name) for name in usage.__slots__},
        "model": completion.model,
    }


def completion_from_json(data: Mapping[str, Any]) -> Completion:
    """The completion that ``data`` describes; everything but ``text`` or ``tool_calls`` may be left out."""
    if "text" not in data and "tool_calls" not in data:
        raise ValueError("neither text nor tool_calls")
    calls = data.get("tool_calls") or ()
    return Completion(
        text=str(data.get("text") or ""),
        tool_calls=tuple(
            ToolCall(str(c.get("id") or f"call_{i + 1}"), str(c["name"]), dict(c.get("arguments") or {}))
            for i, c in enumerate(calls)
        ),
        malformed_calls=tuple(str(m) for m in data.get("malformed_calls") or ()),
        reasoning=data.get("reasoning"),
        finish_reason=str(data.get("finish_reason") or "stop"),
        usage=Usage(**(data.get("usage") or {})),
        model=str(data.get("model") or "replay"),
    )
