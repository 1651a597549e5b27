"""Spaces for text and messages, and the spaces of ClawGym's environments."""

from __future__ import annotations

import json
import string
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector.utils import create_shared_memory

from clawgym.errors import ClawGymError
from clawgym.registry import parsers

__all__ = [
    "AnyText",
    "AssistantText",
    "JsonList",
    "blank",
    "counter",
    "openclaw_observation_space",
    "terminal_action_space",
    "terminal_observation_space",
    "tools_observation_space",
]

_LARGEST = 2**31 - 1
_TOOLS = {
    "exec": ("command",),
    "read": ("path",),
    "write": ("path", "content"),
    "edit": ("path", "oldText", "newText"),
}
"""OpenClaw's tools and their arguments, which samples call."""


class AnyText(gym.spaces.Text):
    """Any ``str`` of at most ``max_length`` characters, including the empty one, newlines and any script.

    Gymnasium's ``Text`` refuses "", newlines and "é". Samples are short words.

    >>> AnyText(10).contains("é\\n"), AnyText(10).contains(""), AnyText(2).contains("abc")
    (True, True, False)
    """

    empty = ""
    """The empty observation."""

    def __init__(self, max_length: int, *, seed: int | np.random.Generator | None = None) -> None:
        super().__init__(max_length, min_length=0, charset=string.ascii_lowercase + " ", seed=seed)

    def contains(self, x: Any) -> bool:
        return isinstance(x, str) and len(x) <= self.max_length

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        size = int(self.np_random.integers(0, min(16, self.max_length) + 1))
        return "".join(self.np_random.choice(list(string.ascii_lowercase + " "), size=size))

    def __repr__(self) -> str:
        return f"AnyText({self.max_length})"


def blank(space: gym.Space[Any]) -> Any:
    """Return the empty member of ``space``: empty text, or numbers as near to 0 as possible."""
    if isinstance(space, AnyText):
        return space.empty
    if isinstance(space, gym.spaces.Text):
        return "" if not space.min_length else space.sample()
    if isinstance(space, gym.spaces.Discrete):
        return space.start
    zeros = np.zeros(space.shape or (), dtype=space.dtype)
    return np.asarray(np.clip(zeros, space.low, space.high)) if isinstance(space, gym.spaces.Box) else zeros


def counter(low: int = 0) -> gym.spaces.Box:
    """Return the space of int64 arrays of shape () that are at least ``low``."""
    return gym.spaces.Box(low, _LARGEST, shape=(), dtype=np.int64)


def terminal_action_space(max_length: int = 1 << 20) -> AnyText:
    """Return the action space of a terminal: a bash command, or ``submit``."""
    return AnyText(max_length)


def terminal_observation_space(max_output: int) -> gym.spaces.Dict:
    """Return the observation space of a terminal: ``output`` str, ``exit_code`` int in [0, 255], ``cwd`` str.

    Observations do not depend on time: the same seed and commands give the same observations.
    """
    return gym.spaces.Dict(
        {
            "output": AnyText(max_output),
            "exit_code": gym.spaces.Discrete(256),
            "cwd": AnyText(4096),
        }
    )


@create_shared_memory.register(AnyText)
def _no_shared_memory(space: AnyText, n: int = 1, ctx: Any = None) -> Any:
    """Called by Gymnasium's ``AsyncVectorEnv``, whose shared memory supports only a fixed set of characters."""
    raise ClawGymError(
        "vectorization_mode='async' cannot share the text of these environments between processes. They are vectorised "
        "in one process, where no environment waits for another: leave vectorization_mode out, as in "
        "gym.make_vec(id, num_envs=8). For one process per environment: vector_kwargs={'shared_memory': False}"
    )


class JsonList(AnyText):
    """JSON text of an array of objects.

    >>> JsonList(99).contains('[{"role": "user"}]'), JsonList(99).contains("[1]"), JsonList(99).contains("")
    (True, False, False)
    """

    empty = "[]"

    def contains(self, x: Any) -> bool:
        if not super().contains(x):
            return False
        try:
            items = json.loads(x)
        except (ValueError, RecursionError):
            return False
        return isinstance(items, list) and all(isinstance(item, dict) for item in items)

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        words = super().sample
        return json.dumps([{"content": words()} for _ in range(int(self.np_random.integers(3)))])

    def __repr__(self) -> str:
        return f"JsonList({self.max_length})"


def tools_observation_space() -> gym.spaces.Dict:
    """Return the observation space of environments over tools: ``messages``, a str.

    ``messages`` is JSON of chat messages (OpenAI's form) to append to the conversation. After ``reset`` it is the
    instruction, with role ``user``. After a step it has one message with role ``tool`` for each call, in the order of
    the calls, with ``tool_call_id`` and ``content``; or one with role ``user`` that explains an error. It does not
    depend on time.
    """
    return gym.spaces.Dict({"messages": JsonList(1 << 28)})


class AssistantText(AnyText):
    """The action space of replies of a model: any text.

    Samples are words, or calls of ``tools`` (name -> arguments; default: OpenClaw's) with words as arguments. ``form``
    is ``message`` (JSON of an assistant message), or the name of a parser (``clawgym list parsers``) that writes the
    calls. See :class:`~clawgym.envs.openclaw.OpenClawRunnerFactory`.
    """

    def __init__(
        self,
        form: str = "message",
        max_length: int = 1 << 22,
        *,
        tools: Mapping[str, Sequence[str]] = _TOOLS,
        seed: int | np.random.Generator | None = None,
    ) -> None:
        super().__init__(max_length, seed=seed)
        self.form = form
        self.tools = tools

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        words = super().sample
        text = words()
        if self.np_random.integers(4) == 0:
            return text
        name = str(self.np_random.choice(list(self.tools)))
        arguments = {key: words() for key in self.tools[name]}
        if self.form != "message":
            return f"{text}\n{parsers.make(self.form).write(name, arguments)}"
        function = {"name": name, "arguments": json.dumps(arguments)}
        return json.dumps({"content": text, "tool_calls": [{"type": "function", "function": function}]})

    def __repr__(self) -> str:
        return f"AssistantText({self.form!r}, {self.max_length})"


def openclaw_observation_space() -> gym.spaces.Dict:
    """Return the observation space of OpenClaw: the whole model request, about 45 KB with the reference prompt.

    Keys:
        messages: str, JSON of the chat messages (OpenAI's form) of the request; ``[]`` if no request waits.
        tools: str, JSON of the tools of the request; ``[]`` if no request waits.
        role: str, what the call is for: ``main``, ``subagent``, ``compaction``, ``unknown``, or empty.
        request: int64, index of the request in its episode, from 0; -1 if no request waits.
        max_tokens: int64, token limit of the reply.
        context_window: int64, tokens of prompt and reply together.
        step: int64, number of actions so far.
        remaining_steps: int64, model calls that the task still allows.
    """
    return gym.spaces.Dict(
        {
            "messages": JsonList(1 << 28),
            "tools": JsonList(1 << 28),
            "role": AnyText(16),
            "request": counter(-1),
            "max_tokens": counter(),
            "context_window": counter(),
            "step": counter(),
            "remaining_steps": counter(),
        }
    )
