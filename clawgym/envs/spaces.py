"""Spaces of text that hold everything a program can print."""

from __future__ import annotations

import string
from typing import Any

import gymnasium as gym
import numpy as np

__all__ = ["AnyText", "terminal_action_space", "terminal_observation_space"]

_LARGEST = 2**31 - 1


class AnyText(gym.spaces.Text):
    """Any ``str`` of at most ``max_length`` characters: empty, with newlines, of any script.

    (The stock ``Text`` refuses "", newlines and "é".) Samples are short words.

    >>> AnyText(10).contains("é\\n"), AnyText(10).contains(""), AnyText(2).contains("abc")
    (True, True, False)
    """

    def __init__(self, max_length: int, *, seed: int | np.random.Generator | None = None) -> None:
        super().__init__(max_length, min_length=0, charset=string.ascii_lowercase + " ", seed=seed)

    def contains(self, x: Any) -> bool:
        return isinstance(x, str) and len(x) <= self.max_length

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        size = int(self.np_random.integers(0, min(16, self.max_length) + 1))
        return "".join(self.np_random.choice(list(string.ascii_lowercase + " "), size=size))

    def __repr__(self) -> str:
        return f"AnyText({self.max_length})"


def terminal_action_space(max_length: int = 1 << 20) -> AnyText:
    """A bash command, or ``submit``."""
    return AnyText(max_length)


def terminal_observation_space(max_output: int) -> gym.spaces.Dict:
    """What a terminal step shows. Nothing in it depends on a clock: same seed, same commands, same observations.

    ``output`` str; ``exit_code`` int in [0, 255]; ``cwd`` str; ``step`` and ``remaining_steps`` int64 arrays
    of shape ().
    """
    count = gym.spaces.Box(0, _LARGEST, shape=(), dtype=np.int64)
    return gym.spaces.Dict(
        {
            "output": AnyText(max_output),
            "exit_code": gym.spaces.Discrete(256),
            "cwd": AnyText(4096),
            "step": count,
            "remaining_steps": gym.spaces.Box(0, _LARGEST, shape=(), dtype=np.int64),
        }
    )
