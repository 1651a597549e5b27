"""128 environments on this machine, as the README promises."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import clawgym  # noqa: F401  # registers the ids
from clawgym.records import Limits, TaskSet

from ..verifiers.tasks_for_tests import task

LIMITS = Limits(verify_seconds=60, memory_mb=256, disk_mb=64, pids=64)
TASKS = TaskSet("sums", (task(limits=LIMITS),))


@pytest.mark.parametrize("make", [gym.make, gym.make_vec])
def test_128_environments(make: Any) -> None:
    envs = make("ClawGym/terminal-v0", num_envs=128, tasks=TASKS)
    envs.reset(seed=0)
    solve = ["mkdir output; echo 6 > output/sum.txt" if i % 2 else "true" for i in range(128)]
    observations, *_ = envs.step(solve)
    assert (observations["exit_code"] == 0).all()
    _, rewards, terminated, truncated, info = envs.step(["submit"] * 128)
    assert terminated.all()
    assert not truncated.any()
    assert rewards.tolist() == [float(i % 2) for i in range(128)]
    assert np.unique(info["outcome"]).tolist() == ["failed", "solved"]
    envs.close()
