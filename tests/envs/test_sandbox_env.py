"""SandboxEnv: episodes of a custom environment, and the outcomes of its errors."""

from __future__ import annotations

import asyncio
import logging
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode

from clawgym.envs import SandboxEnv, TaskVectorEnv
from clawgym.envs.checker import check_vector_env
from clawgym.envs.spaces import AnyText, JsonList, blank, counter
from clawgym.errors import InfraError, MissingDependency
from clawgym.records import TaskSet
from clawgym.registry import envs

from ..verifiers.tasks_for_tests import task
from .test_terminal import LIMITS, SOLVE

TASKS = TaskSet("sums", (task(limits=LIMITS),))


class Scripts(SandboxEnv):
    """An environment whose actions are bash scripts; some words make the environment itself fail."""

    action_space = AnyText(1000)
    observation_space = gym.spaces.Dict(
        {"text": AnyText(1000), "code": gym.spaces.Discrete(256), "shape": gym.spaces.Box(-1, 1, (2,), np.float32)}
    )

    def __init__(self, *, bad_open: bool = False, most: int = 1000) -> None:
        self.bad_open = bad_open
        self.most = most

    async def open(self, sandbox: Any) -> Any:
        if self.bad_open:
            raise RuntimeError("no way in")
        self.info["opened"] = self.seed

    async def act(self, sandbox: Any, action: str) -> Any:
        seen = {"text": "", "code": 0, "shape": [0.5, -0.5]}
        match action:
            case "submit":
                self.submit("here it is")
                return seen
            case "raise":
                return {}["nothing"]
            case "shape":
                return {**seen, "shape": [0.0]}
            case "number":
                return {**seen, "text": 5}
            case "extra":
                return {**seen, "more": ""}
            case "host":
                raise InfraError("the host is gone")
            case "package":
                raise MissingDependency("install it")
            case "stop":
                await asyncio.Event().wait()
            case "stop and raise":
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError as error:
                    raise RuntimeError("interrupted") from error
            case "stop and return":
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    return seen
            case "info":
                self.info["about"] = "text" if self.seed % 2 else 10**30
                return seen
        done = await sandbox.exec(["bash", "-c", action], cwd=self.task.workspace, timeout=self.seconds)
        return {**seen, "text": done.text[: self.most], "code": done.exit_code}


Scripts.default_tasks = TASKS
envs.register("Tests/scripts-v0")(Scripts)


@pytest.fixture
def env() -> Iterator[gym.Env[Any, Any]]:
    made = gym.make("Tests/scripts-v0")
    yield made
    made.close()


@pytest.fixture
def batch() -> Iterator[TaskVectorEnv]:
    made = gym.make("Tests/scripts-v0", num_envs=3)
    assert isinstance(made, TaskVectorEnv)
    yield made
    made.close()


def test_episode_is_recorded_graded_and_rewarded(env: gym.Env[Any, Any]) -> None:
    observation, info = env.reset(seed=1)
    assert (observation["text"], int(observation["code"]), observation["shape"].tolist()) == ("", 0, [0.0, 0.0])
    assert info["opened"] >= 0
    assert info["instruction"] == TASKS.tasks[0].instruction
    observation, reward, *over, info = env.step(f"{SOLVE}; echo é; exit 3")
    assert env.observation_space.contains(observation)
    assert (observation["text"], int(observation["code"]), reward, over) == ("é\n", 3, 0.0, [False, False])
    assert (int(observation["step"]), int(observation["remaining_steps"]), info) == (1, 3, {})
    observation, reward, *over, info = env.step("submit")
    assert (reward, over, info["outcome"]) == (1.0, [True, False], "solved")
    episode = env.unwrapped.episode  # type: ignore[attr-defined]
    assert episode.final_message == "here it is"
    assert [step.message for step in episode.steps[1:]] == [f"{SOLVE}; echo é; exit 3", "submit"]
    assert episode.steps[1].observations[0].content == "é\n"


def test_max_steps_truncates(env: gym.Env[Any, Any]) -> None:
    env.reset(seed=1)
    ends = [env.step("true")[2:] for _ in range(LIMITS.max_steps)]
    assert [(a, b) for a, b, _ in ends] == [(False, False)] * 3 + [(False, True)]
    assert (ends[-1][2]["outcome"], ends[-1][2]["cause"]) == ("truncated", "steps")


