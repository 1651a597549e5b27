"""Episodes over the tools of a task: an action is an assistant message, an observation what its calls came to."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import gymnasium as gym

from clawgym.envs._replies import ActionFormat, message_of, reply_of
from clawgym.envs.kit import Reward, StepResult
from clawgym.envs.play import Play
from clawgym.envs.spaces import AssistantText, tools_observation_space
from clawgym.records import Episode, Observation, Task, ToolCall
from clawgym.sandbox import Backend
from clawgym.tools import SUBMIT, Refused
from clawgym.verifiers.diff import DIFF_FILE

__all__ = ["ToolsKit", "ToolsWorker"]

NO_CALL = "There was no tool call. Act by calling the tools; when the task is done, call submit."
UNREADABLE = "The calls could not be read: write them as JSON, with one object of arguments for each."
_SAMPLES = {"bash": ("command",), "read_file": ("path",), "write_file": ("path", "content"), SUBMIT: ("message",)}
"""What samples of the action space call; a task may have other tools."""


class ToolsWorker:
    """One environment (:class:`~clawgym.envs.kit.EnvWorker`). With ``commands``, text that is no message is a bash
    command, and ``submit`` submits."""

    def __init__(self, backend: Backend, form: ActionFormat, reward: Reward, *, commands: bool) -> None:
        self._play = Play(backend, reward)
        self._form: ActionFormat = form
        self._commands = commands and form == "message"

    @property
    def last(self) -> Episode | None:
        """The finished episode."""
        return self._play.last

    async def reset(self, task: Task, seed: int, floor: float | None) -> tuple[dict[str, Any], dict[str, Any]]:
        """A fresh box for ``task``, and its tools. See :class:`~clawgym.envs.kit.EnvWorker`."""
        info = await self._play.begin(task, seed, floor)
        if "error" not in info:
            info["tools"] = [dict(tool) for tool in self._play.running().tools.schemas]
        return self._observe([{"role": "user", "content": task.instruction}]), info

    async def step(self, action: str) -> StepResult:
        """One message, with any number of calls."""
        action = str(action)
        attempt = self._play.running()
        if attempt.failed_infra:
            return await self._end([], {})
        self._play.count += 1
        said, malformed = self._read(action, attempt.tools.schemas)
        calls, refused = _calls_of(said)
        heard: list[Observation] = []

        async def work(left: float) -> None:
            seconds = min(left, attempt.task.limits.command_seconds)
            await attempt.tools.call_all(calls, timeout=seconds, heard=heard.append)

        over = await self._play.act(work)
        answers = {seen.call_id: seen for seen in (*heard, *refused)}
        all_calls = [call["id"] for call in said.get("tool_calls", ())]
        seen = [answers[id] for id in all_calls if id in answers]
        if not all_calls:
            seen.append(Observation(UNREADABLE if malformed else NO_CALL))
        info = {"malformed_calls": malformed + sum(isinstance(one, Refused) for one in seen)}
        text, reasoning = said.get("content") or "", said.get("reasoning_content")
        self._play.record(text, calls, seen, reasoning)
        messages = [_message(one) for one in seen]
        submits = [c for c in calls if c.name == SUBMIT and not isinstance(answers.get(c.id, Refused("")), Refused)]
        if submits:
            attempt.final_message = submits[-1].arguments.get("message") or text
        if over or submits or self._play.spent():
            return await self._end(messages, info)
        return self._observe(messages), 0.0, False, False, info

    def _read(self, action: str, tools: Any) -> tuple[Mapping[str, Any], int]:
        """The message of ``action``, and how many calls in it could not be read."""
        number = self._play.count
        if self._commands and message_of(action) is None:
            name, arguments = (SUBMIT, {}) if action.strip() == SUBMIT else ("bash", {"command": action})
            function = {"name": name, "arguments": json.dumps(arguments)}
            return {"content": "", "tool_calls": [{"id": f"call{number:06}000", "function": function}]}, 0
        return reply_of(action, self._form, tools, number)

    async def _end(self, messages: list[dict[str, Any]], info: dict[str, Any]) -> StepResult:
        paid, terminated, truncated, about = await self._play.end()
        diff = self._play.last.files.get(DIFF_FILE) if self._play.last is not None else None
        if diff is not None:
            about["diff"] = diff.decode("utf-8", "replace")
        return self._observe(messages), paid, terminated, truncated, info | about

    def _observe(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        return {"messages": json.dumps(messages, ensure_ascii=False), **self._play.counts()}

    def forget(self) -> None:
        """Let go of everything, where the loop that could close it is gone."""
        self._play.forget()

    async def close(self) -> None:
        """Drop the running attempt, if any."""
        await self._play.drop()


def _calls_of(message: Mapping[str, Any]) -> tuple[list[ToolCall], list[Refused]]:
    """The calls that can be made, and the answers to those whose arguments are no object."""
    calls: list[ToolCall] = []
    refused: list[Refused] = []
    for call in message.get("tool_calls", ()):
        function = call["function"]
        try:
            arguments = json.loads(function["arguments"] or "{}")
        except (ValueError, RecursionError):
            arguments = None
        if isinstance(arguments, dict):
            calls.append(ToolCall(call["id"], function["name"], arguments))
        else:
            refused.append(Refused(f"[error: the arguments of {function['name']} are no JSON object]", call["id"]))
    return calls, refused


def _message(seen: Observation) -> dict[str, Any]:
    if seen.call_id is None:
        return {"role": "user", "content": seen.content}
    return {"role": "tool", "tool_call_id": seen.call_id, "content": seen.content}


class ToolsKit:
    """Boxes with the tools of their task (:class:`~clawgym.envs.kit.EnvKit`)."""

    render_mode = "ansi"

    def __init__(self, action_format: ActionFormat, reward: Reward, *, commands: bool) -> None:
        if action_format not in ("message", "hermes", "qwen3-coder"):
            raise ValueError(f"action_format={action_format!r}: use 'message', 'hermes' or 'qwen3-coder'")
        self.action_space: gym.spaces.Text = AssistantText(action_format, tools=_SAMPLES)
        self.observation_space = tools_observation_space()
        self._form: ActionFormat = action_format
        self._reward: Reward = reward
        self._commands = commands

    async def open(self, backend: Backend, num_envs: int) -> None:
        self._backend = backend

    def worker(self) -> ToolsWorker:
        return ToolsWorker(self._backend, self._form, self._reward, commands=self._commands)

    def screen(self, observation: dict[str, Any]) -> str:
        return "\n".join(message["content"] for message in json.loads(observation["messages"]))

    async def aclose(self) -> None:
        pass
