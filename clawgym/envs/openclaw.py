"""``ClawGym/openclaw-v0``: an unmodified OpenClaw works on a task; the policy is its model.

The observation is the model request that OpenClaw waits on, the action the assistant message that answers it.
"""

from __future__ import annotations

from gymnasium.vector import AutoresetMode

from clawgym.agents.openclaw.config import Prompt
from clawgym.envs._kit import Reward
from clawgym.envs._openclaw import OpenClawKit
from clawgym.envs._replies import ActionFormat
from clawgym.envs._single import TaskEnv
from clawgym.envs._vector import TaskVectorEnv
from clawgym.records import TaskSet

__all__ = ["OpenClawEnv", "OpenClawVectorEnv"]


class OpenClawEnv(TaskEnv):
    """One OpenClaw environment.

    Args:
        tasks: a task set or the name of one (``clawgym tasks list``).
        backend: ``auto``, ``namespace``, ``chroot`` or ``docker``.
        reward: what the last step pays: ``official``, ``strict``, ``corrected`` (``strict`` where no floor is
            known), or ``checks``, the sum over the named checks. Other steps pay 0.
        version: of OpenClaw, as installed (``clawgym openclaw install``); default: the one that is known to work,
            or that of ``$OPENCLAW_ROOTFS``.
        prompt: ``reference``, what OpenClaw makes of its defaults, or ``slim``, a third of the tokens.
        action_format: what an action is; see below.
        max_tokens: of one answer, as OpenClaw is told. Nothing is counted here.
        context_window: tokens of prompt and answer, as OpenClaw is told; it sums up its history by it.
        spare: OpenClaws kept booted for the next episodes (default: the cores here, one for a single environment).
        render_mode: ``ansi`` or None.

    Observation: see :func:`~clawgym.envs.spaces.openclaw_observation_space`. ``json.loads`` of ``messages`` and
    ``tools`` is the request, as every engine gets it from the gateway. Sub-agents may ask while the main agent does:
    their requests are shown one after another in the order they came, ``role`` and ``request`` tell them apart.

    Action (str), with ``action_format="message"``: JSON text of an assistant message in OpenAI's form, ``{"content":
    ..., "tool_calls": [{"function": {"name": ..., "arguments": ...}}], "reasoning_content": ...}``, ``content`` or
    ``tool_calls`` at least; ``arguments`` JSON text or an object; ids are made here. Any other text is said as it
    stands, without calls, which ends OpenClaw's turn. With ``hermes`` or ``qwen3-coder``: the text as a model of that
    call style samples it, ``<tool_call>`` and ``<think>`` included, end-of-turn tokens left out. What is malformed
    stays text, as the gateway has it, and ``info["malformed_calls"]`` counts it; no action raises.

    An episode ends when OpenClaw has answered the instruction: ``terminated``, also when it died. ``truncated`` when
    the task's model calls or seconds are used up, or the host failed. The seconds are the task's own
    (``limits.agent_seconds``) and run while the policy thinks; past them the work is graded as it stands, and the next
    step says so. ``info["heard"]`` is false where OpenClaw had given up the request before it was answered. The last
    ``info`` holds ``outcome``, ``cause``, ``checks``, ``official``, ``strict``, ``tampered``.

    ``reset(seed=...)`` chooses the task reproducibly; ``reset(options={"task_ids": ["..."]})`` names it. Raises
    :class:`~clawgym.errors.AgentError` if OpenClaw is not installed.
    """

    def __init__(
        self,
        tasks: str | TaskSet = "terminal-basic",
        *,
        backend: str = "auto",
        reward: Reward = "official",
        version: str | None = None,
        prompt: Prompt = "reference",
        action_format: ActionFormat = "message",
        max_tokens: int = 8192,
        context_window: int = 128_000,
        spare: int | None = None,
        render_mode: str | None = None,
    ) -> None:
        kit = OpenClawKit(
            version=version,
            prompt=prompt,
            action_format=action_format,
            reward=reward,
            max_tokens=max_tokens,
            context_window=context_window,
            spare=spare,
            num_envs=1,
        )
        super().__init__(kit, tasks, backend=backend, render_mode=render_mode)


class OpenClawVectorEnv(TaskVectorEnv):
    """See :class:`OpenClawEnv` for the arguments, actions and observations of one environment, and
    :class:`~clawgym.envs._vector.TaskVectorEnv` for ``num_envs``, ``autoreset_mode``, and what batches are.

    ``messages``, ``tools`` and ``role`` are tuples of N str; the others int64 arrays of shape (N,).
    """

    def __init__(
        self,
        num_envs: int,
        tasks: str | TaskSet = "terminal-basic",
        *,
        backend: str = "auto",
        reward: Reward = "official",
        version: str | None = None,
        prompt: Prompt = "reference",
        action_format: ActionFormat = "message",
        max_tokens: int = 8192,
        context_window: int = 128_000,
        spare: int | None = None,
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
        render_mode: str | None = None,
    ) -> None:
        kit = OpenClawKit(
            version=version,
            prompt=prompt,
            action_format=action_format,
            reward=reward,
            max_tokens=max_tokens,
            context_window=context_window,
            spare=spare,
            num_envs=num_envs,
        )
        super().__init__(kit, num_envs, tasks, backend=backend, autoreset_mode=autoreset_mode, render_mode=render_mode)
