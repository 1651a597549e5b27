"""``ClawGym/gui-v0``: a desktop. Actions are mouse and keyboard actions, observations are screenshots."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np

from clawgym.desktop import COMPUTER_USE, KINDS, Unit
from clawgym.desktop.spares import SpareDesktops
from clawgym.envs.env import SandboxEnv
from clawgym.envs.spaces import AnyText
from clawgym.errors import TaskError
from clawgym.records import Observation, Task, ToolCall
from clawgym.registry import envs
from clawgym.sandbox import Backend, Sandbox
from clawgym.tools.computer import ComputerTools

__all__ = ["ComputerSpace", "GuiEnv", "computer_space"]

_MAX_TEXT = 10_000
_MAX_TREE = 200_000
_WHEEL = 50
_SECONDS = 10.0


class ComputerSpace(gym.spaces.Dict):
    """Actions of :func:`computer_space`, or arguments as a model writes them, in which ``action`` is a name."""

    def contains(self, x: Any) -> bool:
        if _is_model_arguments(x):
            return True
        # Box warns about scalars, though it samples them itself.
        return isinstance(x, dict) and super().contains(
            {k: np.asarray(v) if isinstance(v, np.number) else v for k, v in x.items()}
        )


def _is_model_arguments(action: Any) -> bool:
    return isinstance(action, Mapping) and not isinstance(action.get("action"), int | np.integer)


def computer_space(width: int, height: int, unit: Unit) -> ComputerSpace:
    """Return the space of ``computer_use`` actions (:func:`clawgym.desktop.schema`) for a screen of this size.

    Keys:
        action: index in :data:`clawgym.desktop.KINDS`.
        coordinate, start_coordinate: float32 of shape (2,), x and y in pixels or in thousandths of the screen.
        text: str.
        keys: str, names of keys joined by ``+``.
        amount: int64 of shape (), steps of the wheel, down if positive.
        horizontal: 0 or 1.
        seconds: float32 of shape ().

    Keys that an action does not use are ignored.
    """
    high = (width - 1, height - 1) if unit == "pixel" else (1000, 1000)
    point = gym.spaces.Box(np.zeros(2, np.float32), np.array(high, np.float32))
    return ComputerSpace(
        {
            "action": gym.spaces.Discrete(len(KINDS)),
            "coordinate": point,
            "start_coordinate": point,
            "text": AnyText(_MAX_TEXT),
            "keys": AnyText(400),
            "amount": gym.spaces.Box(-_WHEEL, _WHEEL, shape=(), dtype=np.int64),
            "horizontal": gym.spaces.Discrete(2),
            "seconds": gym.spaces.Box(0.0, _SECONDS, shape=(), dtype=np.float32),
        }
    )


def arguments_of(action: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``computer_use`` for an action of :func:`computer_space`."""
    if _is_model_arguments(action):
        return dict(action)
    name = KINDS[int(action["action"])]
    return {
        "action": name,
        "coordinate": [float(n) for n in action["coordinate"]],
        **({"start_coordinate": [float(n) for n in action["start_coordinate"]]} if name == "left_click_drag" else {}),
        "text": str(action["text"]),
        "keys": [key for key in str(action["keys"]).split("+") if key],
        "amount": int(action["amount"]),
        "direction": "horizontal" if action["horizontal"] else "vertical",
        "seconds": float(action["seconds"]),
    }


@envs.register("ClawGym/gui-v0")
class GuiEnv(SandboxEnv):
    """An environment with a desktop.

    Args:
        width: width of the screen in pixels; tasks with another size are refused.
        height: height of the screen in pixels.
        unit: unit of coordinates: ``pixel``, or ``relative`` for thousandths of the screen.
        accessibility_tree: whether observations include the accessibility tree.

    Actions: see :func:`computer_space`; also a dict of arguments as a model writes them, such as
    ``{"action": "left_click", "coordinate": [10, 20]}``. ``done`` and ``fail`` end the episode: the task is done, or
    cannot be done. Invalid arguments do not raise: the error is in ``info["message"]``, and the step counts.

    Observation: ``screenshot``, uint8 of shape (height, width, 3) in RGB, with the pointer, taken when the screen has
    settled; ``accessibility_tree``, str, if requested (:meth:`~clawgym.tools.computer.ComputerTools.tree`); ``step``
    and ``remaining_steps``, int64 arrays of shape ().

    End: ``terminated`` after ``done`` and ``fail``, or if the desktop breaks; ``truncated`` when the budget of steps or
    seconds is used up, or after an infrastructure error. The last ``info`` has ``outcome``, ``cause``, ``checks``,
    ``official``, ``strict`` and ``tampered``.

    Needs the extra ``gui`` and desktop programs on this machine: ``apt-get install xvfb openbox chromium``.
    """

    default_tasks = "gui-basic:train"
    render_mode = "rgb_array"

    def __init__(
        self,
        *,
        width: int = 1024,
        height: int = 768,
        unit: Unit = "pixel",
        accessibility_tree: bool = False,
    ) -> None:
        if unit not in ("pixel", "relative"):
            raise ValueError(f"unit={unit!r}: use 'pixel' or 'relative'")
        self.unit: Unit = unit
        self.width, self.height = width, height
        self.accessibility_tree = accessibility_tree
        self.action_space = computer_space(width, height, unit)
        self.observation_space = gym.spaces.Dict(
            {
                "screenshot": gym.spaces.Box(0, 255, (height, width, 3), np.uint8),
                **({"accessibility_tree": AnyText(_MAX_TREE)} if accessibility_tree else {}),
            }
        )

    def check(self, task: Task) -> None:
        """Raise :class:`~clawgym.errors.TaskError` if the task has no desktop of this size."""
        desktop = task.desktop
        if desktop is None:
            raise TaskError(f"task {task.id} has no desktop: choose tasks with one, such as gui-basic")
        if (desktop.width, desktop.height) != (self.width, self.height):
            raise TaskError(
                f"task {task.id} has a screen of {desktop.width} x {desktop.height}: make the environment with "
                f"width={desktop.width}, height={desktop.height}"
            )

    def sandboxes(self, backend: Backend, num_envs: int) -> Backend:
        """Boot desktops ahead, as many as the machine can boot at the same time."""
        return SpareDesktops(backend, self.width, self.height, max(2, min(num_envs, os.cpu_count() or 1)))

    async def open(self, sandbox: Sandbox) -> dict[str, Any]:
        return await self._look()

    async def act(self, sandbox: Sandbox, action: Mapping[str, Any]) -> dict[str, Any]:
        arguments = {"unit": self.unit, **arguments_of(action)}
        call = ToolCall(f"call{self.steps}", COMPUTER_USE, arguments)
        seen: list[Observation] = []
        self.info["message"] = ""
        try:
            seen.append(await self._computer().act(call, timeout=self.seconds))
            self.info["message"] = seen[0].content
            observation = await self._look()
        finally:
            self.record("", (call,), seen)
        if arguments.get("action") in ("done", "fail"):
            self.submit(str(arguments.get("text", "")))
        return observation

    def render(self, observation: Any) -> np.ndarray:
        return observation["screenshot"]

    async def _look(self) -> dict[str, Any]:
        tools = self._computer()
        seen: dict[str, Any] = {"screenshot": await tools.desktop.picture()}
        if self.accessibility_tree:
            seen["accessibility_tree"] = (await tools.tree())[:_MAX_TREE]
        return seen

    def _computer(self) -> ComputerTools:
        assert isinstance(self.tools, ComputerTools)
        return self.tools
