"""What the author of an environment writes: spaces, and what an action does in the sandbox. The library does the rest.

>>> from clawgym.envs.spaces import AnyText
>>> class Python(SandboxEnv):
...     action_space = AnyText(100_000)
...     observation_space = gym.spaces.Dict({"output": AnyText(10_000)})
...
...     async def act(self, sandbox, action):
...         if action == "submit":
...             self.submit()
...             return {"output": ""}
...         done = await sandbox.exec(["python3", "-c", action], cwd=self.task.workspace, timeout=self.seconds)
...         return {"output": done.text[-10_000:]}

``@clawgym.registry.envs.register("Mine/python-v0")`` gives it a name (docs/registry.md has other ways);
docs/new-environment.md is a longer one, with its tasks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import gymnasium as gym

from clawgym.records import Step
from clawgym.rollout.attempt import utc_now

if TYPE_CHECKING:
    from clawgym.records import Observation as Seen
    from clawgym.records import Task, TaskSet, ToolCall
    from clawgym.rollout import Attempt
    from clawgym.sandbox import Backend, Sandbox
    from clawgym.tools import Tools

__all__ = ["Observation", "SandboxEnv"]

Observation = Mapping[str, Any]
"""A value for each key of :attr:`SandboxEnv.observation_space`."""


class SandboxEnv:
    """One environment: one episode after another, each in a sandbox of its own.

    Write :attr:`action_space`, :attr:`observation_space` and :meth:`act`; where needed also :meth:`open` and
    :meth:`render`. Keyword arguments of ``__init__`` are options of ``gym.make``. The library makes one object for each
    environment of a batch, chooses the task, opens and closes the sandbox, counts steps, keeps the limits of the task,
    grades, and gives Gymnasium's contract, single and batched.

    Errors: an exception from :meth:`open` or :meth:`act` ends this episode as ``failed`` with the cause ``env-error``
    and the traceback in ``info["error"]``; no other environment is affected. Let
    :class:`~clawgym.errors.SandboxDied` and :class:`~clawgym.errors.InfraError` pass: the library knows whose fault
    they are. What a policy can cause by an ordinary action (a syntax error, say) should be an observation instead.
    """

    action_space: gym.Space[Any]
    """Actions outside of it never reach :meth:`act`."""
    observation_space: gym.spaces.Dict
    """Of text and arrays: ``Text``, ``Box``, ``Discrete``, ``MultiBinary`` or ``MultiDiscrete``. The library adds
    ``step`` and ``remaining_steps``, int64 arrays of shape ()."""
    render_mode: ClassVar[str] = "ansi"
    """What :meth:`render` makes: ``ansi`` for text, ``rgb_array`` for an image, which then can be had as ``human``."""

    default_tasks: ClassVar[str | TaskSet | None] = None
    """The tasks that ``gym.make`` plays if it is given none: a task set or the name of one; a training split."""

    # Set by the library before open(), for each episode.
    task: Task
    seed: int
    """Of the episode, for whatever is drawn at random."""
    steps: int
    """Actions of this episode, the present one included."""
    seconds: float
    """How long the present action may take: the task's ``command_seconds``, or what is left of its time."""
    info: dict[str, Any]
    """Write here what the ``info`` of this step (in :meth:`open`: of ``reset``) should have."""
    _attempt: Attempt
    _submitted = False
    _recorded = False

    async def open(self, sandbox: Sandbox) -> Observation | None:
        """Called once the sandbox is ready, with the files of the task in ``self.task.workspace``.

        Returns:
            The first observation; None for an empty one (empty text, zeros).
        """
        return None

    async def act(self, sandbox: Sandbox, action: Any) -> Observation:
        """Carry out ``action`` and return what is to be seen of it.

        Call :meth:`submit` where the action says that the work is done.
        """
        raise NotImplementedError(f"{type(self).__name__} has no act(): write `async def act(self, sandbox, action)`")

    def render(self, observation: Observation) -> Any:
        """``observation`` for a person: text, or with ``render_mode = "rgb_array"`` an image (uint8 of shape (height,
        width, 3)). By default all text in it."""
        return "\n".join(str(value) for value in observation.values() if isinstance(value, str))

    # -- what act() may call

    def submit(self, answer: str = "") -> None:
        """End the episode with this action and have the work graded. ``answer`` goes to the verifier with it."""
        self._submitted = True
        self._attempt.final_message = answer

    def record(
        self,
        message: str,
        calls: Sequence[ToolCall] = (),
        seen: Sequence[Seen] = (),
        reasoning: str | None = None,
    ) -> None:
        """Write the present action into the transcript as a message with tool calls and their results. Without this
        call the transcript has the action and what :meth:`render` shows of the observation, as text."""
        self._recorded = True
        self._attempt.steps.append(Step("agent", message, utc_now(), tuple(calls), tuple(seen), reasoning))

    @property
    def tools(self) -> Tools:
        """The tools that the task offers to agents."""
        return self._attempt.tools

    # -- for environments that need more than a sandbox of the task

    def check(self, task: Task) -> None:
        """Raise :class:`~clawgym.errors.TaskError` for a task that this environment cannot play. Called by
        ``reset``."""

    def sandboxes(self, backend: Backend, num_envs: int) -> Backend:
        """Where the sandboxes of all ``num_envs`` environments come from. Called once, on the first of them; what is
        returned in place of ``backend`` is closed with the environment."""
        return backend