@pytest.mark.parametrize(
    ("action", "message"),
    [
        ("raise", "KeyError: 'nothing'"),
        ("shape", r"observation\['shape'\] must have the shape \(2,\); it has \(1,\)"),
        ("number", r"observation\['text'\] must be in AnyText\(1000\); it is 5"),
        ("printf '%2000d' 1", "it is text of 2000 characters"),
        ("extra", r"the observation has \['more'\]"),
    ],
)
def test_error_in_act_fails_only_its_episode(action: str, message: str, caplog: pytest.LogCaptureFixture) -> None:
    batch: Any = gym.make("Tests/scripts-v0", num_envs=3, most=5000)
    batch.reset(seed=0)
    with caplog.at_level(logging.WARNING):
        _, rewards, terminated, truncated, info = batch.step(["echo a", action, "echo c"])
    assert (terminated.tolist(), truncated.tolist()) == ([False, True, False], [False] * 3)
    assert rewards.tolist() == [0.0] * 3
    assert (info["outcome"][1], info["cause"][1]) == ("failed", "env-error")
    assert re.search(message, info["error"][1])
    assert "Traceback" in info["error"][1]
    assert re.search(message, batch.episodes[1].error)
    assert "Scripts.act raised on task sum" in caplog.text
    observation, *_ = batch.step(["echo a", "ignored", "echo c"])
    assert observation["step"].tolist() == [2, 0, 2]
    assert batch.step(["echo again"] * 3)[0]["text"] == ("again\n",) * 3
    batch.close()


def test_error_in_open_fails_episode_at_first_step() -> None:
    env = gym.make("Tests/scripts-v0", bad_open=True)
    observation, info = env.reset(seed=0)
    assert env.observation_space.contains(observation)
    assert "RuntimeError: no way in" in info["error"]
    _, reward, *over, info = env.step("true")
    assert (reward, over, info["outcome"], info["cause"]) == (0.0, [True, False], "failed", "env-error")
    assert "RuntimeError: no way in" in info["error"]
    env.close()


def test_infra_error_in_act_is_infra(env: gym.Env[Any, Any]) -> None:
    env.reset(seed=0)
    *_, truncated, info = env.step("host")
    assert (truncated, info["outcome"], info["cause"]) == (True, "infra", "host: the host is gone")


def test_missing_dependency_is_raised(env: gym.Env[Any, Any]) -> None:
    env.reset(seed=0)
    with pytest.raises(MissingDependency, match="install it"):
        env.step("package")
    env.reset(seed=0)
    assert env.step("echo on")[0]["text"] == "on\n"


@pytest.mark.parametrize("action", ["stop", "stop and raise", "stop and return"])
def test_endless_action_is_cancelled_after_time_limit(monkeypatch: pytest.MonkeyPatch, action: str) -> None:
    monkeypatch.setattr("clawgym.envs._runner._GRACE", 0.2)
    hurry = TaskSet("hurry", (task(limits=LIMITS.__class__(max_steps=4, verify_seconds=10, agent_seconds=1)),))
    batch: Any = gym.make("Tests/scripts-v0", num_envs=2, tasks=hurry)
    batch.reset(seed=0)
    *_, truncated, info = batch.step([action, "true"])
    assert truncated.tolist() == [True, False]
    assert (info["outcome"][0], info["cause"][0]) == ("truncated", "time")
    observation, *_ = batch.step(["ignored", "true"])
    assert observation["step"].tolist() == [0, 2]
    assert batch.step(["echo on", "submit"])[0]["text"][0] == "on\n"
    batch.close()


def test_info_values_of_mixed_types_share_array(batch: TaskVectorEnv) -> None:
    batch.reset(seed=0)
    *_, info = batch.step(["info"] * 3)
    assert set(map(type, info["about"])) <= {str, int}
    assert info["_about"].all()


@pytest.mark.filterwarnings("ignore:.*render")
def test_env_passes_both_checkers() -> None:
    env = gym.make("Tests/scripts-v0", render_mode="ansi")
    check_env(env.unwrapped)
    env.close()
    for mode in AutoresetMode:
        batch = gym.make_vec("Tests/scripts-v0", num_envs=2, autoreset_mode=mode)
        check_vector_env(batch, action="true", end_action="submit")
        batch.close()


