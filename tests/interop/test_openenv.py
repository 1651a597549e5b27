"""OpenEnv's own client on our environments, and environments of its own as ours.

Needs the package ``openenv``, whose dependencies clash with the extra ``tools``: `clawgym interop check openenv` makes
an environment for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest

import clawgym
from clawgym.envs.checker import check_vector_env
from clawgym.interop.openenv import plain

pytest.importorskip("openenv", reason="needs OpenEnv: clawgym interop check openenv")

from openenv.core import GenericEnvClient

from .one_task import EPISODES, FILE, TASK, by_gym_make

TASKS = "terminal-basic:train"
ENV = "ClawGym/terminal-v0"
GUESS = '''
from openenv.core.env_server import Action, Environment, Observation, State, create_app


class Guess(Action):
    number: int


class Hint(Observation):
    hint: str


class Guessing(Environment):
    """Guess a number of 0 to 99, which the seed decides."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._state = State()

    def reset(self, seed=None, episode_id=None, **other):
        self._number, self._state = (seed or 0) % 100, State(episode_id=episode_id)
        return Hint(hint="guess")

    def step(self, action, timeout_s=None, **other):
        self._state.step_count += 1
        found = action.number == self._number
        hint = "found" if found else "more" if action.number < self._number else "less"
        return Hint(hint=hint, done=found, reward=1.0 if found else -0.5, metadata={"tries": self._state.step_count})

    @property
    def state(self):
        return self._state


