"""Environments over tools pass Gymnasium's checker, and their batches pass ``check_vector_env``."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode

import clawgym  # noqa: F401  # registers the ids
from clawgym.envs.checker import check_vector_env

from .messages import says
from .test_swe import TASKS as SUMS
from .test_toolcall import SUBMIT
from .test_toolcall import TASKS as NOTES

CASES = [
    pytest.param("ClawGym/swe-v0", SUMS, "echo hi", "submit", id="swe"),
    pytest.param("ClawGym/toolcall-v0", NOTES, says(("echo", {"text": "hi"})), SUBMIT, id="toolcall"),
]
each_case = pytest.mark.parametrize(("name", "tasks", "action", "end_action"), CASES)


@each_case
@pytest.mark.filterwarnings("ignore:.*render")
def test_single_env_passes_gymnasium_checker(name: str, tasks: Any, action: str, end_action: str) -> None:
    env = gym.make(name, tasks=tasks, render_mode="ansi")
    check_env(env.unwrapped)
    env.close()


@each_case
@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_batch_passes_check_vector_env(
    name: str, tasks: Any, action: str, end_action: str, mode: AutoresetMode
) -> None:
    batch = gym.make_vec(name, num_envs=2, tasks=tasks, autoreset_mode=mode)
    check_vector_env(batch, end_action=end_action, action=action)
    batch.close()
