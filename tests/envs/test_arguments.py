"""Invalid actions, options and names are refused before anything runs, with a message that says what is expected."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

import clawgym  # registers the ids
from clawgym.envs import TaskVectorEnv
from clawgym.records import TaskSet
from clawgym.registry import envs

from .test_terminal import TASKS

ID = "ClawGym/terminal-v0"


@pytest.fixture(scope="module")
def batch() -> Iterator[TaskVectorEnv]:
    made = gym.make(ID, num_envs=2, tasks=TASKS)
    assert isinstance(made, TaskVectorEnv)
    yield made
    made.close()


@pytest.fixture(scope="module")
def env() -> Iterator[gym.Env[Any, Any]]:
    made = gym.make(ID, tasks=TASKS)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        ("ls", r"expected a sequence of 2 actions.*got str 'ls'.*\['ls'\] \* 2"),
        (b"ls", "expected a sequence of 2 actions.*got bytes"),
        ({"a": "ls", "b": "ls"}, "expected a sequence of 2 actions.*got dict"),
        (None, "expected a sequence of 2 actions.*got NoneType"),
        (np.array("ls"), "expected a sequence of 2 actions.*got ndarray"),
        (["ls"], "1 actions for 2 environments"),
        (["ls", 7], r"the action of environment 1 must be one of AnyText.*got int 7"),
    ],
)
def test_invalid_batch_actions_are_refused_before_any_runs(batch: TaskVectorEnv, actions: Any, message: str) -> None:
    batch.reset(seed=0)
    with pytest.raises(ValueError, match=message):
        batch.step(actions)
    with pytest.raises(ValueError, match=message):
        batch.send(actions, [0, 1])
    assert batch.step(["true", "true"])[0]["step"].tolist() == [1, 1]


def test_send_refuses_unknown_env_ids(batch: TaskVectorEnv) -> None:
    batch.reset(seed=0)
    with pytest.raises(ValueError, match=r"env_ids \[2\] are not environments: use 0 to 1"):
        batch.send(["ls"], [2])


def test_single_env_refuses_action_of_wrong_type(env: gym.Env[Any, Any]) -> None:
    env.reset(seed=0)
    with pytest.raises(ValueError, match=r"step\(\) takes an action of AnyText.*got int 5"):
        env.step(5)
    assert int(env.step("true")[0]["step"]) == 1


def test_computer_space_accepts_samples_and_model_arguments() -> None:
    from clawgym.envs.gui import computer_space

    space = computer_space(640, 480, "pixel")
    sample = space.sample()
    assert space.contains(sample)
    assert space.contains({"action": "left_click", "coordinate": [1, 2]})
    assert space.contains({"coordinate": [1, 2]})
    assert not space.contains("left_click")
    assert not space.contains({**sample, "action": 99})


@pytest.mark.parametrize("name", [name for name in envs.names() if name.startswith("ClawGym/")])
@pytest.mark.parametrize("num_envs", [None, 2])
def test_unknown_reward_is_refused(name: str, num_envs: int | None) -> None:
    with pytest.raises(ValueError, match=r"'strict', 'official', 'corrected', 'checks'.*Did you mean 'strict'"):
        gym.make(name, num_envs=num_envs, tasks=TASKS, reward="strickt")


def test_unknown_make_option_is_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown option 'rewad'.*Did you mean 'reward'"):
        gym.make(ID, tasks=TASKS, rewad="strict")
    with pytest.raises(ValueError, match="give num_envs too"):
        gym.make(ID, tasks=TASKS, autoreset_mode="NEXT_STEP")


def test_unknown_reset_options_are_refused(batch: TaskVectorEnv, env: gym.Env[Any, Any]) -> None:
    for made in (batch, env):
        with pytest.raises(ValueError, match=r"no option 'task_id'.*Did you mean 'task_ids'"):
            made.reset(options={"task_id": "sum"})
        with pytest.raises(ValueError, match="list of task ids; got str 'sum'"):
            made.reset(options={"task_ids": "sum"})
    with pytest.raises(ValueError, match="3 ids for 2 environments"):
        batch.reset(options={"task_ids": ["sum"] * 3})
    with pytest.raises(ValueError, match="no option 'reset_mask'"):
        env.reset(options={"reset_mask": np.array([True])})
    assert env.reset(options={"task_ids": ["sum"]})[1]["task_id"] == "sum"


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_autoreset_mode_by_name_and_value(mode: AutoresetMode) -> None:
    for given in (mode, mode.name, mode.value):
        made = gym.make_vec(ID, num_envs=1, tasks=TASKS, autoreset_mode=given)
        assert made.metadata["autoreset_mode"] is mode
        made.close()


def test_unknown_autoreset_mode_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'NEXT_STEP', 'SAME_STEP', 'DISABLED'.*Did you mean 'SAME_STEP'"):
        gym.make_vec(ID, num_envs=1, tasks=TASKS, autoreset_mode="same-stepp")


def test_gymnasium_vectorization_modes() -> None:
    made = gym.make_vec(ID, num_envs=2, vectorization_mode="vector_entry_point", tasks=TASKS)
    assert isinstance(made, TaskVectorEnv)
    made.close()
    made = gym.make_vec(ID, num_envs=2, vectorization_mode="sync", tasks=TASKS)
    made.reset(seed=0)
    assert made.step(["echo é", "pwd"])[0]["output"][0] == "é\n"
    made.close()
    with pytest.raises(clawgym.ClawGymError, match=r"vectorised in one process.*leave vectorization_mode out"):
        gym.make_vec(ID, num_envs=2, vectorization_mode="async", tasks=TASKS)
    made = gym.make_vec(ID, num_envs=2, vectorization_mode="async", vector_kwargs={"shared_memory": False}, tasks=TASKS)
    made.reset(seed=0)
    assert made.step(["echo é", "pwd"])[0]["output"][0] == "é\n"
    made.close()


@pytest.mark.parametrize(
    "name", [name for name in envs.names() if name.startswith("ClawGym/") and name != "ClawGym/openenv-v0"]
)  # the tasks of openenv-v0 are its server's
def test_default_tasks_are_training_split(name: str) -> None:
    from clawgym.tasks.sets import load

    default = envs.get(name).default_tasks
    pack, _, split = default.partition(":")
    assert split == "train"
    if pack != "swe-basic":  # its packages may have to be downloaded
        held_out = {task.content_hash for task in load(f"{pack}:heldout").tasks}
        assert not held_out & {task.content_hash for task in load(default).tasks}


def test_default_task_is_not_in_held_out_split() -> None:
    from clawgym.tasks.sets import load

    made = gym.make(ID)
    tasks: TaskSet = load("terminal-basic:train")
    assert made.reset(seed=0)[1]["task_id"] in tasks.by_id
    made.close()