app = create_app(Guessing, Guess, Hint, max_concurrent_envs=8)
'''


@contextlib.contextmanager
def running(command: list[str], count: int, pattern: str, **options: Any) -> Iterator[list[str]]:
    """Run a server and return what ``pattern`` finds in its first lines."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)
    assert process.stdout is not None
    found: list[str] = []
    said = ""
    try:
        while len(found) < count:
            line = process.stdout.readline()
            said += line
            assert line, said
            found += re.findall(pattern, line)
        yield found
    finally:
        process.terminate()
        process.communicate()


@pytest.fixture(scope="module")
def served() -> Iterator[list[str]]:
    """Address, token, and the address with the token of `clawgym serve-env`."""
    program = Path(sys.executable).with_name("clawgym")
    with running([str(program), "serve-env", ENV, TASKS], 3, r"^(?:url|token|with both): +(\S+)$") as found:
        yield found


def client(served: list[str]) -> GenericEnvClient:
    return GenericEnvClient(base_url=served[0], headers={"Authorization": f"Bearer {served[1]}"})


def actions_of(task: clawgym.Task) -> list[str]:
    """Look around, solve it, look again, submit."""
    solution = next(file for file in task.solution if file.path == "solve.sh")
    return ["pwd; ls -a", "false", solution.read().decode(), "ls; printf 'é\\n'", "submit"]


@pytest.mark.parametrize("solved", [True, False])
async def test_same_observations_and_rewards(
    served: list[str], solved: bool, record_property: Callable[..., None]
) -> None:
    tasks = clawgym.load(TASKS)
    local = gym.make(ENV, tasks=tasks)
    compared, rewards = 0, []
    async with client(served) as remote:
        for task in tasks.tasks[:4]:
            actions = actions_of(task) if solved else ["echo wrong > answer.txt", "submit"]
            observation, info = local.reset(seed=7, options={"task_ids": [task.id]})
            result = await remote.reset(seed=7, task_id=task.id)
            theirs = dict(result.observation)
            assert theirs.pop("metadata") == plain(info)
            assert theirs == plain(observation)
            for action in actions:
                observation, reward, terminated, truncated, info = local.step(action)
                result = await remote.step({"action": action})
                theirs = dict(result.observation)
                theirs.pop("metadata")
                assert theirs == plain(observation)
                assert (result.reward, result.done) == (reward, terminated or truncated)
                compared += 1
            assert result.metadata == {**plain(info), "truncated": truncated}
            rewards.append(result.reward)
            assert (await remote.state())["step_count"] == len(actions)
    local.close()
    assert all(reward == 1 for reward in rewards) if solved else max(rewards) < 1
    what = "solved" if solved else "failed"
    record_property("held", f"{compared} observations, rewards and infos of 4 {what} episodes are those of `gym.make`")


async def test_the_task_of_several_routes(record_property: Callable[..., None]) -> None:
    program = Path(sys.executable).with_name("clawgym")
    with running([str(program), "serve-env", ENV, str(FILE)], 3, r"^(?:url|token|with both): +(\S+)$") as found:
        async with client(found) as remote:
            for what, commands in EPISODES.items():
                played = await asyncio.to_thread(by_gym_make, commands)
                await remote.reset(task_id=TASK.id)
                outputs = [(await remote.step({"action": one})).observation["output"] for one in commands]
                result = await remote.step({"action": "submit"})
                assert (outputs, result.reward) == (played.outputs, played.reward)
                assert result.metadata["checks"] == played.checks
                assert result.metadata["outcome"] == what
    record_property("held", "the outputs, rewards and checks of a task that other routes play are those of `gym.make`")


@pytest.fixture
def tools() -> Iterator[list[str]]:
    """`clawgym serve-env ClawGym/toolcall-v0`, from an environment with the extra ``tools``."""
    apart = os.environ.get("CLAWGYM_APART")
    if apart is None:
        pytest.skip("needs an environment with openenv and the extra tools: clawgym interop check openenv")
    command = [str(Path(apart).with_name("clawgym")), "serve-env", "ClawGym/toolcall-v0", "toolcall-basic:train"]
    with running(command, 3, r"^(?:url|token|with both): +(\S+)$") as found:
        yield found


async def test_tools_from_another_environment(tools: list[str], record_property: Callable[..., None]) -> None:
    """This environment has mcp 1, for fastmcp; the server's has mcp 2, for our tools."""
    assert version("mcp").startswith("1.")
    task = clawgym.load("toolcall-basic:train").tasks[0]
    solution = next(file for file in task.solution if file.path == "solve.json")
    calls = json.loads(solution.read())
    async with client(tools) as env:
        for solved in (True, False):
            result = await env.reset(seed=7, task_id=task.id)
            assert {tool["function"]["name"] for tool in result.metadata["tools"]} > {"submit"}
            for call in calls if solved else [{"name": "submit", "arguments": {"message": "I do not know"}}]:
                action = json.dumps({"content": None, "tool_calls": [{"function": call}]})
                result = await env.step({"action": action})
            assert result.done
            assert result.metadata["outcome"] == ("solved" if solved else "failed"), result.metadata
            assert (result.reward == 1) is solved
    record_property("held", "its client calls tools in `ClawGym/toolcall-v0`, served from an environment with mcp 2")


async def test_32_sessions_at_once(served: list[str], record_property: Callable[..., None]) -> None:
    task = clawgym.load(TASKS).tasks[0]
    everybody = asyncio.Barrier(32)

    async def play(number: int) -> tuple[str, float]:
        async with client(served) as env:
            await env.reset(seed=number, task_id=task.id)
            await everybody.wait()
            await env.step({"action": f"echo {number} > mine"})
            await everybody.wait()
            if number == 0:
                with pytest.raises(Exception, match=r"32|[Cc]apacity"):
                    async with client(served) as one_more:
                        await one_more.reset()
            await everybody.wait()
            seen = await env.step({"action": "cat mine"})
            for action in actions_of(task)[2:] if number % 2 else ["submit"]:
                result = await env.step({"action": action})
            assert result.done
            return seen.observation["output"], result.reward

    played = await asyncio.gather(*(play(number) for number in range(32)))
    assert [output for output, _ in played] == [f"{number}\n" for number in range(32)]
    assert all((reward == 1) is bool(number % 2) for number, (_, reward) in enumerate(played))
    record_property("held", "its client steps 32 sessions at once, each in its own sandbox; the 33rd is refused")


async def test_secret(served: list[str], record_property: Callable[..., None]) -> None:
    import urllib.error
    import urllib.request

    for wrong in (
        GenericEnvClient(base_url=served[0]),
        GenericEnvClient(base_url=f"{served[0]}/s/guess"),
        GenericEnvClient(base_url=served[0], headers={"Authorization": "Bearer guess"}),
    ):
        with pytest.raises(ConnectionError, match="403"):
            await wrong.connect()
    async with GenericEnvClient(base_url=served[2]) as env:
        assert (await env.reset(seed=1)).observation["step"] == 0

    def status(path: str, token: str) -> int:
        request = urllib.request.Request(served[0] + path, headers={"Authorization": f"Bearer {token}"})
        try:
            with urllib.request.urlopen(request) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            return error.code

    found = {path: (status(path, "guess"), status(path, served[1])) for path in ("/health", "/schema", "/state")}
    assert found == {"/health": (401, 200), "/schema": (401, 200), "/state": (401, 404)}
    record_property("held", "without the token there is no session; with it in a header or in the URL there is")


async def test_refused_requests_end_nothing(served: list[str]) -> None:
    async with client(served) as env:
        with pytest.raises(RuntimeError, match="no task"):
            await env.reset(task_id="no-such-task")
        with pytest.raises(RuntimeError, match="reset does not take tsak_id"):
            await env.reset(tsak_id="typing-error")
        await env.reset(seed=1)
        for wrong in ({"action": 5}, {"command": "ls"}, {}):
            with pytest.raises(RuntimeError, match="Invalid message"):
                await env.step(wrong)
        assert (await env.step({"action": "echo on"})).observation["output"] == "on\n"
        await env.step({"action": "submit"})
        with pytest.raises(RuntimeError, match="call reset"):
            await env.step({"action": "ls"})


@pytest.fixture
def echo(tmp_path: Path) -> Iterator[str]:
    """The environment that `openenv init` writes, on its own server."""
    openenv = Path(sys.executable).with_name("openenv")
    command = [str(openenv), "init", "echo_env", "--output-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    with theirs("echo_env.server.app:app", tmp_path) as url:
        yield url


@contextlib.contextmanager
def theirs(app: str, folder: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "uvicorn", app, "--host", "127.0.0.1", "--port", "0"]
    with running(command, 1, r"running on (http://\S+)", cwd=folder) as found:
        yield found[0]


def test_environment_of_openenv_init(echo: str, record_property: Callable[..., None]) -> None:
    env = gym.make("ClawGym/openenv-v0", url=echo, field="message", max_steps=3)
    observation, info = env.reset(seed=1)
    assert '"echoed_message": "Echo Env environment ready!"' in observation["observation"]
    rewards = []
    for message in ("Hello", "é\n" * 4, ""):
        observation, reward, terminated, truncated, info = env.step(message)
        assert env.observation_space.contains(observation)
        assert f'"message_length": {len(message)}' in observation["observation"]
        rewards.append(reward)
    assert rewards == [0.5, 0.8, 0.0]
    assert (terminated, truncated, info["metadata"]["step"]) == (False, True, 3)
    env.close()
    record_property("held", "the environment of `openenv init` runs by `gym.make`, with its rewards")


def test_environments_in_a_batch(tmp_path: Path, record_property: Callable[..., None]) -> None:
    (tmp_path / "guessing.py").write_text(GUESS)
    with theirs("guessing:app", tmp_path) as url:
        envs = gym.make_vec("ClawGym/openenv-v0", num_envs=8, url=url, autoreset_mode="Disabled")
        envs.reset(seed=3)
        low, high = [0] * 8, [100] * 8
        total, over = [0.0] * 8, [False] * 8
        for _ in range(8):
            guesses = [(a + b) // 2 for a, b in zip(low, high, strict=True)]
            playing = [i for i in range(8) if not over[i]]
            if not playing:
                break
            envs.unwrapped.send([f'{{"number": {guesses[i]}}}' for i in playing], playing)
            ids, observation, rewards, terminated, _, _ = envs.unwrapped.recv(len(playing))
            for row, i in enumerate(ids):
                total[i] += rewards[row]
                over[i] = bool(terminated[row])
                more = '"more"' in observation["observation"][row]
                low[i], high[i] = (guesses[i] + 1, high[i]) if more else (low[i], guesses[i])
        assert all(over)
        assert all(one <= 1 and (one - 1) % 0.5 == 0 for one in total)
        assert len(set(total)) > 1, "the seeds differ"
        envs.close()
        check_vector_env(gym.make("ClawGym/openenv-v0", num_envs=2, url=url, max_steps=2), action="{", end_action="[]")
    record_property("held", "8 environments made with its base classes run as one batch, and pass the checker")


def test_wrong_actions_and_a_lost_server(tmp_path: Path) -> None:
    (tmp_path / "guessing.py").write_text(GUESS)
    with theirs("guessing:app", tmp_path) as url:
        env = gym.make("ClawGym/openenv-v0", url=url)
        env.reset(seed=1)
        for wrong in ("", "guess", "[1]", '{"number": "x"}', '{"other": 1}'):
            observation, reward, terminated, truncated, _ = env.step(wrong)
            assert "error" in observation["observation"]
            assert (reward, terminated, truncated) == (0.0, False, False)
        observation = env.step('{"number": -1}')[0]["observation"]
        assert json.loads(observation) == {"hint": "more", "metadata": {"tries": 1}}
    _, reward, terminated, truncated, info = env.step('{"number": 1}')
    assert (reward, terminated, truncated, info["outcome"]) == (0.0, False, True, "infra")
    assert "does not answer" in info["error"]
    _, info = env.reset()
    assert "does not answer" in info["error"]
    assert env.step("{}")[3]
    env.close()
    with pytest.raises(Exception, match="tasks of its own"):
        gym.make("ClawGym/openenv-v0", url=url, tasks=TASKS).reset()
