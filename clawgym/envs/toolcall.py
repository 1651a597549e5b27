"""``ClawGym/toolcall-v0``: the tools of a task, without a shell. Actions are assistant messages with tool calls."""

from __future__ import annotations

from clawgym.envs._tools import ToolsEnv
from clawgym.registry import envs

__all__ = ["ToolCallEnv"]


@envs.register("ClawGym/toolcall-v0")
class ToolCallEnv(ToolsEnv):
    """An environment of tool calls.

    Args:
        action_format: the format of actions: ``message``, or the name of a parser; see below.

    Actions (str), with ``action_format="message"``: the JSON text of an assistant message in OpenAI's form,
    ``{"content": ..., "tool_calls": [{"function": {"name": ..., "arguments": ...}}]}``. ``arguments``: JSON text or an
    object; ids are assigned by the environment. Any other text is a message without calls, and the observation says so.
    With the name of a parser (``clawgym list parsers``): text with tool calls as such a model samples it.

    The schemas of the tools are in ``info["tools"]`` of ``reset``. ``submit`` ends the episode; its ``message`` is the
    answer. Results are in the order of the calls. Calls to one server are made one after another, calls to different
    servers at the same time. No text raises: unknown tools, invalid arguments and errors of tools are observations, and
    ``info["malformed_calls"]`` counts the first two.

    Observation: see :func:`~clawgym.envs.spaces.tools_observation_space`.

    End: ``terminated`` after ``submit``, or if the sandbox breaks; ``truncated`` when the budget of steps or seconds is
    used up, or after an infrastructure error. The last ``info`` has ``outcome``, ``cause``, ``checks``, ``official``,
    ``strict`` and ``tampered``.

    Needs the extra ``tools``.
    """

    default_tasks = "toolcall-basic:train"
    commands = False
