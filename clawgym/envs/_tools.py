"""Base of the environments over tools: an action is an assistant message, the observation the results of its calls."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar

from clawgym.envs._replies import message_of, parser_of, reply_of
from clawgym.envs.env import SandboxEnv
from clawgym.envs.spaces import AssistantText, tools_observation_space
from clawgym.records import Observation, ToolCall
from clawgym.sandbox import Sandbox
from clawgym.sandbox.shell_state import ShellState
from clawgym.tools import SUBMIT, CallRefused, ShellTools

__all__ = ["ToolsEnv"]

NO_CALL = "There was no tool call. Act by calling the tools; when the task is done, call submit."
UNREADABLE = "The calls could not be read: write them as JSON, with one object of arguments for each."
_SAMPLES = {"bash": ("command",), "read_file": ("path",), "write_file": ("path", "content"), SUBMIT: ("message",)}
"""Tools that samples of the action space call; a task may have others."""


class ToolsEnv(SandboxEnv):
    """An environment in which actions call the tools of the task."""

    commands: ClassVar[bool]
    """Whether an action that is not a message is a bash command, or the word ``submit``."""

    def __init__(self, *, action_format: str = "message") -> None:
        self._parser = parser_of(action_format)
        self.action_space = AssistantText(action_format, tools=_SAMPLES)
        self.observation_space = tools_observation_space()

    async def open(self, sandbox: Sandbox) -> dict[str, Any]:
        self.info["tools"] = [dict(tool) for tool in self.tools.schemas]
        return _see([{"role": "user", "content": self.task.instruction}])

    async def act(self, sandbox: Sandbox, action: str) -> dict[str, Any]:
        """Make the calls of one message and return their results."""
        message, malformed = self._read(action)
        text = message.get("content") or ""
        calls, refused = _calls_of(message)
        ids = [call["id"] for call in message.get("tool_calls", ())]
        made: list[Observation] = []
        results: list[Observation] = []
        try:
            await self.tools.call_all(calls, timeout=self.seconds, on_observation=made.append)
        finally:
            by_id = {one.call_id: one for one in (*made, *refused)}
            results += [by_id[id] for id in ids if id in by_id]
            if not ids:
                results.append(Observation(UNREADABLE if malformed else NO_CALL))
            self.info["malformed_calls"] = malformed + sum(isinstance(one, CallRefused) for one in results)
            self.record(text, calls, results, message.get("reasoning_content"))
        submits = [
            c for c in calls if c.name == SUBMIT and not isinstance(by_id.get(c.id, CallRefused("")), CallRefused)
        ]
        if submits:
            self.submit(submits[-1].arguments.get("message") or text)
        return _see([_message(one) for one in results])

    @property
    def forks(self) -> bool:
        return isinstance(self.tools, ShellTools)  # the memory of tool servers is lost in a fork

    async def save(self, sandbox: Sandbox) -> ShellState | None:
        assert isinstance(self.tools, ShellTools)
        return await self.tools.save()

    async def load(self, sandbox: Sandbox, state: ShellState | None) -> None:
        assert isinstance(self.tools, ShellTools)
        await self.tools.load(state)

    def render(self, observation: Any) -> str:
        return "\n".join(message["content"] for message in json.loads(observation["messages"]))

    def _read(self, action: str) -> tuple[Mapping[str, Any], int]:
        """Return the message of ``action``, and the number of its malformed calls."""
        if self.commands and self._parser is None and message_of(action) is None:
            name, arguments = (SUBMIT, {}) if action.strip() == SUBMIT else ("bash", {"command": action})
            function = {"name": name, "arguments": json.dumps(arguments)}
            return {"content": "", "tool_calls": [{"id": f"call{self.steps:06}000", "function": function}]}, 0
        return reply_of(action, self._parser, self.tools.schemas, self.steps)


def _see(messages: list[dict[str, Any]]) -> dict[str, Any]:
    return {"messages": json.dumps(messages, ensure_ascii=False)}


def _calls_of(message: Mapping[str, Any]) -> tuple[list[ToolCall], list[CallRefused]]:
    """Return the calls that can be made, and error results for those whose arguments are not a JSON object."""
    calls: list[ToolCall] = []
    refused: list[CallRefused] = []
    for call in message.get("tool_calls", ()):
        function = call["function"]
        try:
            arguments = json.loads(function["arguments"] or "{}")
        except (ValueError, RecursionError):
            arguments = None
        if isinstance(arguments, dict):
            calls.append(ToolCall(call["id"], function["name"], arguments))
        else:
            refused.append(CallRefused(f"[error: the arguments of {function['name']} are no JSON object]", call["id"]))
    return calls, refused


def _message(seen: Observation) -> dict[str, Any]:
    if seen.call_id is None:
        return {"role": "user", "content": seen.content}
    return {"role": "tool", "tool_call_id": seen.call_id, "content": seen.content}
