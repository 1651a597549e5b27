"""The protocols between the tool loop and a model: OpenAI tool calls, or plain text.

Invariant: every call that is parsed from a reply gets a result with the same id in the messages that are written
back, and no id occurs twice in an episode.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from clawgym.agents.text_protocol import HOW_TO, Command, Submit, parse_reply
from clawgym.engines.protocol import Completion
from clawgym.records import Image, Observation, ToolCall
from clawgym.tools.shell import bash_call

__all__ = ["LoopProtocol", "Reply", "TextProtocol", "ToolCallProtocol"]

Message = dict[str, Any]

_EMPTY = "(empty reply)"
"""Replaces an empty reply in the history: some endpoints refuse a message without content."""
_IMAGE_ONLY = "(done: the picture shows it)"


@dataclass(frozen=True, slots=True)
class Reply:
    """A parsed completion."""

    calls: tuple[ToolCall, ...] = ()
    complaint: str | None = None
    """An error message for the model: what was wrong with the completion, and how to reply."""
    prose: bool = False
    """Whether the completion was plain text, without an attempt at a call."""


class LoopProtocol(Protocol):
    """How the tool loop reads completions and writes results."""

    name: str
    how_to: str
    """The part of the system prompt that explains the protocol to the model."""
    offers_tools: bool
    """Whether the tools are given to the engine; otherwise the model can only write commands."""

    def read(self, completion: Completion, number: int) -> Reply:
        """Parse the ``number``-th completion of the episode (from 1)."""
        ...

    def write(self, completion: Completion, reply: Reply, observations: Sequence[Observation]) -> list[Message]:
        """Return the messages to append to the history: the completion, then the results of its calls."""
        ...


class ToolCallProtocol:
    """OpenAI tool calls."""

    name = "tools"
    offers_tools = True
    how_to = "Act by calling the tools. When the task is done, call submit."

    def read(self, completion: Completion, number: int) -> Reply:
        calls = tuple(replace(c, id=f"call_{number}_{n}") for n, c in enumerate(completion.tool_calls, start=1))
        cut = " (your reply was cut off at the token limit: write less at once)" * (
            completion.finish_reason == "length"
        )
        if completion.malformed_calls:
            shown = "\n".join(text[:500] for text in completion.malformed_calls)
            return Reply(calls, f"These calls could not be read{cut}; arguments must be one JSON object:\n{shown}")
        if calls:
            return Reply(calls)
        return Reply(complaint=f"There was no tool call{cut}. {self.how_to}", prose=bool(completion.text.strip()))

    def write(self, completion: Completion, reply: Reply, observations: Sequence[Observation]) -> list[Message]:
        assistant: Message = {"role": "assistant", "content": completion.text or _EMPTY}
        if reply.calls:
            assistant["content"] = completion.text or None
            assistant["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments))},
                }
                for call in reply.calls
            ]
        elif completion.malformed_calls:
            assistant["content"] = "\n".join((completion.text, *completion.malformed_calls)).strip()
        messages = [assistant]
        for seen in observations:
            role = {"role": "user"} if seen.call_id is None else {"role": "tool", "tool_call_id": seen.call_id}
            messages.append({**role, "content": seen.content or (_IMAGE_ONLY if seen.image is not None else "")})
        # OpenAI's protocol allows images in user messages only.
        if images := [_image_part(seen.image) for seen in observations if seen.image is not None]:
            messages.append({"role": "user", "content": images})
        return messages


def _image_part(image: Image) -> dict[str, Any]:
    url = f"data:{image.media_type};base64,{base64.b64encode(image.data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


class TextProtocol:
    """One fenced bash block per reply."""

    name = "text"
    offers_tools = False
    how_to = HOW_TO

    def read(self, completion: Completion, number: int) -> Reply:
        parsed = parse_reply(completion.text)
        call_id = f"call_{number}_1"
        match parsed:
            case Command(command):
                return Reply((replace(bash_call(command), id=call_id),))
            case Submit(message):
                return Reply((ToolCall(call_id, "submit", {"message": message}),))
        cut = " (it was cut off at the token limit)" * (completion.finish_reason == "length")
        return Reply(complaint=f"Your reply was not understood{cut}: {parsed.why}.\n{HOW_TO}", prose=parsed.prose)

    def write(self, completion: Completion, reply: Reply, observations: Sequence[Observation]) -> list[Message]:
        content = "\n".join(seen.content for seen in observations)
        return [{"role": "assistant", "content": completion.text or _EMPTY}, {"role": "user", "content": content}]
