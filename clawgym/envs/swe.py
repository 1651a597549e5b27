"""``ClawGym/swe-v0``: a repository, an issue, a shell and an editor; what is graded is the diff."""

from __future__ import annotations

from clawgym.envs._replies import ActionFormat
from clawgym.envs._tools import ToolsKit
from clawgym.envs.kit import Reward

__all__ = ["SweKit"]


class SweKit(ToolsKit):
    """One repository environment.

    Args:
        reward: what the last step pays; ``checks`` is the sum over the tests.
        action_format: what an action is; see below.

    Actions (str), with ``action_format="message"``: a bash command; ``"submit"``; or JSON text of an assistant message
    in OpenAI's form with ``tool_calls`` of ``bash``, ``read_file``, ``write_file``, ``edit_file`` and ``submit``
    (``info["tools"]`` of ``reset`` has their schemas), which are carried out one after another. With ``hermes`` or
    ``qwen3-coder``: the text as a model of that call style samples it. No action raises: what cannot be carried out is
    an observation, and ``info["malformed_calls"]`` counts it.

    Observation: see :func:`~clawgym.envs.spaces.tools_observation_space`. ``terminated`` on ``submit`` (or a broken
    box), ``truncated`` when the budget of steps or seconds is used up, or the host failed. The last ``info`` holds
    ``outcome``, ``cause``, ``checks`` (one a test), ``official``, ``strict``, ``tampered`` and ``diff``, which is
    what was graded.
    """

    def __init__(self, *, reward: Reward = "official", action_format: ActionFormat = "message") -> None:
        super().__init__(action_format, reward, commands=True)
