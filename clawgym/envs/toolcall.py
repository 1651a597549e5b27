"""``ClawGym/toolcall-v0``: the tools of a task, and no shell; the action is an assistant message that calls them."""

from __future__ import annotations

from gymnasium.vector import AutoresetMode

from clawgym.envs._kit import Reward
from clawgym.envs._replies import ActionFormat
from clawgym.envs._single import TaskEnv
from clawgym.envs._tools import ToolsKit
from clawgym.envs._vector import TaskVectorEnv
from clawgym.records import TaskSet

__all__ = ["ToolCallEnv", "ToolCallVectorEnv"]


class ToolCallEnv(TaskEnv):
    """One environment of tool calls.

    Args:
        tasks: a task set or the name of one (``clawgym tasks list``).
        backend: ``auto``, ``namespace``, ``chroot``, ``docker`` or ``ray``.
        reward: what the last step pays: ``official``, ``strict``, ``corrected`` (``strict`` where no floor is
            known), or ``checks``, the sum over the named checks. Other steps pay 0.
        action_format: what an action is; see below.
        render_mode: ``ansi`` or None.

    Actions (str), with ``action_format="message"``: JSON text of an assistant message in OpenAI's form,
    ``{"content": ..., "tool_calls": [{"function": {"name": ..., "arguments": ...}}]}``; ``arguments`` JSON text or an
    object; ids are made here. Any other text is a message without calls, which is answered by saying so. With
    ``hermes`` or ``qwen3-coder``: the text as a model of that call style samples it. ``info["tools"]`` of ``reset`` has
    the schemas; ``submit`` ends the episode, and its ``message`` is the answer. Calls of one message are answered in
    their order; calls to one server are carried out one after another, different servers work at once. No action
    raises: unknown tools, arguments that do not fit, and errors of tools are observations, and
    ``info["malformed_calls"]`` counts the first two.

    Observation: see :func:`~clawgym.envs.spaces.tools_observation_space`. ``terminated`` on ``submit`` (or a broken
    box), ``truncated`` when the budget of steps or seconds is used up, or the host failed. The last ``info`` holds
    ``outcome``, ``cause``, ``checks``, ``official``, ``strict``, ``tampered``.

    ``reset(seed=...)`` chooses the task reproducibly; ``reset(options={"task_ids": ["..."]})`` names it. Needs the
    extra ``tools``.
    """

    def __init__(
        self,
        tasks: str | TaskSet = "toolcall-basic",
        *,
        backend: str = "auto",
        reward: Reward = "official",
        action_format: ActionFormat = "message",
        render_mode: str | None = None,
    ) -> None:
        kit = ToolsKit(action_format, reward, commands=False)
        super().__init__(kit, tasks, backend=backend, render_mode=render_mode)


class ToolCallVectorEnv(TaskVectorEnv):
    """See :class:`ToolCallEnv` for the arguments, actions and observations of one environment, and
    :class:`~clawgym.envs._vector.TaskVectorEnv` for ``num_envs``, ``autoreset_mode``, and what batches are.

    ``messages`` is a tuple of N str; ``step`` and ``remaining_steps`` are int64 arrays of shape (N,).
    """

    def __init__(
        self,
        num_envs: int,
        tasks: str | TaskSet = "toolcall-basic",
        *,
        backend: str = "auto",
        reward: Reward = "official",
        action_format: ActionFormat = "message",
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
        render_mode: str | None = None,
    ) -> None:
        kit = ToolsKit(action_format, reward, commands=False)
        super().__init__(kit, num_envs, tasks, backend=backend, autoreset_mode=autoreset_mode, render_mode=render_mode)