def test_checker_reports_env_that_raises() -> None:
    batch = gym.make("Tests/scripts-v0", num_envs=2, bad_open=True)
    with pytest.raises(AssertionError, match="no way in"):
        check_vector_env(batch, action="true", end_action="submit")
    batch.close()


def test_batch_envs_are_separate_objects(batch: TaskVectorEnv) -> None:
    envs = [runner.env for runner in batch._runners]  # type: ignore[attr-defined]
    assert len(set(map(id, envs))) == 3
    assert len({id(env.observation_space) for env in envs}) == 1


def test_invalid_environment_class_is_refused() -> None:
    class NoSpaces(SandboxEnv):
        pass

    class Counted(SandboxEnv):
        action_space = AnyText(9)
        observation_space = gym.spaces.Dict({"step": counter()})

    class Nested(SandboxEnv):
        action_space = AnyText(9)
        observation_space = gym.spaces.Dict({"in": gym.spaces.Dict({})})

    cases = {
        NoSpaces: "action_space must be a gymnasium.Space",
        Counted: "'step', which the library adds",
        Nested: "use Text, Box",
    }
    for number, (made, message) in enumerate(cases.items()):
        envs.register(f"Tests/bad{number}-v0")(made)
        with pytest.raises(ValueError, match=message):
            gym.make(f"Tests/bad{number}-v0", tasks=TASKS)

    class Paid(Scripts):
        def __init__(self, *, reward: str = "mine") -> None:
            super().__init__()

    envs.register("Tests/paid-v0")(Paid)
    with pytest.raises(ValueError, match=r"rename \['reward'\]"):
        gym.make("Tests/paid-v0")
    envs.register("Tests/object-v0")(object)
    with pytest.raises(TypeError, match=r"let the class extend clawgym\.envs\.SandboxEnv"):
        gym.make("Tests/object-v0", tasks=TASKS)


def test_env_without_act_raises_not_implemented() -> None:
    class NoAct(SandboxEnv):
        action_space = AnyText(9)
        observation_space = gym.spaces.Dict({"text": AnyText(9)})

    envs.register("Tests/noact-v0")(NoAct)
    with pytest.raises(ValueError, match="has no default_tasks: give tasks="):
        gym.make("Tests/noact-v0")
    env = gym.make("Tests/noact-v0", tasks=TASKS)
    env.reset(seed=0)
    assert "NoAct has no act()" in env.step("x")[4]["error"]
    env.close()


@pytest.mark.parametrize(
    "space",
    [
        AnyText(5),
        JsonList(99),
        gym.spaces.Text(5),
        gym.spaces.Text(5, min_length=0),
        gym.spaces.Discrete(3, start=2),
        gym.spaces.Box(3.0, 4.0, (2, 2)),
        gym.spaces.MultiBinary(3),
        gym.spaces.MultiDiscrete([2, 3]),
        counter(),
    ],
)
def test_blank_is_in_space(space: gym.Space[Any]) -> None:
    assert space.contains(blank(space))


def test_env_from_external_module(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        textwrap.dedent("""
        import gymnasium as gym
        from clawgym.envs import SandboxEnv
        from clawgym.envs.spaces import AnyText
        from clawgym.registry import envs

        @envs.register("Mine/python-v0")
        class Python(SandboxEnv):
            default_tasks = "terminal-basic:train"
            action_space = AnyText(100_000)
            observation_space = gym.spaces.Dict({"output": AnyText(10_000)})

            async def act(self, sandbox, action):
                if action == "submit":
                    self.submit()
                    return {"output": ""}
                done = await sandbox.exec(["python3", "-c", action], cwd=self.task.workspace, timeout=self.seconds)
                return {"output": done.text[-10_000:]}
        """)
    )
    code = (
        "import gymnasium as gym\nenv = gym.make('mine:Mine/python-v0')\n"
        "env.reset(seed=0)\nprint(env.step('print(6 * 7)')[0]['output'], env.step('submit')[4]['outcome'])\nenv.close()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["42", "failed"], done.stderr
