"""``ClawGym/toolcall-v0``: the tools of a task, and no shell; the action is an assistant message that calls them."""

from __future__ import annotations

from clawgym.envs._tools import ToolsEnv
from clawgym.registry import envs

__all__ = ["ToolCallEnv"]


@envs.register("ClawGym/toolcall-v0")
class ToolCallEnv(ToolsEnv):
    """One environment of tool calls.

    Args:
        action_format: what an action is; see below.

    Actions (str), with ``action_format="message"``: JSON text of an assistant message in OpenAI's form, ``{"content":
    ..., "tool_calls": [{"function": {"name": ..., "arguments": ...}}]}``; ``arguments`` JSON text or an object; ids are
    made here. Any other text is a message without calls, which is answered by saying so. With the name of a parser
    (``clawgym list parsers``): the text as a model that writes such calls samples it. ``info["tools"]`` of ``reset``
    has the schemas; ``submit`` ends the episode, and its ``message`` is the answer. Calls of one message are answered
    in their order; calls to one server are carried out one after another, different servers work at once. No text
    raises: unknown tools, arguments that do not fit, and errors of tools are observations, and
    ``info["malformed_calls"]`` counts the first two.

    Observation: see :func:`~clawgym.envs.spaces.tools_observation_space`. ``terminated`` on ``submit`` (or a broken
    sandbox), ``truncated`` when the budget of steps or seconds is used up, or the host failed. The last ``info`` holds
    ``outcome``, ``cause``, ``checks``, ``official``, ``strict``, ``tampered``.

    Needs the extra ``tools``.
    """

    default_tasks = "toolcall-basic:train"
    commands = False
