"""``snapshot()`` and ``restore()``: the state of an episode, several branches from it, and what is refused."""

from __future__ import annotations

import dataclasses
import gc
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import clawgym  # registers the ids
from clawgym.envs import EnvSnapshot, SandboxEnv, TaskEnv, TaskVectorEnv, _snapshots
from clawgym.envs import make as make_env
from clawgym.envs._runtime import runtime
from clawgym.envs.openclaw import OpenClawEpisodeRunner
from clawgym.envs.spaces import AnyText
from clawgym.errors import SnapshotRefused
from clawgym.records import Limits, TaskSet
from clawgym.rollout import Attempt, EpisodeRequest
from clawgym.sandbox import Backend, SandboxSpec
from clawgym.sandbox.namespace.backend import NamespaceBackend
from clawgym.sandbox.shell_state import restored_shell, saved_shell

from ..tools.tasks_with_tools import noting
from ..verifiers.tasks_for_tests import task
from .messages import says, seen

LIMITS = Limits(max_steps=12, verify_seconds=10, memory_mb=256, disk_mb=64, agent_seconds=60, command_seconds=5)
TASKS = TaskSet("sums", (task(limits=LIMITS),))
RIGHT, WRONG = (f"mkdir -p output; echo {n} > output/sum.txt" for n in (6, 7))


@pytest.fixture
def env() -> Iterator[TaskEnv]:
    made = gym.make("ClawGym/terminal-v0", tasks=TASKS)
    assert isinstance(made, TaskEnv)
    yield made
    made.close()


@pytest.fixture
def batch() -> Iterator[TaskVectorEnv]:
    made = gym.make("ClawGym/terminal-v0", num_envs=3, tasks=TASKS)
    assert isinstance(made, TaskVectorEnv)
    yield made
    made.close()


def held(env: TaskEnv | TaskVectorEnv) -> list[Path]:
    """The saved layers of the environment's backend."""
    backend = env._runner.backend if isinstance(env, TaskEnv) else env._runners[0].backend  # type: ignore[attr-defined]
    assert isinstance(backend, NamespaceBackend)
    state = backend.supervised
    return sorted((state.state / "owners" / state.owner).glob("snapshot-*"))


def test_restored_state_equals_the_saved_one(env: TaskEnv) -> None:
    env.reset(seed=1)
    env.step("mkdir 'a b' && cd 'a b' && X='1 \"é' && export Y=2 && f() { echo \"f $X\"; } && umask 077")
    last, *_ = env.step("echo old > file; rm -r ../input; ln -s file link; false")
    with env.snapshot() as snapshot:
        assert (snapshot.task_id, snapshot.step, snapshot.method) == ("sum", 2, "fork")
        look = 'echo "$? $X $Y $PWD"; f; ls -lR --time-style=full-iso ..; cat file; umask'
        first = env.step(look)
        assert first[0]["output"].startswith('1 1 "é 2 /root/')
        env.step("echo new > file; X=; cd /; unset -f f")
        observation, info = env.restore(snapshot)
        assert observation == last
        assert info["task_id"] == "sum"
        assert info["instruction"] == TASKS.tasks[0].instruction
        assert info["restored"].startswith("fork: ")
        again = env.step(look)
        assert without_sizes(again[0].pop("output")) == without_sizes(first[0].pop("output"))
        assert again == first


def without_sizes(listing: str) -> list[str]:
    """A folder's size and link count depend on its file system."""
    return [line for line in listing.splitlines() if not line.startswith(("total ", "d"))]


def test_branches_are_graded_apart_and_the_snapshot_outlives_them(env: TaskEnv) -> None:
    env.reset(seed=1)
    env.step("echo before")
    snapshot = env.snapshot()
    rewards, steps = [], []
    for work in (RIGHT, WRONG, RIGHT):
        env.step(work)
        result = env.step("submit")
        rewards.append(result[1])
        assert env.episode is not None
        steps.append([step.tool_calls[0].arguments["command"] for step in env.episode.steps if step.tool_calls])
        assert int(env.restore(snapshot)[0]["step"]) == 1
    assert rewards == [1.0, 0.5, 1.0]
    assert steps == [["echo before", work] for work in (RIGHT, WRONG, RIGHT)]
    snapshot.close()
    snapshot.close()
    assert snapshot.closed
    with pytest.raises(SnapshotRefused, match="closed: take another"):
        env.restore(snapshot)
    assert env.step("echo still here")[0]["output"] == "still here\n"


