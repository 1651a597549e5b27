"""``ClawGym/toolcall-v0``: Gymnasium's contract, with tool servers in real sandboxes."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator

import gymnasium as gym
import pytest
from hypothesis import given
from hypothesis import strategies as st

import clawgym  # registers the ids
from clawgym.envs._tools import _calls_of
from clawgym.envs._vector import TaskVectorEnv
from clawgym.records import TaskSet

from ..tools.tasks_with_tools import LIMITS, noting, tiny
from .messages import says, seen

pytest.importorskip("mcp")
TASKS = TaskSet("notes", (noting(),))
TWO = TaskSet("two", (noting(tiny("two", "b_")),))


SUBMIT = says(("submit", {"message": "forty-two"}))


@pytest.fixture
def env() -> Iterator[gym.Env]:
    made = gym.make("ClawGym/toolcall-v0", tasks=TASKS, render_mode="ansi")
    yield made
    made.close()


def test_episode(env: gym.Env) -> None:
    observation, info = env.reset(seed=1)
    assert json.loads(observation["messages"]) == [{"role": "user", "content": info["instruction"]}]
    names = [tool["function"]["name"] for tool in info["tools"]]
    assert names == ["echo", "add", "note", "sleep", "do", "submit"]
    observation, reward, terminated, truncated, info = env.step(
        says(("note", {"line": "42"}), ("add", {"a": 40, "b": 2}), ("add", {"a": "x"}), ("fly", {}), content="So.")
    )
    messages = json.loads(observation["messages"])
    assert [m["role"] for m in messages] == ["tool"] * 4
    assert len({m["tool_call_id"] for m in messages}) == 4
    assert [m["content"] for m in messages[:2]] == ["noted", "42"]
    assert "'b', a whole number" in messages[2]["content"]
    assert "no tool 'fly'" in messages[3]["content"]
    assert (reward, terminated, truncated, info["malformed_calls"]) == (0.0, False, False, 2)
    assert (int(observation["step"]), int(observation["remaining_steps"])) == (1, 5)
    observation, reward, terminated, truncated, info = env.step(SUBMIT)
    assert (seen(observation), reward, terminated, truncated) == (["submitted"], 1.0, True, False)
    assert info["outcome"] == "solved"
    assert info["checks"] == {"noted": 1.0, "rest": 1.0, "said": 1.0}
    episode = env.unwrapped.episode  # type: ignore[attr-defined]
    assert episode.final_message == "forty-two"
    assert [len(step.tool_calls) for step in episode.steps] == [0, 4, 1]
    assert episode.steps[1].message == "So."
    with pytest.raises(clawgym.ClawGymError, match="reset"):
        env.step(SUBMIT)
    assert env.render() is not None


def test_invalid_calls_are_answered(env: gym.Env) -> None:
    env.reset(seed=1)
    for action, part in (
        ("I think", "no tool call"),
        ("", "no tool call"),
        ('{"tool_calls": [{"function": {"name": 7}}]}', "could not be read"),
        (says(("echo", [1])), "no JSON object"),  # type: ignore[arg-type]
    ):
        observation, _, terminated, truncated, info = env.step(action)
        assert part in seen(observation)[0]
        assert not terminated
        assert not truncated
        assert info["malformed_calls"] == (part != "no tool call")
    assert env.step("x")[3] is False
    *_, truncated, info = env.step("x")
    assert (truncated, info["outcome"], info["cause"]) == (True, "truncated", "steps")


def test_submit_in_last_step(env: gym.Env) -> None:
    env.reset(seed=1)
    for _ in range(4):
        env.step("thinking")
    env.step(says(("note", {"line": "42"})))
    assert env.step(SUBMIT)[2:4] == (True, False)


def test_sampled_text_is_parsed_by_format() -> None:
    env = gym.make("ClawGym/toolcall-v0", tasks=TASKS, action_format="hermes")
    env.reset(seed=1)
    call = '<tool_call>\n{"name": "note", "arguments": {"line": "42"}}\n</tool_call>'
    assert seen(env.step(f"<think>Hm.</think>{call}")[0]) == ["noted"]
    end = '<tool_call>\n{"name": "submit", "arguments": {"message": "forty-two"}}\n</tool_call>'
    assert env.step(end)[1] == 1.0
    env.close()
    with pytest.raises(ValueError, match="hermes"):
        gym.make("ClawGym/toolcall-v0", tasks=TASKS, action_format="xml")


def test_ended_server_and_time_limit() -> None:
    hurry = TaskSet("hurry", (noting(limits=dataclasses.replace(LIMITS, agent_seconds=3)),))
    env = gym.make("ClawGym/toolcall-v0", tasks=hurry)
    env.reset(seed=1)
    assert "I am dying" in seen(env.step(says(("do", {"what": "die"})))[0])[0]
    time.sleep(3)
    _, reward, _, truncated, info = env.step(says(("echo", {"text": "late"})))
    assert (reward, truncated, info["outcome"], info["cause"]) == (0.0, True, "truncated", "time")
    env.reset(seed=1)
    assert seen(env.step(says(("echo", {"text": "on"})))[0]) == ["on"]
    env.close()


def test_server_that_does_not_start_is_infra() -> None:
    env = gym.make("ClawGym/toolcall-v0", tasks=TaskSet("bad", (noting(tools=(tiny("x", EXTRA_TOOLS="{"),)),)))
    _, info = env.reset(seed=1)
    assert "tool server 'x' does not speak MCP" in info["error"]
    assert "JSONDecodeError" in info["error"]
    assert env.step(SUBMIT)[4]["outcome"] == "infra"
    env.close()


def test_slow_call_does_not_block_other_envs() -> None:
    batch = gym.make("ClawGym/toolcall-v0", num_envs=3, tasks=TWO)
    assert isinstance(batch, TaskVectorEnv)
    batch.reset(seed=0)
    slow = says(("sleep", {"seconds": 1.5}), ("b_sleep", {"seconds": 1.5}))
    batch.send([slow, says(("echo", {"text": "1"})), says(("b_echo", {"text": "2"}))], [0, 1, 2])
    heard: list[int] = []
    while len(heard) < 2:
        ids, observation, *_ = batch.recv(1, timeout=20)
        heard += ids.tolist()
        assert 0 not in ids
    ids, observation, *_ = batch.recv(1, timeout=20)
    assert ids.tolist() == [0]
    assert [m["content"] for m in json.loads(observation["messages"][0])] == ["slept", "slept"]
    *_, infos = batch.step([SUBMIT] * 3)
    assert infos["outcome"].tolist() == ["failed"] * 3
    batch.close()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@given(st.lists(st.text() | json_values.map(json.dumps), max_size=5))
def test_every_call_is_made_or_refused(arguments: list[str]) -> None:
    message = {
        "tool_calls": [{"id": str(n), "function": {"name": "f", "arguments": a}} for n, a in enumerate(arguments)]
    }
    calls, refused = _calls_of(message)
    assert sorted([c.id for c in calls] + [str(r.call_id) for r in refused]) == [str(n) for n in range(len(arguments))]
