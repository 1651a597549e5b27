"""The protocol of tools: calls in, observations out.

Invariant: whatever the call and whatever the tool does, the result is text for the model. The only exceptions are
:class:`~clawgym.errors.SandboxDied` and :class:`~clawgym.errors.InfraError`.

A source of tools of your own implements :class:`Tools`::

    class ClockTools:
        schemas = (function("now", "The time in UTC.", {}), SUBMIT_TOOL)

        async def call_all(self, calls, *, timeout=None, on_observation=ignore):
            found = []
            for call in calls:
                text = datetime.now(UTC).isoformat() if call.name == "now" else "submitted"
                found.append(Observation(text, call.id))
                on_observation(found[-1])
            return found

        async def aclose(self):
            pass
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from clawgym.desktop import COMPUTER_USE
from clawgym.records import Observation, ToolCall

__all__ = ["SUBMIT", "SUBMIT_TOOL", "CallRefused", "Tools", "clipped", "closing", "function", "ignore"]

SUBMIT = "submit"
"""The tool that ends the episode; calling it has no other effect. Desktops have actions for that instead."""


class CallRefused(Observation):
    """The observation of a call that was not run: there is no such tool, or the arguments do not fit."""


def closing(call: ToolCall) -> str | None:
    """The final message of a call that ends the episode; None for other calls."""
    if call.name == SUBMIT:
        return str(call.arguments.get("message") or "")
    if call.name == COMPUTER_USE and call.arguments.get("action") in ("done", "fail"):
        return str(call.arguments.get("text") or "")
    return None


def ignore(observation: Observation) -> None:
    """Default for ``on_observation``: do nothing."""


class Tools(Protocol):
    """The tools of one episode."""

    @property
    def schemas(self) -> Sequence[Mapping[str, Any]]:
        """OpenAI function tools with JSON Schema parameters. They do not change during an episode."""
        ...

    async def call_all(
        self,
        calls: Sequence[ToolCall],
        *,
        timeout: float | None = None,
        on_observation: Callable[[Observation], None] = ignore,
    ) -> list[Observation]:
        """Run ``calls``. Calls to one server, or to the shell, run in order; different servers work concurrently.

        Args:
            calls: the calls of one model response.
            timeout: seconds for each call; by default the task's ``command_seconds``.
            on_observation: called with each observation as soon as it is known, so that a caller that is interrupted
                knows what was done.

        Returns:
            One observation for each call, in order, with the call's id.

        Raises:
            SandboxDied: a sandbox ended.
            InfraError: the host failed.
        """
        ...

    async def aclose(self) -> None:
        """Stop everything that was started for these tools, except the episode's sandbox. Idempotent."""
        ...


def function(
    name: str, description: str, properties: Mapping[str, Mapping[str, Any]], required: Sequence[str] = ()
) -> dict[str, Any]:
    """An OpenAI function tool that takes only ``properties``."""
    parameters = {
        "type": "object",
        "properties": dict(properties),
        "required": list(required),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


SUBMIT_TOOL = function(
    SUBMIT,
    "Say that the task is done. If the task asks for an answer, it is the message.",
    {"message": {"type": "string", "description": "The answer, or a short closing message."}},
)


def clipped(data: bytes, limit: int, hint: str = "") -> str:
    """``data`` as text; over ``limit`` bytes, the middle is replaced by a note."""
    keep = limit // 2
    if len(data) <= 2 * keep:
        return data.decode("utf-8", "backslashreplace")
    head, tail = (part.decode("utf-8", "backslashreplace") for part in (data[:keep], data[-keep:]))
    return f"{head}\n[{len(data) - 2 * keep} bytes left out{hint}]\n{tail}"
