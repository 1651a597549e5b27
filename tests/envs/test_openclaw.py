"""``ClawGym/openclaw-v0`` with a real OpenClaw in a real sandbox; the tests are its policy."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector.utils import batch_space

import clawgym  # registers the ids
from clawgym.envs._runtime import runtime
from clawgym.envs._vector import TaskVectorEnv
from clawgym.envs.checker import check_vector_env
from clawgym.errors import AgentError, TaskError
from clawgym.records import Limits, TaskSet

from ..verifiers.tasks_for_tests import task

pytestmark = [pytest.mark.usefixtures("openclaw"), pytest.mark.timeout(600)]

MOST = 6
LIMITS = Limits(max_steps=MOST, verify_seconds=10, memory_mb=256, disk_mb=64, agent_seconds=300)
BOUND = "Write the sum of input/numbers.txt to output/sum.txt"
TASKS = TaskSet(
    "sums",
    tuple(task(id=f"sum-{n}", instruction=f"{BOUND}, and think of {n}.", limits=LIMITS) for n in range(4)),
)
HURRY = TaskSet("hurry", (task(limits=Limits(verify_seconds=10, memory_mb=256, disk_mb=64, agent_seconds=3)),))
SOLVE = "mkdir -p output; echo 6 > output/sum.txt"


def call(name: str, **arguments: Any) -> str:
    return json.dumps({"content": None, "tool_calls": [{"function": {"name": name, "arguments": arguments}}]})


def last(observation: dict[str, Any]) -> dict[str, Any]:
    return json.loads(observation["messages"])[-1]


@pytest.fixture(scope="module")
def env(openclaw: Any) -> Iterator[gym.Env]:
    made = gym.make("ClawGym/openclaw-v0", tasks=TASKS, render_mode="ansi")
    yield made
    made.close()


@pytest.fixture(scope="module")
def batch(openclaw: Any) -> Iterator[TaskVectorEnv]:
    made = gym.make("ClawGym/openclaw-v0", num_envs=3, tasks=TASKS, prompt="slim", spare=0)
    assert isinstance(made, TaskVectorEnv)
    yield made
    made.close()


def test_scripted_policy_solves_task(env: gym.Env) -> None:
    observation, info = env.reset(seed=1)
    assert env.observation_space.contains(observation)
    messages = json.loads(observation["messages"])
    assert [m["role"] for m in messages] == ["system", "user"]
    assert messages[1]["content"] == info["instruction"]
    assert {"exec", "read", "write"} <= {tool["function"]["name"] for tool in json.loads(observation["tools"])}
    assert (observation["role"], int(observation["request"]), int(observation["step"])) == ("main", 0, 0)
    assert (int(observation["max_tokens"]), int(observation["context_window"])) == (8192, 128_000)

    said: dict[str, Any] = {"content": "é first", "reasoning_content": "hm"}
    said["tool_calls"] = [{"function": {"name": "exec", "arguments": {"command": SOLVE}}}] * 2
    observation, reward, terminated, truncated, info = env.step(json.dumps(said))
    assert (reward, terminated, truncated, info["malformed_calls"], info["heard"]) == (0.0, False, False, 0, True)
    later = json.loads(observation["messages"])
    assert later[:2] == messages
    assert (later[2]["content"], later[2]["reasoning_content"]) == ("é first", "hm")
    ids = [c["id"] for c in later[2]["tool_calls"]]
    assert len(set(ids)) == 2
    assert [m["tool_call_id"] for m in later[3:]] == ids
    assert json.loads(later[2]["tool_calls"][0]["function"]["arguments"]) == {"command": SOLVE}
    assert (int(observation["step"]), int(observation["remaining_steps"])) == (1, MOST - 1)

    observation, reward, terminated, truncated, info = env.step("It is done.")
    assert (reward, terminated, truncated, info["outcome"]) == (1.0, True, False, "solved")
    assert info["checks"] == {"made": 1.0, "right": 1.0}
    assert env.observation_space.contains(observation)
    assert (observation["messages"], int(observation["request"])) == ("[]", -1)
    episode = env.unwrapped.episode  # type: ignore[attr-defined]
    assert [turn.role for turn in episode.turns] == ["main", "main"]
    assert episode.final_message.endswith("It is done.")
    with pytest.raises(clawgym.ClawGymError, match="reset"):
        env.step("more")


def test_subagent_requests_are_shown_one_by_one(env: gym.Env) -> None:
    job = "Read input/numbers.txt, and say which numbers are in there."
    observation, _ = env.reset(options={"task_ids": ["sum-2"]})
    assert "think of 2" in last(observation)["content"]
    observation, *_ = env.step(call("sessions_spawn", task=job))
    shown = [(int(observation["request"]), str(observation["role"]))]
    over = False
    while not over:
        waiting = call("exec", command="sleep 4") if all(role == "main" for _, role in shown) else "Noted: 1 2 3."
        observation, _, terminated, truncated, _ = env.step(waiting)
        over = terminated or truncated
        if not over:
            shown.append((int(observation["request"]), str(observation["role"])))
            asked = "[Subagent Task]" in observation["messages"]
            assert asked == (observation["role"] == "subagent")
    assert [number for number, _ in shown] == list(range(1, len(shown) + 1))
    assert {role for _, role in shown} == {"main", "subagent"}
    assert [turn.role for turn in env.unwrapped.episode.turns].count("subagent") == 1  # type: ignore[attr-defined]


def test_model_calls_are_limited(env: gym.Env) -> None:
    env.reset(seed=1)
    results = [env.step(call("exec", command=SOLVE.replace("6", "7"))) for _ in range(MOST)]
    assert [r[3] for r in results] == [False] * (MOST - 1) + [True]
    assert (results[-1][4]["outcome"], results[-1][4]["cause"], results[-1][1]) == ("truncated", "steps", 0.5)


def test_openclaw_death_ends_episode(env: gym.Env) -> None:
    env.reset(seed=1)
    _, reward, terminated, truncated, info = env.step(call("exec", command="kill -9 $PPID"))
    assert (reward, terminated, truncated) == (0.0, True, False)
    assert (info["outcome"], info["cause"]) == ("failed", "agent-stopped")


def test_interrupted_step_ends_episode(env: gym.Env) -> None:
    env.reset(seed=1)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # background processes ignore SIGINT
    threading.Timer(2, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        env.step(call("exec", command="sleep 100"))
    signal.signal(signal.SIGINT, before)
    with pytest.raises(clawgym.ClawGymError, match="reset"):
        env.step("Done.")


def test_time_limit_includes_policy(openclaw: Any) -> None:
    env = gym.make("ClawGym/openclaw-v0", tasks=HURRY, spare=0)
    env.reset(seed=0)
    time.sleep(4)
    _, _, terminated, truncated, info = env.step(call("exec", command=SOLVE))
    assert (terminated, truncated, info["outcome"], info["cause"]) == (False, True, "truncated", "time")
    env.close()


def test_sampled_text_action_and_close(openclaw: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    env = gym.make("ClawGym/openclaw-v0", tasks=TASKS, action_format="hermes", prompt="slim", spare=0)
    env.reset(seed=0)
    sampled = (
        '<think>\nHm.\n</think>\n\nLook.\n<tool_call>\n{"name": "exec", "arguments": {"command": "pwd"}}\n</tool_call>'
    )
    observation, *_, info = env.step(sampled)
    assert info["malformed_calls"] == 0
    replayed = json.loads(observation["messages"])[2]
    assert (replayed["content"], replayed["reasoning_content"]) == ("Look.", "Hm.")
    assert replayed["tool_calls"][0]["function"]["name"] == "exec"
    assert "workspace" in last(observation)["content"]
    *_, info = env.step('<tool_call>{"name": "exec", "arguments": nothing}</tool_call>')
    assert (info["malformed_calls"], info["outcome"]) == (1, "failed")

    env.reset(seed=1)
    before = set(threading.enumerate())
    assert list(tmp_path.glob("clawgym-*/pool.db"))
    env.close()
    assert not list(tmp_path.glob("clawgym-*/pool.db"))
    assert "clawgym-pool" in {thread.name for thread in before - set(threading.enumerate())}
    assert not [t for t in asyncio.all_tasks(runtime().loop) if "run_episode" in repr(t)]
    env.close()


@pytest.mark.skipif(not os.environ.get("CLAWGYM_WHOLE"), reason="with CLAWGYM_WHOLE=1: twenty OpenClaws one by one")
@pytest.mark.filterwarnings("ignore:.*render", "ignore:.*spec")
def test_single_env_passes_gymnasium_checker(openclaw: Any) -> None:
    made = gym.make("ClawGym/openclaw-v0", tasks=TASKS, prompt="slim", spare=2)
    check_env(made.unwrapped, skip_close_check=True)
    made.close()


def test_batch_passes_check_vector_env(openclaw: Any) -> None:
    made = gym.make_vec("ClawGym/openclaw-v0", num_envs=2, tasks=TASKS, prompt="slim", spare=0)
    check_vector_env(made, end_action="Done.", action=call("exec", command="true"))
    made.close()


def test_batch_envs_get_own_requests(batch: TaskVectorEnv) -> None:
    observation, info = batch.reset(seed=3, options={"task_ids": ["sum-0", "sum-1", "sum-2"]})
    assert info["task_id"].tolist() == ["sum-0", "sum-1", "sum-2"]
    for n, messages in enumerate(observation["messages"]):
        assert [f"think of {other}" in messages for other in range(3)] == [other == n for other in range(3)]
    batch.send([call("exec", command="sleep 3; echo slow"), call("exec", command="echo fast; pwd")], [0, 1])
    ids, observation, reward, *_ = batch.recv(1)
    assert (ids.tolist(), reward.tolist()) == ([1], [0.0])
    assert "fast" in observation["messages"][0]
    batch.send(["Done."], [2])
    seen = {}
    while len(seen) < 2:
        ids, observation, _, terminated, *_ = batch.recv(1)
        seen |= {int(i): (observation["messages"][row], terminated[row]) for row, i in enumerate(ids)}
    assert "slow" in seen[0][0]
    assert "fast" not in seen[0][0]
    assert seen[2] == ("[]", True)

    # The finished environment starts a new episode, the others continue.
    observation, _, terminated, *_ = batch.step([call("exec", command="echo again"), "Done.", "ignored"])
    assert terminated.tolist() == [False, True, False]
    assert observation["step"].tolist() == [2, 2, 0]
    assert json.loads(observation["messages"][2])[1]["content"] == TASKS.tasks[2].instruction
    assert batch.action_space.contains(batch.action_space.sample())


def test_random_policy_finishes_episodes(batch: TaskVectorEnv) -> None:
    batch.action_space.seed(5)
    batch.reset(seed=7)
    over = np.zeros(3, dtype=np.bool_)
    for _ in range(2 * MOST):
        going = np.flatnonzero(~over)  # a finished one would start again, which takes seconds
        actions = batch.action_space.sample()
        batch.send([actions[i] for i in going], going)
        ids, observation, _, terminated, truncated, info = batch.recv(len(going))
        assert ids.tolist() == going.tolist()
        assert batch_space(batch.single_observation_space, len(ids)).contains(observation)
        over[ids] |= terminated | truncated
        assert not set(info.get("outcome", [])) & {"infra"}
        if over.all():
            break
    assert over.all()
    with pytest.raises(TaskError, match="Did you mean"):
        batch.reset(options={"task_ids": ["sum-9"]})


def test_invalid_options_are_refused_at_construction(openclaw: Any) -> None:
    with pytest.raises(ValueError, match="action_format"):
        gym.make("ClawGym/openclaw-v0", tasks=TASKS, action_format="json")
    with pytest.raises(AgentError, match="clawgym agents install openclaw"):
        gym.make("ClawGym/openclaw-v0", tasks=TASKS, version="1.2.3")