def test_steps_and_time_left_are_restored(env: TaskEnv) -> None:
    env.reset(seed=1)
    runner: Any = env._runner
    most = runner._deadline - asyncio_time()
    snapshot = env.snapshot()
    least = runner._deadline - asyncio_time()
    env.step("sleep 1")
    begun = asyncio_time()
    observation, _ = env.restore(snapshot)
    assert int(observation["remaining_steps"]) == 12
    assert runner._deadline - begun >= least
    assert runner._deadline - asyncio_time() <= most
    for _ in range(11):
        assert not env.step("true")[3]
    assert env.step("true")[3]


def asyncio_time() -> float:
    return runtime().loop.time()


def test_batch_branches_from_one_snapshot(batch: TaskVectorEnv) -> None:
    batch.reset(seed=0)
    batch.step(["X=0", "X=1", "X=2"])
    (snapshot,) = batch.snapshot([1])
    observations, infos = batch.restore(snapshot)
    assert infos["task_id"].tolist() == ["sum"] * 3
    assert observations["step"].tolist() == [1, 1, 1]
    assert batch.step(["echo $X"] * 3)[0]["output"] == ("1\n",) * 3
    batch.step([RIGHT, WRONG, RIGHT])
    _, rewards, terminated, *_ = batch.step(["submit"] * 3)
    assert rewards.tolist() == [1.0, 0.5, 1.0]
    assert terminated.all()
    _, infos = batch.restore([snapshot, snapshot], [0, 2])  # before the autoreset of NEXT_STEP
    assert infos["_task_id"].tolist() == [True, False, True]
    observations, *_ = batch.step(["echo $X"] * 3)
    assert observations["output"] == ("1\n", TASKS.tasks[0].instruction, "1\n")
    assert observations["step"].tolist() == [2, 0, 2]


def test_same_step_autoreset_saves_the_new_episode() -> None:
    batch: Any = gym.make("ClawGym/terminal-v0", num_envs=1, tasks=TASKS, autoreset_mode="SameStep")
    batch.reset(seed=0)
    batch.step(["submit"])
    (snapshot,) = batch.snapshot()
    assert snapshot.step == 0
    batch.step(["X=1"])
    batch.restore(snapshot)
    assert batch.step(["echo $X."])[0]["output"] == (".\n",)
    batch.close()


def test_chain_of_snapshots(env: TaskEnv) -> None:
    """Each fork is a layer over the last; the kernel bounds the number of layers."""
    env.reset(seed=1)
    chain: list[EnvSnapshot] = []
    env.step(RIGHT)
    for n in range(40):
        chain.append(env.snapshot())
        env.restore(chain[0] if n == 20 else chain[-1])
        chain[-1].close() if n > 20 else None
    env.restore(chain[20])
    assert env.step("cat output/sum.txt")[0]["output"] == "6\n"
    assert env.step("submit")[1] == 1.0


def test_nothing_is_left_after_the_last_use(env: TaskEnv) -> None:
    env.reset(seed=1)
    env.step("echo a > a")
    one = env.snapshot()
    env.restore(one)
    two = env.snapshot()
    assert len(held(env)) == 2
    one.close()
    assert len(held(env)) == 2  # the second lies on it
    two.close()
    assert len(held(env)) == 1  # the running episode lies on it
    env.reset(seed=1)
    env.reset(seed=1)  # the end of the episode before the last is waited for
    assert held(env) == []
    env.snapshot()
    gc.collect()
    kept = env.snapshot()
    assert len(held(env)) == 1
    folders = held(env)
    env.close()
    assert kept.closed
    assert not any(folder.exists() for folder in folders)
    kept.close()


def test_number_of_open_snapshots_is_bounded(env: TaskEnv, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_snapshots, "_MOST", 2)
    bounded = make_env(env="ClawGym/terminal-v0", tasks=TASKS)
    assert isinstance(bounded, TaskEnv)
    bounded.reset(seed=1)
    kept = [bounded.snapshot() for _ in range(2)]
    with pytest.raises(SnapshotRefused, match="at most 2 can be: close some"):
        bounded.snapshot()
    kept[0].close()
    bounded.snapshot()
    env.reset(seed=1)
    with pytest.raises(SnapshotRefused, match="another environment"):
        env.restore(kept[1])
    bounded.close()


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("sleep 60 & until grep -q sleep /proc/$!/comm; do :; done", r"programs that run in the sandbox \(sleep\)"),
        ("setsid sleep 60 >/dev/null & disown; exec -a 'x\x1b' true", r"programs that run"),
        ("exec 5>file", r"open files \(descriptors 5\)"),
        ("exec >file", "cannot be read"),
        ("X=$(head -c 300000 /dev/zero | tr '\\0' x)", "256 KiB"),
    ],
)
def test_what_a_fork_cannot_hold_is_refused(env: TaskEnv, command: str, message: str) -> None:
    env.reset(seed=1)
    env.step(command)
    with pytest.raises(SnapshotRefused, match=message):
        env.snapshot()
    assert env.step("true")[1:3] == (0.0, False)


