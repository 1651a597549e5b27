"""``ClawGym/swe-v0``: a repository, an issue, a shell and an editor; what is graded is the diff."""

from __future__ import annotations

from clawgym.envs._tools import ToolsEnv
from clawgym.registry import envs

__all__ = ["SweEnv"]


@envs.register("ClawGym/swe-v0")
class SweEnv(ToolsEnv):
    """One repository environment.

    Args:
        action_format: what an action is; see below.

    Actions (str), with ``action_format="message"``: a bash command; ``"submit"``; or JSON text of an assistant message
    in OpenAI's form with ``tool_calls`` of ``bash``, ``read_file``, ``write_file``, ``edit_file`` and ``submit``
    (``info["tools"]`` of ``reset`` has their schemas), which are carried out one after another. With the name of a
    parser (``clawgym list parsers``): the text as a model that writes such calls samples it. No text raises: what
    cannot be carried out is an observation, and ``info["malformed_calls"]`` counts it.

    Observation: see :func:`~clawgym.envs.spaces.tools_observation_space`. ``terminated`` on ``submit`` (or a broken
    sandbox), ``truncated`` when the budget of steps or seconds is used up, or the host failed. The last ``info`` holds
    ``outcome``, ``cause``, ``checks`` (one a test; ``reward="checks"`` pays their sum), ``official``, ``strict``,
    ``tampered`` and ``diff``, which is what was graded.
    """

    default_tasks = "swe-basic:train"
    commands = True
