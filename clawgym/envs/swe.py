"""``ClawGym/swe-v0``: a repository, an issue, a shell and an editor; what is graded is the diff."""

from __future__ import annotations

from gymnasium.vector import AutoresetMode

from clawgym.envs._kit import Reward
from clawgym.envs._replies import ActionFormat
from clawgym.envs._single import TaskEnv
from clawgym.envs._tools import ToolsKit
from clawgym.envs._vector import TaskVectorEnv
from clawgym.records import TaskSet

__all__ = ["SweEnv", "SweVectorEnv"]


class SweEnv(TaskEnv):
    """One repository environment.

    Args:
        tasks: a task set or the name of one (``clawgym tasks list``).
        backend: ``auto``, ``namespace``, ``chroot``, ``docker`` or ``ray``.
        reward: what the last step pays: ``official``, ``strict``, ``corrected`` (``strict`` where no floor is
            known), or ``checks``, the sum over the tests. Other steps pay 0.
        action_format: what an action is; see below.
        render_mode: ``ansi`` or None.

    Actions (str), with ``action_format="message"``: a bash command; ``"submit"``; or JSON text of an assistant message
    in OpenAI's form with ``tool_calls`` of ``bash``, ``read_file``, ``write_file``, ``edit_file`` and ``submit``
    (``info["tools"]`` of ``reset`` has their schemas), which are carried out one after another. With ``hermes`` or
    ``qwen3-coder``: the text as a model of that call style samples it. No action raises: what cannot be carried out is
    an observation, and ``info["malformed_calls"]`` counts it.

    Observation: see :func:`~clawgym.envs.spaces.tools_observation_space`. ``terminated`` on ``submit`` (or a broken
    box), ``truncated`` when the budget of steps or seconds is used up, or the host failed. The last ``info`` holds
    ``outcome``, ``cause``, ``checks`` (one a test), ``official``, ``strict``, ``tampered`` and ``diff``, which is
    what was graded.

    ``reset(seed=...)`` chooses the task reproducibly; ``reset(options={"task_ids": ["..."]})`` names it.
    """

    def __init__(
        self,
        tasks: str | TaskSet = "swe-basic",
        *,
        backend: str = "auto",
        reward: Reward = "official",
        action_format: ActionFormat = "message",
        render_mode: str | None = None,
    ) -> None:
        kit = ToolsKit(action_format, reward, commands=True)
        super().__init__(kit, tasks, backend=backend, render_mode=render_mode)


class SweVectorEnv(TaskVectorEnv):
    """See :class:`SweEnv` for the arguments, actions and observations of one environment, and
    :class:`~clawgym.envs._vector.TaskVectorEnv` for ``num_envs``, ``autoreset_mode``, and what batches are.

    ``messages`` is a tuple of N str; ``step`` and ``remaining_steps`` are int64 arrays of shape (N,).
    """

    def __init__(
        self,
        num_envs: int,
        tasks: str | TaskSet = "swe-basic",
        *,
        backend: str = "auto",
        reward: Reward = "official",
        action_format: ActionFormat = "message",
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
        render_mode: str | None = None,
    ) -> None:
        kit = ToolsKit(action_format, reward, commands=True)
        super().__init__(kit, num_envs, tasks, backend=backend, autoreset_mode=autoreset_mode, render_mode=render_mode)