def test_removed_working_folder_is_refused_when_restored(env: TaskEnv) -> None:
    env.reset(seed=1)
    env.step("mkdir d; cd d; rmdir ../d")
    snapshot = env.snapshot()
    with pytest.raises(SnapshotRefused, match="method='replay'"):
        env.restore(snapshot)
    with pytest.raises(clawgym.ClawGymError, match="reset"):
        env.step("true")


def test_without_a_running_episode(env: TaskEnv) -> None:
    with pytest.raises(SnapshotRefused, match="no episode is running"):
        env.snapshot()
    env.reset(seed=1)
    env.step("submit")
    with pytest.raises(SnapshotRefused, match="no episode is running"):
        env.snapshot()
    with pytest.raises(ValueError, match="'fork', 'replay'"):
        env.snapshot(method="copy")  # type: ignore[arg-type]


def test_replay_brings_running_programs_back(env: TaskEnv) -> None:
    env.reset(seed=1)
    env.step("(while :; do sleep 0.05; done) >/dev/null 2>&1 & echo started")
    snapshot = env.snapshot(method="replay")
    steps = list(env._runner.attempt.steps)  # type: ignore[attr-defined]
    _, info = env.restore(snapshot)
    assert info["restored"].startswith("replay: ")
    assert env._runner.attempt.steps == steps  # type: ignore[attr-defined]
    assert env.step("jobs -p | wc -l")[0]["output"] == "1\n"


def test_replay_with_another_result_is_refused(env: TaskEnv) -> None:
    env.reset(seed=1)
    env.step("date +%N")
    snapshot = env.snapshot(method="replay")
    with pytest.raises(SnapshotRefused, match="action 1 had another result"):
        env.restore(snapshot)
    env.reset(seed=1)


def test_busy_environments_and_wrong_ids(batch: TaskVectorEnv) -> None:
    with pytest.raises(gym.error.ResetNeeded):
        batch.snapshot()
    batch.reset(seed=0)
    batch.send(["sleep 0.2"], [1])
    with pytest.raises(gym.error.AlreadyPendingCallError):
        batch.snapshot()
    (snapshot,) = batch.snapshot([0])
    batch.recv()
    with pytest.raises(ValueError, match="use 0 to 2"):
        batch.restore(snapshot, [3])
    with pytest.raises(ValueError, match="once"):
        batch.restore(snapshot, [1, 1])
    with pytest.raises(ValueError, match="2 snapshots for 3"):
        batch.restore([snapshot] * 2)
    batch.step(["sleep 60 &", "true", "true"])
    kept = len(held(batch))
    with pytest.raises(SnapshotRefused):
        batch.snapshot()
    assert len(held(batch)) == kept


def test_swe_holds_shell_and_files() -> None:
    env: Any = gym.make("ClawGym/swe-v0", tasks=TASKS)
    env.reset(seed=1)
    env.step("mkdir d; cd d; X=1")
    env.step(says(("write_file", {"path": "d/a.txt", "content": "one"})))
    with env.snapshot() as snapshot:
        assert snapshot.method == "fork"
        env.step("X=2; echo two > a.txt")
        env.restore(snapshot)
        observation, *_ = env.step('echo "$X $PWD $(cat a.txt)"')
    assert seen(observation)[0].startswith("1 /root/")
    assert " one\n" in seen(observation)[0]
    env.close()


def test_tool_servers_are_replayed() -> None:
    pytest.importorskip("mcp")
    env: Any = gym.make("ClawGym/toolcall-v0", tasks=TaskSet("notes", (noting(),)))
    env.reset(seed=1)
    env.step(says(("note", {"line": "42"}), ("add", {"a": 1}), content="So."))
    snapshot = env.snapshot()
    assert snapshot.method == "replay"
    env.step(says(("note", {"line": "43"})))
    observation, info = env.restore(snapshot)
    assert [m["role"] for m in json.loads(observation["messages"])] == ["tool", "tool"]
    assert [tool["function"]["name"] for tool in info["tools"]][:2] == ["echo", "add"]
    result = env.step(says(("submit", {"message": "forty-two"})))
    assert (result[1], result[4]["outcome"]) == (1.0, "solved")
    assert [len(step.tool_calls) for step in env.episode.steps] == [0, 2, 1]
    env.reset(seed=1)
    with pytest.raises(SnapshotRefused, match="method='replay'"):
        env.snapshot(method="fork")
    env.close()


