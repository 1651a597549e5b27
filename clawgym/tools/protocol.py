"""The tools protocol: calls in, observations out.

Invariant: whatever a call says, and whatever a tool answers or fails to, the result is text for the model. Only the
death of a sandbox (:class:`~clawgym.errors.SandboxDied`) and failures of the host (:class:`~clawgym.errors.InfraError`)
get out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from clawgym.desktop import COMPUTER_USE
from clawgym.records import Observation, ToolCall

__all__ = ["SUBMIT", "SUBMIT_TOOL", "Refused", "Tools", "clipped", "closing", "function", "ignore"]

SUBMIT = "submit"
"""The tool that says that the work is done; carrying it out does nothing. A desktop has actions for it instead."""


class Refused(Observation):
    """The answer to a call that was not carried out: there is no such tool, or its arguments do not fit."""


def closing(call: ToolCall) -> str | None:
    """The closing message of a call that closes the work, if only by being made; ``None`` for any other call."""
    if call.name == SUBMIT:
        return str(call.arguments.get("message") or "")
    if call.name == COMPUTER_USE and call.arguments.get("action") in ("done", "fail"):
        return str(call.arguments.get("text") or "")
    return None


def ignore(observation: Observation) -> None:
    """For who does not listen."""


class Tools(Protocol):
    """What one episode's agent acts with."""

    @property
    def schemas(self) -> Sequence[Mapping[str, Any]]:
        """OpenAI function tools; the parameters are JSON Schema. They do not change in an episode."""
        ...

    async def call_all(
        self,
        calls: Sequence[ToolCall],
        *,
        timeout: float | None = None,
        heard: Callable[[Observation], None] = ignore,
    ) -> list[Observation]:
        """Carry out ``calls``: one observation for each, in their order, under their ids.

        Calls to one server (or to the shell) are carried out one after another; different servers work at once.
        ``timeout`` is for each call, in seconds (default: the task's ``command_seconds``). ``heard`` gets every
        observation as it is there, so that what was done before an interruption is known. Raises
        :class:`~clawgym.errors.SandboxDied` and :class:`~clawgym.errors.InfraError`.
        """
        ...

    async def aclose(self) -> None:
        """End what was started for these tools, but the episode's own sandbox. Idempotent."""
        ...


def function(
    name: str, description: str, properties: Mapping[str, Mapping[str, Any]], required: Sequence[str] = ()
) -> dict[str, Any]:
    """An OpenAI function tool that takes ``properties`` and nothing else."""
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
    """``data`` as text, of which at most ``limit`` bytes are kept: both ends."""
    keep = limit // 2
    if len(data) <= 2 * keep:
        return data.decode("utf-8", "backslashreplace")
    head, tail = (part.decode("utf-8", "backslashreplace") for part in (data[:keep], data[-keep:]))
    return f"{head}\n[{len(data) - 2 * keep} bytes left out{hint}]\n{tail}"
