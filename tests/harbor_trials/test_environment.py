"""``clawgym.harbor:Environment`` in the real Harbor: what its environments promise, on real sandboxes.

Needs the package ``harbor``, and so Python 3.12: ``python3.12 -m pytest tests/harbor_trials`` in a virtual environment
with this checkout, ``harbor`` and what ``tests/conftest.py`` imports.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

pytest.importorskip("harbor", reason="needs Harbor (Python 3.12): pip install harbor")

from harbor.environments.base import SandboxBuildFailedError
from harbor.models.task.config import NetworkPolicy, TaskConfig
from harbor.models.task.task import Task
from harbor.models.trial.paths import TrialPaths

from clawgym.errors import SandboxError
from clawgym.harbor import Environment, _shared
from clawgym.sandbox.leases import state_dir

TASK = {
    "task.toml": "[environment]\nmemory_mb = 512\nstorage_mb = 64\n[environment.env]\nFROM = 'task'\n",
    "instruction.md": "Write hi to /app/out.txt.\n",
    "environment/Dockerfile": "FROM debian:12\nENV SET=image\nCOPY given.txt /data/\nRUN mkdir /empty\nWORKDIR /app\n",
    "environment/given.txt": "given\n",
    "tests/test.sh": '#!/bin/bash\n[ "$(cat out.txt)" = hi ]\necho $((1 - $?)) > /logs/verifier/reward.txt\n',
    "solution/solve.sh": "#!/bin/bash\necho hi > out.txt\n",
}


def written(folder: Path, **changed: str | None) -> Path:
    for name, text in {**TASK, **changed}.items():
        if text is not None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
    return folder


def made(task: Path, scratch: Path, **given: Any) -> Environment:
    paths = TrialPaths(scratch / "trial")
    paths.mkdir()
    logs = [
        {"type": "bind", "source": str(paths.trial_dir), "target": f"/logs/{name}"}
        for name in ("agent", "verifier", "artifacts")
    ]
    config = Task(task).config.environment
    return Environment(task / "environment", task.name, "one__env", paths, config, auto_mounts=logs, **given)


@pytest_asyncio.fixture
async def environment(tmp_path: Path) -> AsyncIterator[Environment]:
    found = made(written(tmp_path / "task"), tmp_path)
    await found.start(force_build=False)
    yield found
    await found.stop(delete=True)


async def said(environment: Environment, command: str, **options: Any) -> str:
    done = await environment.exec(command, **options)
    assert done.return_code == 0, done
    return done.stdout or ""


async def test_dockerfile_is_followed(environment: Environment) -> None:
    assert (
        await said(environment, "pwd; echo $SET $FROM; cat /data/given.txt; ls -A /empty")
        == "/app\nimage task\ngiven\n"
    )
    assert await said(environment, "stat -c %a /logs/agent /logs/verifier /logs/artifacts") == "777\n" * 3


async def test_commands(environment: Environment) -> None:
    done = await environment.exec("echo out; echo err >&2; exit 7", cwd="/tmp", env={"A": "b c"})
    assert (done.stdout, done.stderr, done.return_code) == ("out\n", "err\n", 7)
    assert await said(environment, 'echo "$A" $PWD', cwd="/tmp", env={"A": "b c"}) == "b c /tmp\n"
    with environment.scoped_exec_env({"A": "scoped"}):
        assert await said(environment, "echo $A", env={"A": "lost"}) == "scoped\n"
    await environment.exec("sleep 1000 & echo $! > /tmp/pid")
    assert await said(environment, "kill -0 $(cat /tmp/pid) && echo runs") == "runs\n", "as after docker exec"
    with pytest.raises(RuntimeError, match="timed out after 1 seconds"):
        await environment.exec("sleep 1000", timeout_sec=1)
    for user in ("root", 0, "0"):
        assert await said(environment, "id -u", user=user) == "0\n"
    with pytest.raises(RuntimeError, match="needs the user 'agent'"), environment.with_default_user("agent"):
        await environment.exec("true")
    texts: list[tuple[str, str]] = []

    async def heard(text: str, stream: str) -> None:
        texts.append((text, stream))

    with environment.scoped_output_callback(heard):
        await environment.exec("echo a; echo b >&2")
    assert texts == [("a\n", "stdout"), ("b\n", "stderr")]


async def test_cancelled_command_is_killed(environment: Environment) -> None:
    running = asyncio.ensure_future(environment.exec("echo $$ > /tmp/pid; exec sleep 1000"))
    while not await environment.is_file("/tmp/pid"):
        pass
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await said(environment, "while kill -0 $(cat /tmp/pid) 2>/dev/null; do :; done", timeout_sec=60)


async def test_uploads(environment: Environment, tmp_path: Path) -> None:
    source = tmp_path / "up"
    (source / "inner/empty").mkdir(parents=True)
    names = ["plain", "inner/two words", "-dash", "new\nline", "quote'\"", "é", "x" * 255]
    for name in names:
        (source / name).write_text(name)
    os.close(os.open(os.fsencode(source) + b"/bytes\xff", os.O_CREAT | os.O_WRONLY))
    (source / "plain").chmod(0o755)
    (source / "link").symlink_to("/etc/hostname")
    await environment.upload_dir(source, "/tests")
    found = await said(
        environment, "cd /tests && find . -mindepth 1 | wc -l; readlink link; stat -c %a plain inner; ls -d inner/empty"
    )
    assert found == f"{len(names) + 5 + 0}\n/etc/hostname\n755\n755\ninner/empty\n".replace(
        str(len(names) + 5), str(len(names) + 5)
    )
    for name in names:
        assert await said(environment, 'cat -- "$NAME"', cwd="/tests", env={"NAME": name}) == name
    await environment.upload_file(source / "plain", "/app/renamed")
    await environment.upload_file(source / "plain", "/app")
    assert await said(environment, "cat renamed plain") == "plainplain"


async def test_hostile_folder_stays_below_its_target(environment: Environment, tmp_path: Path) -> None:
    secret, target = tmp_path / "secret", tmp_path / "down"
    secret.write_text("of this machine")
    (target / "folder").mkdir(parents=True)
    (target / "file").symlink_to(secret)
    (target / "way").symlink_to(tmp_path)
    await said(
        environment,
        f"""mkdir -p /logs/agent/folder /logs/agent/way && cd /logs/agent
        echo mine > file; echo mine > way/secret; echo kept > folder/kept; ln -s folder/kept inner
        ln -s {secret} absolute; ln -s ../../../../../..{secret} climbing; mkfifo pipe; echo a > $'new\\nline'
        ln -s a b; ln -s b a; rm -rf folder/../gone; truncate -s 1M holes""",
    )
    await environment.download_dir("/logs/agent", target)
    assert secret.read_text() == "of this machine"
    assert not (target / "way").is_symlink()
    assert (target / "way/secret").read_text() == (target / "file").read_text() == "mine\n"
    assert (target / "inner").read_text() == "kept\n"
    assert (target / "new\nline").read_text() == "a\n"
    assert (target / "holes").stat().st_size == 2**20
    assert {path.name for path in target.iterdir()} == {
        "file",
        "folder",
        "inner",
        "way",
        "new\nline",
        "holes",
        "a",
        "b",
    }
    (tmp_path / "one").symlink_to(secret)
    await environment.download_file("/logs/agent/file", tmp_path / "one")
    assert (secret.read_text(), (tmp_path / "one").read_text()) == ("of this machine", "mine\n")
    with pytest.raises(SandboxError):
        await environment.download_file("/logs/agent/pipe", tmp_path / "two")
    with pytest.raises(SandboxError, match="not a folder"):
        await environment.download_dir("/logs/agent/file", tmp_path / "three")


async def test_a_link_to_the_folder_is_followed_inside_only(environment: Environment, tmp_path: Path) -> None:
    await said(
        environment,
        "mkdir /elsewhere && echo a > /elsewhere/a && rm -rf /logs/artifacts && ln -s /elsewhere /logs/artifacts",
    )
    await environment.download_dir("/logs/artifacts", tmp_path / "down")
    await environment.download_file("/logs/artifacts/a", tmp_path / "a")
    assert (tmp_path / "down/a").read_text() == (tmp_path / "a").read_text() == "a\n"


async def test_chosen_files_are_downloaded(environment: Environment, tmp_path: Path) -> None:
    await said(
        environment, "mkdir -p /out/deep/skip && cd /out && touch a.log b.txt deep/c.log deep/skip/d.log reward.txt"
    )

    def found(folder: Path) -> set[str]:
        return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}

    await environment.download_dir_filtered(
        source_dir="/out", target_dir=tmp_path / "1", include=["*.log"], exclude=["deep/skip/*"], protect=["reward.txt"]
    )
    assert found(tmp_path / "1") == {"a.log", "deep/c.log", "reward.txt"}
    await environment.download_dir_with_exclusions(
        source_dir="/out", target_dir=tmp_path / "2", exclude=["skip", "*.txt"]
    )
    assert found(tmp_path / "2") == {"a.log", "deep/c.log"}


async def test_full_disk_and_huge_output_cost_no_other(environment: Environment, tmp_path: Path) -> None:
    done = await environment.exec("head -c 1G /dev/zero > big; echo rc $?; tail -c 1 /etc/hostname")
    assert "rc 1" in (done.stdout or "")
    with pytest.raises(SandboxError, match="disk"):
        await environment.upload_file(written(tmp_path / "more") / "instruction.md", "/app/more")
    await said(environment, "rm big")
    done = await environment.exec("head -c 100M /dev/zero | tr '\\0' x; echo end")
    assert len(done.stdout or "") < 5 * 2**20
    assert (done.stdout or "").endswith("end\n")
    assert await said(environment, "echo alive") == "alive\n"


async def test_downloads_are_bounded(tmp_path: Path) -> None:
    environment = made(written(tmp_path / "task"), tmp_path, override_storage_mb=400)
    try:
        await environment.start(force_build=False)
        await said(environment, "mkdir /many /large && cd /many && seq 20001 | xargs touch")
        await said(
            environment, "truncate -s 250M /large/1 /large/2; truncate -s 257M /large-file; tar czf /bomb.gz /large"
        )
        with pytest.raises(SandboxError, match="20000"):
            await environment.download_dir("/many", tmp_path / "many")
        with pytest.raises(SandboxError, match="bytes"):
            await environment.download_dir("/large", tmp_path / "large")
        with pytest.raises(SandboxError, match="bytes"):
            await environment.download_file("/large-file", tmp_path / "large-file")
        with pytest.raises(SandboxError, match="bytes"):
            await environment.download_dir_with_exclusions(
                source_dir="/large", target_dir=tmp_path / "packed", exclude=["none"]
            )
        assert not any((tmp_path / name).exists() for name in ("many", "large", "large-file", "packed"))
    finally:
        await environment.stop(delete=True)


async def test_logs_of_a_dead_sandbox_can_be_read(environment: Environment, tmp_path: Path) -> None:
    await environment.exec("echo last > /logs/agent/log; kill -9 -1; kill -9 1", timeout_sec=60)
    await environment._running().stop()  # type: ignore[attr-defined]
    await environment.download_dir("/logs/agent", tmp_path / "down")
    assert (tmp_path / "down/log").read_text() == "last\n"


async def test_stop_ends_the_sandbox(tmp_path: Path) -> None:
    environment = made(written(tmp_path / "task"), tmp_path)
    await environment.start(force_build=False)
    running = environment._running()
    await environment.stop(delete=False)
    await environment.stop(delete=True)
    assert running.id not in (await _shared()).backend.sandboxes  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="not running"):
        await environment.exec("true")


MODE = "[environment]\nnetwork_mode = '{}'\n"
REFUSED: dict[str, tuple[dict[str, str | None], str]] = {
    "image": ({"environment/Dockerfile": "FROM node:22\n"}, "node:22.*clawgym images add .*clawgym images build"),
    "build": (
        {"environment/Dockerfile": "FROM debian:12\nRUN apt-get install -y gcc\n"},
        "debian:12: is not on this machine.*clawgym images build",
    ),
    "docker_image": (
        {"environment/Dockerfile": None, "task.toml": "[environment]\ndocker_image = 'own/there:1'\n"},
        "clawgym images add docker://own/there:1 --name own/there:1",
    ),
    "compose": ({"environment/docker-compose.yaml": "services: {}\n"}, "several containers"),
    "gpu": ({"task.toml": "[environment]\ngpus = 1\n"}, r"1 GPU\(s\)"),
    "tpu": ({"task.toml": "[environment.tpu]\ntype = 'v6e'\ntopology = '2x2'\n"}, "TPU"),
    "windows": ({"task.toml": "[environment]\nos = 'windows'\n", "tests/test.bat": "exit 0\n"}, "Windows"),
    "public": ({"task.toml": MODE.format("public")}, "needs the network .*--ek allow"),
    "allow_internet": ({"task.toml": "[environment]\nallow_internet = true\n"}, "needs the network"),
    "addresses": (
        {"task.toml": MODE.format("allowlist") + "allowed_hosts = ['10.0.0.0/8']\n"},
        "IPv4 CIDR ranges is not supported",
    ),
    "user": ({"task.toml": "[verifier]\nuser = 'tester'\n"}, "needs the user 'tester'"),
    "script": ({"tests/test.sh": "#!/bin/bash\nuvx pytest\n"}, "tests/test.sh needs the network: uvx.*--ek allow"),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_what_is_missing_is_named_by_the_trial(name: str, tmp_path: Path) -> None:
    changed, message = REFUSED[name]
    task = written(tmp_path / "task", **changed)
    config = Task(task).config
    environment = made(task, tmp_path, network_policy=config.environment.resolve_baseline())  # must not raise
    with pytest.raises(SandboxBuildFailedError, match=message):
        await environment.start(force_build=False)
    await environment.stop(delete=True)


async def test_mounts_are_read_only(tmp_path: Path) -> None:
    task, shared = written(tmp_path / "task"), tmp_path / "shared"
    shared.mkdir()
    (shared / "file").write_text("shared")
    mount = {"type": "bind", "source": str(shared), "target": "/shared"}
    with pytest.raises(SandboxBuildFailedError, match="read_only"):
        await made(task, tmp_path, mounts=[mount]).start(force_build=False)
    environment = made(task, tmp_path, mounts=[mount | {"read_only": True}])
    try:
        await environment.start(force_build=False)
        done = await environment.exec("cat /shared/file; echo b > /shared/file")
        assert (done.stdout, done.return_code) == ("shared", 1)
    finally:
        await environment.stop(delete=True)


async def test_network_follows_the_policy(tmp_path: Path) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            writer.write(b"heard " + line)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    environment = made(written(tmp_path / "task"), tmp_path, allow=f"127.0.0.1:{port}, *.example.org")
    ask = f"""exec 3<>/dev/tcp/127.0.0.1/3128 || exit 5
    printf 'CONNECT 127.0.0.1:{port} HTTP/1.1\\r\\n\\r\\n' >&3; read -r line <&3; read -r _ <&3; echo "$line"
    """
    held = ask + "echo open > /tmp/open; cat <&3; echo cut"
    try:
        await environment.start(force_build=False)
        assert (
            await said(environment, "echo $http_proxy $https_proxy") == "http://127.0.0.1:3128 http://127.0.0.1:3128\n"
        )
        assert " 200 " in await said(environment, ask)
        assert " 403 " in await said(environment, ask.replace(f"127.0.0.1:{port}", "example.com:80"))
        tunnel = asyncio.ensure_future(environment.exec(held, timeout_sec=60))
        while not await environment.is_file("/tmp/open"):
            pass
        await environment.set_network_policy(NetworkPolicy(network_mode="no-network"))
        assert "cut" in ((await tunnel).stdout or ""), "a phase without network keeps no connection"
        assert (await environment.exec(ask)).return_code == 5
        assert await said(environment, "echo $http_proxy") == "\n"
        await environment.set_network_policy(NetworkPolicy(network_mode="public"))
        assert " 200 " in await said(environment, ask)
    finally:
        await environment.stop(delete=True)
        server.close()


async def test_limits_are_set(tmp_path: Path) -> None:
    environment = made(written(tmp_path / "task"), tmp_path, override_storage_mb=32, override_memory_mb=256)
    try:
        await environment.start(force_build=False)
        assert 30_000 < int(await said(environment, "df --output=size -k / | tail -1")) <= 32 * 1024
        if os.geteuid() == 0:
            eat = "python3 -c 'x = bytearray(2**30)'"
            done = await environment.exec(eat)
            assert done.return_code == 137, done
    finally:
        await environment.stop(delete=True)


# -- harbor run

OWNER = re.compile("[0-9a-f]{16}")
QUIET = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "HARBOR_TELEMETRY": "0"}


def started(tasks: Path, jobs: Path, *more: str) -> subprocess.Popen[str]:
    program = [str(Path(sys.executable).with_name("harbor")), "run", "-p", str(tasks), "-o", str(jobs), "-q"]
    scratch = jobs.with_name("scratch")
    scratch.mkdir()
    return subprocess.Popen(
        [*program, "--env", "clawgym.harbor:Environment", *more],
        env=os.environ | QUIET | {"TMPDIR": str(scratch)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(tasks: Path, jobs: Path, *more: str) -> list[dict[str, Any]]:
    running = started(tasks, jobs, *more)
    said, _ = running.communicate(timeout=370)
    assert running.returncode == 0, said
    return read(jobs)


def read(jobs: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(jobs.glob("*/*/result.json"))]


class Watched:
    """The processes of a run and the leases of its supervisors, as far as they were seen."""

    def __init__(self, running: subprocess.Popen[str]) -> None:
        self.running, self.processes, self.leases = running, set[psutil.Process](), set[Path]()

    def until(self, enough: Callable[[list[str]], bool]) -> None:
        """Look until a command line is ``enough``, or the run ends."""
        with contextlib.suppress(psutil.NoSuchProcess):
            top = psutil.Process(self.running.pid)
            while self.running.poll() is None:
                for process in top.children(recursive=True):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        words = process.cmdline()
                        self.processes.add(process)
                        self.leases |= {state_dir() / "owners" / word for word in words if OWNER.fullmatch(word)}
                        if enough(words):
                            return
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.running.wait(0.05)

    def left(self) -> list[object]:
        """What is still there, after a minute for processes to end."""
        _, alive = psutil.wait_procs(self.processes, timeout=60)
        return [*alive, *(lease for lease in self.leases if lease.exists())]


@pytest.mark.timeout(400)
def test_many_trials_leave_nothing(tmp_path: Path) -> None:
    for number in range(4):
        written(tmp_path / f"tasks/task-{number}")
    written(tmp_path / "tasks/unsupported", **{"environment/Dockerfile": "FROM node:22\n"})
    written(tmp_path / "tasks/slow", **{"solution/solve.sh": "#!/bin/bash\n(setsid sleep 1000 &)\nsleep 1000\n"})
    config = TASK["task.toml"] + "[agent]\ntimeout_sec = 3\n"
    (tmp_path / "tasks/slow/task.toml").write_text(config)
    running = started(tmp_path / "tasks", tmp_path / "jobs", "-a", "oracle", "-n", "64", "-k", "4")
    watched = Watched(running)
    watched.until(lambda words: False)
    assert running.wait() == 0, running.stdout and running.stdout.read()
    found = read(tmp_path / "jobs")
    assert len(found) == 24
    by_task: dict[str, list[Any]] = {}
    for result in found:
        failed = (result["exception_info"] or {}).get("exception_type")
        reward = ((result["verifier_result"] or {}).get("rewards") or {}).get("reward")
        by_task.setdefault(result["task_name"].rpartition("/")[2], []).append((reward, failed))
    assert by_task.pop("unsupported") == [(None, "SandboxBuildFailedError")] * 4
    assert by_task.pop("slow") == [(0.0, "AgentTimeoutError")] * 4
    assert by_task == {f"task-{number}": [(1.0, None)] * 4 for number in range(4)}
    assert len(watched.processes) > 16
    assert watched.leases
    assert watched.left() == []
    assert list((tmp_path / "scratch").iterdir()) == []


def test_killed_run_leaves_nothing(tmp_path: Path) -> None:
    written(tmp_path / "tasks/task", **{"solution/solve.sh": "#!/bin/bash\nsleep 1000\n"})
    running = started(tmp_path / "tasks", tmp_path / "jobs", "-a", "oracle", "-k", "4")
    watched = Watched(running)
    try:
        watched.until(lambda words: words == ["sleep", "1000"])
        assert running.poll() is None
    finally:
        running.kill()
        running.wait()
    assert len(watched.processes) > 4
    assert [one for one in watched.left() if isinstance(one, psutil.Process)] == []


@pytest.mark.timeout(400)
def test_rewards_are_those_of_clawgym_eval() -> None:
    """The benchmark at a small size: solutions, no work and wrong solutions."""
    program = Path(__file__).parents[2] / "benchmarks/harbor.py"
    command = [sys.executable, str(program), "parity", "--tasks", "2", "--python", sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, timeout=370)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "solutions        2 of 2 the same, mean reward 1.000" in done.stdout
    assert "wrong solutions" in done.stdout
    assert done.stdout.endswith("\n0 rewards differ\n"), done.stdout


def test_steps_separate_verifier_and_artifacts(tmp_path: Path) -> None:
    steps = """schema_version = "1.4"