@pytest.mark.skipif(
    not all(map(shutil.which, ("Xvfb", "openbox", "chromium"))), reason="no Xvfb, openbox, chromium here: make system"
)
def test_desktops_are_replayed() -> None:
    pytest.importorskip("PIL")
    env: Any = gym.make("ClawGym/gui-v0", tasks="gui-basic")
    env.reset(seed=3)
    env.step({"action": "left_click", "coordinate": [300, 300]})
    snapshot = env.snapshot()
    assert snapshot.method == "replay"
    env.step({"action": "key", "keys": ["Tab"]})
    observation, info = env.restore(snapshot)
    assert int(observation["step"]) == 1
    assert info["restored"].startswith("replay: ")
    env.close()


async def test_openclaw_is_refused() -> None:
    nothing: Any = None
    runner = OpenClawEpisodeRunner(nothing, nothing, nothing, None, "official")
    for method in (None, "fork", "replay"):
        with pytest.raises(SnapshotRefused, match="is a running program"):
            await runner.snapshot(method)  # type: ignore[arg-type]


class Counting(SandboxEnv):
    """An environment of somebody else, with a state in Python and no ``save``."""

    action_space = AnyText(100)
    observation_space = gym.spaces.Dict({"count": gym.spaces.Box(0, 100, (), np.int64)})
    default_tasks = TASKS

    async def open(self, sandbox: Any) -> None:
        self.count = 0

    async def act(self, sandbox: Any, action: str) -> Any:
        self.count += len(action)
        return {"count": self.count}


def test_environment_without_save_is_replayed() -> None:
    env: Any = make_env(env=Counting)
    env.reset(seed=1)
    env.step("ab")
    snapshot = env.snapshot()
    assert int(env.step("abc")[0]["count"]) == 5
    assert int(env.restore(snapshot)[0]["count"]) == 2
    assert int(env.step("a")[0]["count"]) == 3
    env.close()


async def test_milestones_of_a_branch(backend: Backend) -> None:
    request = EpisodeRequest(task=task(limits=LIMITS), seed=0, milestones=True)
    first = Attempt(request, backend, "test")
    await first.open()
    call = clawgym.records.ToolCall("1", "bash", {"command": WRONG})
    await first.tools.call_all([call])
    saved = await first.save(files=True)
    await first.abandon()
    ends = []
    for work in ("true", RIGHT):
        branch = Attempt(request, backend, "test")
        await branch.open(saved)
        await branch.tools.call_all([dataclasses.replace(call, arguments={"command": work})])
        ends.append((await branch.finish()).progress)
    assert ends == [(0.0, 0.5, 0.5), (0.0, 0.5, 1.0)]
    assert saved.snapshot is not None
    await backend.drop(saved.snapshot)


@pytest.mark.parametrize(
    "command",
    [
        "declare -A H=([k]=v ['a b']=$'c\\nd'); declare -ai N=(1 2); declare -n ref=H; readonly R=ro; export E",
        "shopt -s extglob expand_aliases nullglob",
        "alias ll='ls -l' eval='echo no' set=false; trap 'echo \"bye\"' USR1 EXIT; set -- a 'b c' ''",
        "set -f; set -o pipefail; set +B; IFS=,; unset TERM HOME",
        "cd /tmp; pushd /usr >/dev/null; mkdir -p '/tmp/x y'; pushd '/tmp/x y' >/dev/null",
        "f() { cat <<E\nhi $1\nE\n}; export -f f; cd() { echo no; }; CDPATH=/usr; OLDPWD=/nowhere",
        "X=$'\\x01\\xff\\n'; printf -v Y '%s' \"'\\\"\\$(echo)\\`\"; PATH=/nowhere",
        "set -x; (exit 200)",
        "set -a -E; (exit 200)",
    ],
)
async def test_shell_state(backend: Backend, command: str) -> None:
    sandbox = await backend.create(SandboxSpec())
    shell = await sandbox.shell()
    await shell.run(command)
    state = await saved_shell(shell)
    assert await saved_shell(shell) == state  # reading changes nothing
    assert await sandbox.programs() == ()
    copy = await restored_shell(sandbox, state)  # compares them
    if "set -x" in command:
        return  # the driver's own lines are shown too
    looks = 'echo "$? $* $X $Y ${H[k]} ${N[1]}"; dirs; type ll f 2>&1; trap -p; echo @(a|b)'
    assert (await copy.run(looks)).text == (await shell.run(looks)).text
    await sandbox.close()


@pytest.mark.parametrize("name", ["declare", "cd", "unset", "set", "compgen", "mapfile", "exit", "trap"])
async def test_functions_named_as_builtins(backend: Backend, name: str) -> None:
    sandbox = await backend.create(SandboxSpec())
    shell = await sandbox.shell()
    await shell.run(f"{name}() {{ echo other; }}; cd /tmp; X=1")
    state = await saved_shell(shell)
    assert "X=" in state.variables
    copy = await restored_shell(sandbox, state)
    assert (await copy.run(f"{name}; echo $X")).text == "other\n1\n"
    await sandbox.close()
