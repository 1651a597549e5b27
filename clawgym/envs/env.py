"""The base class for environments: define the spaces, and what an action does in the sandbox.

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

``@clawgym.registry.envs.register("Mine/python-v0")`` gives it a name; docs/reference/registry.md has other ways.
docs/tutorials/write-an-environment.md has a longer example with tasks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import gymnasium as gym

from clawgym.errors import TaskError
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
    """Base class of environments. Each episode is an attempt at one task in its own sandbox.

    Define :attr:`action_space`, :attr:`observation_space` and :meth:`act`, and if needed :meth:`open` and
    :meth:`render`. Keyword arguments of ``__init__`` become options of ``gym.make``. The library makes one object for
    each environment of a batch. It chooses the task, opens and closes the sandbox, counts steps, enforces the limits of
    the task, grades the workspace, and provides the Gymnasium classes, single and batched.

    Errors: an exception from :meth:`open` or :meth:`act` ends this episode as ``failed`` with the cause ``env-error``
    and the traceback in ``info["error"]``. Other environments of the batch are not affected. Do not catch
    :class:`~clawgym.errors.SandboxDied` and :class:`~clawgym.errors.InfraError`: the library gives each the right
    outcome. Return an observation for anything that a policy can cause with an ordinary action, such as a syntax error.
    """

    action_space: gym.Space[Any]
    """The space of actions; others never reach :meth:`act`."""
    observation_space: gym.spaces.Dict
    """The space of observations, a Dict of ``Text``, ``Box``, ``Discrete``, ``MultiBinary`` or ``MultiDiscrete``. The
    library adds ``step`` and ``remaining_steps``, int64 arrays of shape ()."""
    render_mode: ClassVar[str] = "ansi"
    """What :meth:`render` returns: ``ansi`` for text, ``rgb_array`` for an image (users can then choose ``human``)."""

    default_tasks: ClassVar[str | TaskSet | None] = None
    """The tasks of ``gym.make`` without ``tasks=``: a task set or its name; should be a training split."""

    # Set by the library before open(), for each episode.
    task: Task
    """The task of the episode."""
    seed: int
    """Seed of the episode, for all randomness."""
    steps: int
    """Number of actions in this episode, including the current one."""
    seconds: float
    """Time limit of the current action, in seconds: the task's ``command_seconds``, or what is left of its time."""
    info: dict[str, Any]
    """The ``info`` of this step (in :meth:`open`: of ``reset``); add keys to it."""
    _attempt: Attempt
    _submitted = False
    _recorded = False

    async def open(self, sandbox: Sandbox) -> Observation | None:
        """Called once the sandbox is ready, with the files of the task in ``self.task.workspace``.

        Returns:
            The first observation, or None for an empty one (empty text, zeros).
        """
        return None

    async def act(self, sandbox: Sandbox, action: Any) -> Observation:
        """Carry out ``action`` in the sandbox and return the observation.

        Call :meth:`submit` if the action ends the episode.
        """
        raise NotImplementedError(f"{type(self).__name__} has no act(): write `async def act(self, sandbox, action)`")

    def render(self, observation: Observation) -> Any:
        """Render ``observation`` as text, or with ``render_mode = "rgb_array"`` as an image, uint8 of shape (height,
        width, 3). By default all text in it."""
        return "\n".join(str(value) for value in observation.values() if isinstance(value, str))

    # -- for use in act()

    def submit(self, answer: str = "") -> None:
        """End the episode with this action and grade the workspace. The verifier also gets ``answer``."""
        self._submitted = True
        self._attempt.final_message = answer

    def record(
        self,
        message: str,
        calls: Sequence[ToolCall] = (),
        seen: Sequence[Seen] = (),
        reasoning: str | None = None,
    ) -> None:
        """Record the current action in the transcript as a message with tool calls and their results.

        Without this call the transcript has the action and the rendered observation as text.
        """
        self._recorded = True
        self._attempt.steps.append(Step("agent", message, utc_now(), tuple(calls), tuple(seen), reasoning))

    @property
    def tools(self) -> Tools:
        """The tools of the task."""
        return self._attempt.tools

    # -- for environments whose episodes can be restored in a fork

    @property
    def forks(self) -> bool:
        """Whether :meth:`save` and :meth:`load` carry all that a fork of the sandbox's files does not.

        False: ``env.restore`` repeats the actions of the episode in a new sandbox instead.
        """
        return False

    async def save(self, sandbox: Sandbox) -> Any:
        """Return the state of this object and of its shells. Called between two actions, while no program runs.

        Raise :class:`~clawgym.errors.SandboxError` for a state that cannot be saved.
        """

    async def load(self, sandbox: Sandbox, state: Any) -> None:
        """Set a state of :meth:`save`. Called instead of :meth:`open`, in a fork of the sandbox's files."""

    # -- for environments with special tasks or sandboxes

    def check(self, task: Task) -> None:
        """Raise :class:`~clawgym.errors.TaskError` if this environment cannot run ``task``. Called by ``reset``."""
        if task.dialogue is not None:
            raise TaskError(
                f"task {task.id} is a dialogue, which environments do not have: use run_episode with tool-loop"
            )

    def sandboxes(self, backend: Backend, num_envs: int) -> Backend:
        """Return the backend that makes the sandboxes of all ``num_envs`` environments.

        Called once, on the first environment of a batch. A backend other than ``backend`` is closed with the batch.
        """
        return backend
