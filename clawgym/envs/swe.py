"""``ClawGym/swe-v0``: a repository with an issue, a shell and an editor. The diff is graded."""

from __future__ import annotations

from clawgym.envs._tools import ToolsEnv
from clawgym.registry import envs

__all__ = ["SweEnv"]


@envs.register("ClawGym/swe-v0")
class SweEnv(ToolsEnv):
    """An environment for issues of code repositories.

    Args:
        action_format: the format of actions: ``message``, or the name of a parser; see below.

    Actions (str), with ``action_format="message"``: a bash command, ``"submit"``, or the JSON text of an assistant
    message in OpenAI's form with ``tool_calls`` of ``bash``, ``read_file``, ``write_file``, ``edit_file`` and
    ``submit`` (their schemas are in ``info["tools"]`` of ``reset``). Calls are made one after another. With the name of
    a parser (``clawgym list parsers``): text with tool calls as such a model samples it. No text raises: an error is
    an observation, and ``info["malformed_calls"]`` counts it.

    Observation: see :func:`~clawgym.envs.spaces.tools_observation_space`.

    End: ``terminated`` after ``submit``, or if the sandbox breaks; ``truncated`` when the budget of steps or seconds is
    used up, or after an infrastructure error. The last ``info`` has ``outcome``, ``cause``, ``checks`` (one per test;
    with ``reward="checks"`` the reward is their sum), ``official``, ``strict``, ``tampered`` and the graded ``diff``.
    """

    default_tasks = "swe-basic:train"
    commands = True
