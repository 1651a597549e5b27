"""Our environments under the tools of Gymnasium's ecosystem: its wrappers, Stable-Baselines3, PettingZoo, GEM.

Needs the packages ``stable-baselines3``, ``pettingzoo`` and ``gem-llm``: `clawgym interop check gymnasium`.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.wrappers import (
    OrderEnforcing,
    PassiveEnvChecker,
    RecordEpisodeStatistics,
    TimeLimit,
    TransformAction,
    TransformObservation,
)
from gymnasium.wrappers import vector as vector_wrappers

from clawgym.errors import SnapshotRefused, TaskError
from clawgym.records import Dialogue, TaskSet
from clawgym.registry import envs

from ..desktop.test_web import FILES
from ..envs.messages import says
from ..envs.test_swe import TASKS as CODE
from ..envs.test_terminal import SOLVE
from ..envs.test_terminal import TASKS as SUMS
from ..envs.test_toolcall import SUBMIT
from ..tools.tasks_with_tools import noting, tiny

Held = Callable[..., None]
NOTES = TaskSet("notes", (noting(),))
SCREEN = {"width": 640, "height": 480}
DESKTOP = pytest.mark.skipif(
    not all(map(shutil.which, ("Xvfb", "openbox", "xfwrite"))), reason="no Xvfb, openbox, xfwrite here: make system"
)
CASES: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "ClawGym/terminal-v0": ({"tasks": SUMS}, "ls", "submit"),
    "ClawGym/swe-v0": ({"tasks": CODE}, "echo hi", "submit"),
    "ClawGym/toolcall-v0": ({"tasks": NOTES}, says(("echo", {"text": "hi"})), SUBMIT),
    "ClawGym/gui-v0": (
        {"tasks": TaskSet("t", (FILES,)), **SCREEN},
        {"action": "screenshot"},
        {"action": "done"},
    ),
}
"""Id -> options of ``gym.make``, an action, and one that ends the episode."""
ELSEWHERE = {"ClawGym/openclaw-v0", "ClawGym/openenv-v0"}
"""Need an installed OpenClaw, or a server: tests/envs/test_openclaw.py, tests/interop/test_openenv.py."""
each_env = pytest.mark.parametrize("id", [pytest.param(id, marks=DESKTOP if "gui" in id else ()) for id in CASES])


def test_every_environment_has_a_case() -> None:
    assert CASES.keys() | ELSEWHERE == {name for name in envs.names() if name.startswith("ClawGym/")}


@each_env
@pytest.mark.filterwarnings("ignore:.*render", "error:.*obs")
def test_wrappers_of_gymnasium(id: str, record_property: Held) -> None:
    options, action, end = CASES[id]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*render")
        made = gym.make(id, **options)
        check_env(made.unwrapped)
        made.close()
    env = RecordEpisodeStatistics(TimeLimit(OrderEnforcing(PassiveEnvChecker(gym.make(id, **options))), 2))
    with pytest.raises(gym.error.ResetNeeded):
        env.step(action)
    env.reset(seed=1)
    *_, first, _ = env.step(action)
    *_, terminated, truncated, info = env.step(action)
    assert (first, terminated, truncated, info["episode"]["l"]) == (False, False, True, 2)
    env.reset(seed=1)
    _, reward, terminated, truncated, info = env.step(end)
    assert (terminated or truncated, info["episode"]["r"], info["episode"]["l"]) == (True, reward, 1)
    env.close()
    record_property("held", f"`{id}` passes `check_env` and works in its wrappers, TimeLimit among them")


@each_env
def test_vector_wrappers_of_gymnasium(id: str, record_property: Held) -> None:
    options, action, end = CASES[id]
    batch = gym.make_vec(id, num_envs=2, **options)
    env = vector_wrappers.DictInfoToList(
        vector_wrappers.ClipReward(vector_wrappers.RecordEpisodeStatistics(batch), 0.0, 0.25)
    )
    _, infos = env.reset(seed=1)
    assert [set(info) >= {"task_id", "instruction"} for info in infos] == [True, True]
    env.step([action, action])
    _, rewards, terminated, truncated, infos = env.step([action, end])
    assert (terminated | truncated).tolist() == [False, True]
    assert "episode" not in infos[0]
    assert (infos[1]["episode"]["l"], infos[1]["outcome"]) in ((2, "failed"), (2, "solved"))
    assert rewards[1] == min(infos[1]["episode"]["r"], 0.25)
    env.close()
    record_property("held", f"a batch of `{id}` works in its vector wrappers, infos as lists among them")


# -- Stable-Baselines3

COMMANDS = ("ls", SOLVE, "submit")


def menu(**options: Any) -> gym.Env[Any, Any]:
    """A terminal with a menu of commands, and the exit code and the steps as numbers: what its policies can read."""

    def read(observation: dict[str, Any]) -> np.ndarray:
        return np.array([observation["exit_code"] / 255, observation["step"] / 4], np.float32)

    env = gym.make("ClawGym/terminal-v0", tasks=SUMS, **options)
    acting = TransformAction(env, lambda n: COMMANDS[int(n)], gym.spaces.Discrete(len(COMMANDS)))
    return TransformObservation(acting, read, gym.spaces.Box(0, 1, (2,), np.float32))


def test_stable_baselines3(record_property: Held) -> None:
    sb3 = pytest.importorskip("stable_baselines3", reason="needs SB3: clawgym interop check gymnasium")
    from stable_baselines3.common.env_checker import check_env as their_check
    from stable_baselines3.common.monitor import Monitor
    from stable_baselines3.common.vec_env import DummyVecEnv

    env = menu()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        their_check(env)
    env.close()
    text = gym.make("ClawGym/terminal-v0", tasks=SUMS)
    with pytest.raises(TypeError):  # it makes arrays of observations, and text has no shape
        sb3.PPO("MultiInputPolicy", text, device="cpu")
    text.close()

    taken: list[list[tuple[int, float]]] = [[], []]

    class Noted(gym.Wrapper):
        def __init__(self, env: gym.Env[Any, Any], taken: list[tuple[int, float]]) -> None:
            super().__init__(env)
            self.taken = taken

        def step(self, action: Any) -> Any:
            step = self.env.step(action)
            self.taken.append((int(action), float(step[1])))
            return step

    many = DummyVecEnv([partial(lambda one: Monitor(Noted(menu(), one)), one) for one in taken])
    model = sb3.PPO("MlpPolicy", many, n_steps=16, batch_size=8, n_epochs=2, seed=3, device="cpu")
    before = [p.detach().clone() for p in model.policy.parameters()]
    model.learn(64)
    assert model.num_timesteps == 64
    assert any(bool((a != b).any()) for a, b in zip(before, model.policy.parameters(), strict=True))
    rewards = {reward for one in taken for _, reward in one}
    assert rewards == {0.0, 1.0}, "it submitted with and without the sum"
    assert sorted(one["r"] for one in model.ep_info_buffer)[-1] == 1.0
    many.close()
    record_property("held", "PPO of Stable-Baselines3 trains on a menu of commands, which passes its `check_env`")


# -- PettingZoo


@pytest.fixture
def game() -> Iterator[Any]:
    """Two agents who talk: one has notes to take, the other a tool of its own."""
    pytest.importorskip("pettingzoo", reason="needs PettingZoo: clawgym interop check gymnasium")
    from clawgym.interop.pettingzoo import dialogue_v0

    opening = (("system", "Take notes."), ("assistant", "Hi!"))
    options = {"prompt": "You want 42 noted.", "stops": ["###STOP###"], "script": []}
    talk = Dialogue(opening, "customer", options, private="user_")
    made = dialogue_v0(TaskSet("talks", (noting(tiny("two", "user_"), dialogue=talk),)))
    yield made
    made.close()


def test_pettingzoo_api(game: Any, record_property: Held) -> None:
    from pettingzoo.test import api_test

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # its advice is about arrays
        api_test(game, num_cycles=40)
    record_property("held", "the two sides of a dialogue are an AEC environment, which passes `api_test`")


def test_pettingzoo_two_sides(game: Any, record_property: Held) -> None:
    said = {
        "customer_0": ["Please note 42.", says(("echo", {"text": "mine"})), "And its name?", "###STOP###"],
        "assistant_0": [says(("note", {"line": "42"}), ("user_echo", {"text": "x"})), "Noted.", "forty-two"],
    }
    turns: list[str] = []
    seen: dict[str, dict[str, Any]] = {}
    totals = dict.fromkeys(said, 0.0)
    game.reset(seed=3)
    for agent in game.agent_iter(40):
        observation, reward, terminated, truncated, info = game.last()
        totals[agent] += reward
        if terminated or truncated:
            assert (terminated, truncated, info["outcome"]) == (True, False, "solved")
            game.step(None)
            continue
        turns.append(agent)
        seen[agent] = {name: json.loads(text) for name, text in observation.items()}
        game.step(said[agent].pop(0))
    assert turns == [
        *("customer_0", "assistant_0", "assistant_0"),
        *("customer_0", "customer_0", "assistant_0", "customer_0"),
    ]
    assert totals == {"assistant_0": 1.0, "customer_0": 1.0}
    assert not game.agents
    names = {agent: [tool["function"]["name"] for tool in seen[agent]["tools"]] for agent in seen}
    assert "note" in names["assistant_0"]
    assert not [name for name in names["assistant_0"] if name.startswith("user_")]
    assert "echo" in names["customer_0"]
    results = [m["content"] for m in seen["assistant_0"]["messages"] if m["role"] == "tool"]
    assert results[0] == "noted"
    assert "no tool 'user_echo'" in results[1]
    assert [m["content"] for m in seen["customer_0"]["messages"] if m["role"] == "tool"] == ["mine"]
    game.reset(seed=3)
    assert game.agent_selection == "customer_0"
    record_property("held", "agent and customer act in turn, each with its own tools, and get the score of the task")


def test_pettingzoo_actions_of_any_form(game: Any) -> None:
    game.reset(seed=1)
    for action in ("", "{", "[1]", '{"tool_calls": 5}', '{"tool_calls": [3, {"function": 4}, {"function": {}}]}'):
        agent = game.agent_selection
        if game.terminations[agent] or game.truncations[agent]:
            break
        game.step(action)
        assert game.observation_space(agent).contains(game.observe(agent))
    with pytest.raises(TaskError, match="no task 'other'"):
        game.reset(options={"task_id": "other"})


def test_pettingzoo_needs_dialogues() -> None:
    pytest.importorskip("pettingzoo", reason="needs PettingZoo: clawgym interop check gymnasium")
    from clawgym.interop.pettingzoo import dialogue_v0

    for tasks in (NOTES, TaskSet("other", (dataclasses.replace(noting(), dialogue=Dialogue((("user", "a"),))),))):
        with pytest.raises(TaskError, match="no dialogue with a customer"):
            dialogue_v0(tasks)


# -- GEM


def test_our_environments_in_gem(record_property: Held) -> None:
    gem = pytest.importorskip("gem", reason="needs GEM: clawgym interop check gymnasium")
    from gem.wrappers.episode_tracking_wrapper import EpisodeTrackingWrapper
    from gem.wrappers.observation_wrapper import ObservationWrapper

    from clawgym.interop.gem import GemEnv, register

    local = gym.make("ClawGym/terminal-v0", tasks=SUMS)
    first, _ = local.reset(seed=5)
    actions = ("ls input; false", SOLVE, "submit")
    steps = [local.step(action) for action in actions]
    local.close()

    register("clawgym:sums", tasks=SUMS)
    assert isinstance(gem.make("clawgym:sums"), gem.Env)
    concat = partial(ObservationWrapper, include_action=False, include_chat_template=False)
    for threads in (False, True):
        env = gem.make_vec(["clawgym:sums"] * 3, wrappers=[concat, EpisodeTrackingWrapper], async_mode=threads)
        texts, _ = env.reset(seed=[5, 5, 5])
        assert [text.strip() for text in texts] == [first["output"].strip()] * 3
        for action, (_, wanted, terminated, truncated, _) in zip(actions, steps, strict=True):
            texts, rewards, ends, cuts, _ = env.step([action] * 3)
            assert (rewards == wanted).all()
            assert (ends == terminated).all()
            assert (cuts == truncated).all()
        for one in env.envs:
            one.unwrapped.close()
    assert wanted == 1.0
    one = GemEnv(tasks=SUMS, seed=5)
    assert one.reset()[0] == first["output"]
    assert "numbers.txt" in one.step(actions[0])[0]
    assert not one.step("true")[0].startswith("$")
    with pytest.raises(SnapshotRefused, match="snapshot"):
        one.spawn(same_state=True)
    other = one.spawn(seed=5)
    assert other.reset()[0] == first["output"]
    assert isinstance(other.sample_random_action(), str)
    one.close()
    other.close()
    record_property("held", "`gem.make_vec` and wrappers of GEM over ours, with the rewards and ends of `gym.make`")


def test_environment_of_gem(record_property: Held) -> None:
    pytest.importorskip("gem", reason="needs GEM: clawgym interop check gymnasium")
    made: dict[str, Any] = {"game": "game:GuessTheNumber-v0-hard", "min_number": 1, "max_number": 50, "max_turns": 10}
    env = gym.make("clawgym.interop.gem:gem-v0", **made)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*render")
        check_env(env.unwrapped)
    text, _ = env.reset(seed=7)
    assert "Guess The Number" in text
    low, high, total = 1, 50, 0.0
    for _ in range(10):
        guess = (low + high) // 2
        text, reward, terminated, truncated, _ = env.step(f"\\boxed{{{guess}}}")
        total += reward
        if terminated:
            break
        low, high = (guess + 1, high) if "higher" in text else (low, guess - 1)
    assert "Congratulations" in text
    assert (terminated, truncated, total) == (True, False, 1.0)
    env.close()
    many = gym.make_vec("clawgym.interop.gem:gem-v0", num_envs=3, vectorization_mode="sync", **made)
    texts, _ = many.reset(seed=1)
    assert len(texts) == 3
    _, _, terminated, _, _ = many.step(["no guess"] * 3)
    assert terminated.all()
    many.close()
    record_property("held", "a game of GEM runs by `gym.make` and `gym.make_vec`, and passes `check_env`")
