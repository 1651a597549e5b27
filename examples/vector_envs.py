"""Eight environments at once: a random policy, and a scripted one that solves its tasks.

python examples/vector_envs.py
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np

import clawgym  # noqa: F401  # registers the environments

TASKS = [f"write-word-t{seed:04}" for seed in range(0, 16, 2)]


def guess(instruction: str, step: int) -> str:
    return random.choice(["ls", "cat *", "date > out.txt", "submit"])


def solve(instruction: str, step: int) -> str:
    """Write the word that the instruction names, then submit."""
    found = re.search(r"the word (\w+) to the file ([\w.]+\w)", instruction)
    return f"echo {found[1]} > {found[2]}" if found and step == 0 else "submit"


def play(envs: Any, policy: Callable[[str, int], str], steps: int = 4) -> np.ndarray:
    """The reward of the first episode of each environment, (num_envs,)."""
    _, infos = envs.reset(seed=0, options={"task_ids": TASKS})
    instructions, rewards = infos["instruction"], np.zeros(envs.num_envs)
    running = np.ones(envs.num_envs, dtype=bool)
    for step in range(steps):
        _, given, terminated, truncated, _ = envs.step([policy(text, step) for text in instructions])
        rewards += given * running
        running &= ~(terminated | truncated)
    return rewards


envs = gym.make("ClawGym/terminal-v0", num_envs=len(TASKS))
for policy in (guess, solve):
    rewards = play(envs, policy)
    print(f"{policy.__name__}: rewards {rewards.tolist()}, mean reward {rewards.mean()}")
envs.close()