artifacts = ["/app/first.txt"]
[environment]
network_mode = "no-network"
[[steps]]
name = "first"
min_reward = 1.0
[[steps]]
name = "second"
[steps.healthcheck]
command = "test -f /app/first.txt"
interval_sec = 1
[steps.verifier]
environment_mode = "separate"
env = {WANTED = "one two"}
"""
    test = '#!/bin/bash\n[ "$(cat /app/first.txt)" = "${WANTED:-one}" ]\necho $((1 - $?)) > /logs/verifier/reward.txt\n'
    written(
        tmp_path / "tasks/steps",
        **{
            "task.toml": steps,
            "instruction.md": None,
            "tests/test.sh": None,
            "solution/solve.sh": None,
            "steps/first/instruction.md": "Write one.\n",
            "steps/first/tests/test.sh": test,
            "steps/first/solution/solve.sh": "#!/bin/bash\necho one > first.txt\n",
            "steps/second/instruction.md": "Add two.\n",
            "steps/second/tests/test.sh": test + "[ ! -e /app/kept ] || echo 0 > /logs/verifier/reward.txt\n",
            "steps/second/solution/solve.sh": "#!/bin/bash\ntouch kept\necho one two > first.txt\n",
        },
    )
    (result,) = run(tmp_path / "tasks", tmp_path / "jobs", "-a", "oracle")
    assert result["exception_info"] is None, result["exception_info"]
    assert [step["verifier_result"]["rewards"] for step in result["step_results"]] == [{"reward": 1.0}] * 2
    (kept,) = (tmp_path / "jobs").glob("*/*/steps/second/artifacts/app/first.txt")
    assert kept.read_text() == "one two\n"


# -- the schema


def test_every_field_of_harbors_task_is_known() -> None:
    from clawgym.tasks.formats._harbor_schema import HarborConfig

    assert unknown(TaskConfig, HarborConfig, "task.toml") == set()


def unknown(theirs: Any, ours: Any, where: str) -> set[str]:
    found = {f"{where}: {name}" for name in theirs.model_fields.keys() - ours.model_fields.keys()}
    for name in theirs.model_fields.keys() & ours.model_fields.keys():
        inner = [model_of(kind.model_fields[name].annotation) for kind in (theirs, ours)]
        if inner[0] is not None and inner[1] is not None:
            found |= unknown(*inner, f"{where}: {name}")
    return found


def model_of(annotation: Any) -> Any:
    import typing

    if isinstance(annotation, type) and hasattr(annotation, "model_fields"):
        return annotation
    return next((found for one in typing.get_args(annotation) if (found := model_of(one))), None)
