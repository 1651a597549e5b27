"""``ClawGym/terminal-v0``: Gymnasium's contract, single and batched, in real sandboxes."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from hypothesis import given
from hypothesis import strategies as st

import clawgym  # registers the ids
from clawgym.envs._vector import TaskVectorEnv
from clawgym.envs.checker import check_vector_env
from clawgym.envs.spaces import AnyText
from clawgym.errors import TaskError
from clawgym.records import Limits, TaskSet

from ..verifiers.tasks_for_tests import task

LIMITS = Limits(max_steps=4, verify_seconds=10, memory_mb=256, disk_mb=64, agent_seconds=60, command_seconds=3)
TASKS = TaskSet("sums", (task(limits=LIMITS),))
SOLVE = "mkdir output; echo 6 > output/sum.txt"


@pytest.fixture
def env() -> Iterator[gym.Env]:
    made = gym.make("ClawGym/terminal-v0", tasks=TASKS)
    yield made
    made.close()


@pytest.fixture
def batch() -> Iterator[TaskVectorEnv]:
    made = gym.make("ClawGym/terminal-v0", num_envs=4, tasks=TASKS)
    assert isinstance(made, TaskVectorEnv)
    yield made
    made.close()


@pytest.mark.filterwarnings("ignore:.*render")
def test_single_env_passes_gymnasium_checker(env: gym.Env) -> None:
    check_env(env.unwrapped)


def test_episode(env: gym.Env) -> None:
    observation, info = env.reset(seed=1)
    assert observation["output"] == info["instruction"]
    assert info["task_id"] == "sum"
    observation, reward, terminated, truncated, _ = env.step("cd /tmp; X=7; false")
    assert (observation["exit_code"], observation["cwd"], reward, terminated, truncated) == (
        1,
        "/tmp",
        0.0,
        False,
        False,
    )
    assert (int(observation["step"]), int(observation["remaining_steps"])) == (1, 3)
    assert env.step("echo $X é")[0]["output"] == "7 é\n"
    env.step(f"cd - && {SOLVE}")
    _, reward, terminated, truncated, info = env.step("submit")
    assert (reward, terminated, truncated) == (1.0, True, False)
    assert info["outcome"] == "solved"
    assert info["checks"] == {"made": 1.0, "right": 1.0}
    with pytest.raises(clawgym.ClawGymError, match="reset"):
        env.step("ls")


def test_step_budget_truncates_and_grades(env: gym.Env) -> None:
    env.reset(seed=1)
    results = [env.step(c) for c in (SOLVE.replace("6", "7"), "true", "true", "true")]
    assert [r[2] or r[3] for r in results] == [False, False, False, True]
    assert results[-1][3]
    assert results[-1][4]["outcome"] == "truncated"
    assert results[-1][1] == 0.5


@pytest.mark.parametrize(("reward", "pays"), [("official", 0.5), ("strict", 0.0), ("checks", 1.0)])
def test_reward_names(reward: str, pays: float) -> None:
    env = gym.make("ClawGym/terminal-v0", tasks=TASKS, reward=reward)
    env.reset(seed=1)
    env.step("mkdir output; touch output/sum.txt")
    assert env.step("submit")[1] == pays
    env.close()


def test_tasks_by_id_and_by_seed() -> None:
    env = gym.make("ClawGym/terminal-v0", tasks="terminal-basic")
    first = [env.reset(seed=s)[1]["task_id"] for s in range(6)]
    assert first == [env.reset(seed=s)[1]["task_id"] for s in range(6)]
    assert len(set(first)) > 1
    assert env.reset(options={"task_ids": [first[3]]})[1]["task_id"] == first[3]
    with pytest.raises(TaskError, match="Did you mean"):
        env.reset(options={"task_ids": [first[3] + "x"]})
    env.close()


def test_command_that_breaks_sandbox_fails_episode(env: gym.Env) -> None:
    env.reset(seed=1)
    result = None
    for _ in range(4):
        result = env.step("python3 -c 'x = []\nwhile 1: x.append(bytearray(2**24))' & b() { b | b & }; b; sleep 2")
        if result[2] or result[3]:
            break
    assert result is not None
    if not (result[2] or result[3]):
        result = env.step("submit")
    assert result[4]["outcome"] in ("failed", "truncated")
    assert env.reset(seed=1)[1]["task_id"] == "sum"
    assert env.step("echo ok")[0]["output"] == "ok\n"


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_batch_passes_check_vector_env(mode: AutoresetMode) -> None:
    batch = gym.make("ClawGym/terminal-v0", num_envs=3, tasks=TASKS, autoreset_mode=mode)
    check_vector_env(batch, end_action="submit", action="echo hi")
    batch.close()


def test_checker_reports_broken_batch(batch: TaskVectorEnv) -> None:
    batch.single_action_space = AnyText(3)
    with pytest.raises(AssertionError, match="action_space"):
        check_vector_env(batch, end_action="submit", action="echo hi")


def test_make_vec_and_batch_of_one() -> None:
    for made in (
        gym.make_vec("ClawGym/terminal-v0", num_envs=2, tasks=TASKS),
        gym.make("ClawGym/terminal-v0", num_envs=1, tasks=TASKS),
    ):
        observation, _ = made.reset(seed=3)
        assert len(observation["output"]) == made.num_envs  # type: ignore[attr-defined]
        made.close()


def test_gymnasium_vector_wrappers(batch: TaskVectorEnv) -> None:
    wrapped = RecordEpisodeStatistics(batch)
    wrapped.reset(seed=0)
    *_, info = wrapped.step(["submit"] * 4)
    assert info["episode"]["l"].tolist() == [1] * 4


def test_slow_command_does_not_block_other_envs(batch: TaskVectorEnv) -> None:
    batch.reset(seed=0)
    started = time.monotonic()
    batch.send(["sleep 2.8; echo slow", *["echo fast"] * 3], range(4))
    seen: list[int] = []
    while len(seen) < 3:
        ids, observation, *_ = batch.recv(1)
        assert set(observation["output"]) == {"fast\n"}
        seen += ids.tolist()
    assert time.monotonic() - started < 2.6
    with pytest.raises(TimeoutError):
        batch.recv(1, timeout=0.1)
    ids, observation, *_ = batch.recv(1)
    assert (ids.tolist(), observation["output"]) == ([0], ("slow\n",))


def test_broken_env_is_reported_and_others_continue(batch: TaskVectorEnv) -> None:
    batch.reset(seed=0)
    # The supervisor kills the sandbox: not the agent's failure.
    victim = batch._runners[2].attempt  # type: ignore[attr-defined]
    assert victim is not None
    from clawgym.envs._runtime import runtime

    runtime().run(victim.backend.supervised.ask("kill", victim.sandbox.id))  # type: ignore[attr-defined]
    observation, _, terminated, truncated, info = batch.step(["echo a", "echo b", "echo c", "echo d"])
    assert [observation["output"][i] for i in (0, 1, 3)] == ["a\n", "b\n", "d\n"]
    assert (terminated | truncated).tolist() == [False, False, True, False]
    assert info["_outcome"].tolist() == [False, False, True, False]
    observation, *_ = batch.step(["echo a", "echo b", "ignored", "echo d"])
    assert observation["output"][2] == TASKS.tasks[0].instruction
    assert batch.step(["echo again"] * 4)[0]["output"] == ("again\n",) * 4


def test_batch_envs_have_own_seeds() -> None:
    single = gym.make("ClawGym/terminal-v0", tasks="terminal-basic")
    alone = [single.reset(seed=seed)[1]["task_id"] for seed in range(7, 11)]
    single.close()
    batch = gym.make("ClawGym/terminal-v0", num_envs=4, tasks="terminal-basic")
    together = batch.reset(seed=7)[1]["task_id"].tolist()
    batch.close()
    assert together == alone
    assert len({*alone}) > 1


def test_task_ids_are_assigned_round_robin() -> None:
    batch = gym.make("ClawGym/terminal-v0", num_envs=3, tasks="terminal-basic")
    ids = [t.id for t in batch.choice.task_set.tasks[:2]]  # type: ignore[attr-defined]
    _, info = batch.reset(options={"task_ids": ids})
    assert info["task_id"].tolist() == [ids[0], ids[1], ids[0]]
    batch.close()


def test_isolation_is_in_metadata(batch: TaskVectorEnv) -> None:
    assert batch.metadata["isolation"]["features"]["network"] is True
    assert batch.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_child_makes_own_env(env: gym.Env) -> None:
    env.reset(seed=0)

    def child() -> None:
        made = gym.make("ClawGym/terminal-v0", tasks=TASKS)
        made.reset(seed=0)
        good = made.step("echo child")[0]["output"] == "child\n"
        made.close()
        os._exit(0 if good else 1)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert env.step("echo parent")[0]["output"] == "parent\n"


@given(st.text())
def test_any_text_contains_any_string(text: str) -> None:
    assert AnyText(10_000).contains(text)


def test_text_samples_are_in_space_and_seeded() -> None:
    a, b = AnyText(50, seed=3), AnyText(50, seed=3)
    samples = [a.sample() for _ in range(20)]
    assert samples == [b.sample() for _ in range(20)]
    assert all(a.contains(s) for s in samples)
    assert not a.contains(np.str_("x" * 51))
