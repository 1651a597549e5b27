"""Harbor folders: written and read back equal; what we cannot run is unsupported with the reason, never scored."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from clawgym import load
from clawgym.errors import TaskError, UnsupportedTask
from clawgym.records import GradingMode, Limits, Task, TaskFile, VerifierSpec
from clawgym.tasks.formats import harbor
from clawgym.tasks.formats.clawgym import read_task as read_clawgym
from clawgym.tasks.formats.clawgym import write_task as write_clawgym
from clawgym.tasks.scaffold import starter

TOML = """\
schema_version = "1.4"
[metadata]
difficulty = "hard"
category = "programming"
since = 2026-01-02
[agent]
timeout_sec = 120.0
[verifier]
timeout_sec = 60.0
[environment]
cpus = 2
memory_mb = 2048
storage_mb = 4096
"""
DOCKERFILE = """\
# a comment
FROM python:3.12-slim AS base
WORKDIR /app
ENV LANG=C.UTF-8 MODE="two words"
COPY data/ ./data/
COPY --chmod=755 run.sh .
RUN apt-get update && apt-get install -y --no-install-recommends \\
    bash \\
    coreutils && rm -rf /var/lib/apt/lists/*
RUN mkdir -p out
CMD ["bash"]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A plain Harbor task, written by hand."""
    root = tmp_path / "plain-task"
    for name, text in {
        "task.toml": TOML,
        "instruction.md": "<!-- canary GUID 1 -->\r\n\r\nSort data/a.txt.\r\nKeep it.\n",
        "environment/Dockerfile": DOCKERFILE,
        "environment/data/a.txt": "b\na\n",
        "environment/run.sh": "echo\n",
        "tests/test.sh": "echo 1 > /logs/verifier/reward.txt\n",
        "tests/test_outputs.py": "import json\n",
        "solution/solve.sh": "sort -o data/a.txt data/a.txt\n",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(text.encode())
    return root


def test_plain_folder_is_read(folder):
    task = harbor.read_task(folder)
    assert task.unsupported is None
    assert task.id == "plain-task"
    assert task.instruction == "Sort data/a.txt.\nKeep it.\n"
    assert task.workspace == "/app"
    assert {f.path: f.executable for f in task.inputs} == {"data/a.txt": False, "run.sh": True, "out/.gitkeep": False}
    assert task.env == {"LANG": "C.UTF-8", "MODE": "two words"}
    assert task.limits == Limits(memory_mb=2048, cpus=2, disk_mb=4096, agent_seconds=120.0, verify_seconds=60.0)
    assert task.metadata == {"difficulty": "hard", "level": "hard", "category": "programming", "since": "2026-01-02"}
    assert task.verifier.protocol == "harbor"
    assert task.verifier.mode is GradingMode.FORK
    assert task.verifier.mutable_inputs == ("*",)
    assert [f.path for f in task.solution] == ["solve.sh"]


UNSUPPORTED = [
    ("environment/Dockerfile", "FROM node:22\nWORKDIR /app\n", "node:22"),
    ("environment/Dockerfile", "FROM python:3.12-alpine\nWORKDIR /app\n", "alpine"),
    ("environment/Dockerfile", "FROM ubuntu\nWORKDIR /app\nRUN pip install numpy\n", "line 3.*pip install numpy"),
    ("environment/Dockerfile", "FROM ubuntu\nWORKDIR /app\nRUN apt-get install -y nginx\n", "nginx"),
    ("environment/Dockerfile", "FROM ubuntu\nWORKDIR /app\nRUN echo $(date) > now\n", "RUN echo"),
    ("environment/Dockerfile", "FROM ubuntu\nWORKDIR /app\nRUN cat <<EOF > x\nhello\nEOF\n", "here-document"),
    ("environment/Dockerfile", "FROM ubuntu\n", "works in /,"),
    ("environment/Dockerfile", "FROM ubuntu\nWORKDIR /usr/src/app\n", "works in /usr/src/app"),
    ("environment/Dockerfile", "FROM ubuntu\nWORKDIR /app\nCOPY run.sh /data/\n", "/data/run.sh lies outside"),
    ("environment/Dockerfile", "FROM ubuntu\nWORKDIR /app\nCOPY gone /app/\n", "'gone', which is not in"),
    ("environment/Dockerfile", "FROM ubuntu\nWORKDIR /app\nCOPY ../tests /app/\n", "outside environment"),
    ("environment/Dockerfile", "FROM ubuntu\nWORKDIR /app\nADD https://x.org/a .\n", "ADD https"),
    ("environment/Dockerfile", "FROM ubuntu\nWORKDIR /app\nENV PATH=/x:$PATH\n", "variable PATH"),
    ("environment/Dockerfile", "FROM ubuntu\nWORKDIR /app\nUSER app\n", "user app"),
    ("environment/Dockerfile", "FROM ubuntu\nFROM debian\nWORKDIR /app\n", "second build stage"),
    ("environment/Dockerfile", 'FROM ubuntu\nWORKDIR /app\nENTRYPOINT ["/start"]\n', "ENTRYPOINT"),
    ("environment/Dockerfile", "", "no FROM"),
    ("environment/docker-compose.yaml", "services: {}\n", "several containers"),
    ("environment/.dockerignore", "*.csv\n", "dockerignore"),
    ("tests/test.sh", "apt-get update\napt-get install -y curl\n", r"tests/test\.sh needs the network: apt-get update"),
    ("tests/test.sh", "curl -LsSf https://x.org/install.sh | sh\n", "curl"),
    ("tests/test.sh", "uvx pytest /tests/test_outputs.py\n", "uvx"),
    ("solution/solve.sh", "pip install numpy\n", r"solution/solve\.sh needs the network"),
    ("tests/.harborignore", "*.pyc\n", "harborignore"),
    ("trajectory.json", "{}", "a conversation that the agent continues"),
    ("task.toml", "[environment]\nallow_internet = true\n", "allow_internet"),
    ("task.toml", "[environment]\nnetwork_mode = 'public'\n", "network_mode"),
    ("task.toml", "[agent]\nnetwork_mode = 'allowlist'\nallowed_hosts = ['x.org']\n", "network"),
    ("task.toml", "[environment]\ngpus = 1\n", "GPU"),
    ("task.toml", "[environment]\nos = 'Windows'\n", "Windows"),
    ("task.toml", "[environment]\nenv = { KEY = '${API_KEY}' }\n", "API_KEY"),
    ("task.toml", "[verifier]\nenv = { KEY = '${API_KEY}' }\n", "API_KEY"),
    ("task.toml", "[verifier]\nenvironment_mode = 'separate'\n", "second image"),
    ("task.toml", "[agent]\nuser = 'agent'\n", "user 'agent'"),
    ("task.toml", "[[environment.mcp_servers]]\nname = 'x'\n", "MCP"),
    ("task.toml", "[environment.healthcheck]\ncommand = 'true'\n", "healthcheck"),
]


@pytest.mark.parametrize(("name", "text", "reason"), UNSUPPORTED, ids=lambda value: str(value)[:40])
def test_unsupported_folder_has_a_reason(folder, name, text, reason):
    (folder / name).write_text(text)
    task = harbor.read_task(folder)
    assert task.unsupported is not None
    assert re.search(reason, task.unsupported), task.unsupported


KINDS = [
    ("tests/test.sh", "uvx pytest\n", "network"),
    ("environment/Dockerfile", "FROM node:22\n", "image not here"),
    ("environment/.dockerignore", "*.csv\n", "image not here"),
    ("task.toml", "[environment]\ndocker_image = 'own:1'\n", "image not here"),
    ("task.toml", "[environment]\ngpus = 1\n", "platform"),
    ("task.toml", "[environment]\nos = 'windows'\n", "platform"),
    ("task.toml", "[verifier]\nenv = { KEY = '${API_KEY}' }\n", "platform"),
    ("environment/docker-compose.yaml", "services: {}\n", "ours"),
    ("task.toml", "[verifier]\nenvironment_mode = 'separate'\n", "ours"),
    ("task.toml", "[agent]\nuser = 'agent'\n", "ours"),
    ("task.toml", "[[environment.mcp_servers]]\nname = 'x'\n", "ours"),
    ("task.toml", "[environment.healthcheck]\ncommand = 'true'\n", "ours"),
    ("trajectory.json", "{}", "ours"),
]


@pytest.mark.parametrize(("name", "text", "kind"), KINDS)
def test_reason_has_a_kind(folder, name, text, kind):
    if "docker_image" in text:
        (folder / "environment/Dockerfile").unlink()
    (folder / name).write_text(text)
    assert str(harbor.read_task(folder).unsupported).startswith(f"{kind}: ")


def test_users_of_steps_are_found(folder):
    steps = "[[steps]]\nname = 'one'\n[steps.agent]\nuser = 'app'\n"
    (folder / "task.toml").write_text("[verifier]\nuser = 'root'\n" + steps)
    assert harbor.user_needs(folder) == ["needs the user 'app' ([steps one agent] user)"]


def test_place_of_an_environment(folder):
    """What an environment in Harbor starts from: more than tasks here can hold."""
    environment = folder / "environment"
    lines = ("FROM ubuntu", "ENV A=b", "RUN mkdir /empty", "COPY run.sh /etc/run", "WORKDIR /usr/src")
    (environment / "Dockerfile").write_text("\n".join(lines))
    place = harbor.place_of(environment)
    assert (place.image, place.workdir, place.env) == ("default", "/usr/src", {"A": "b"})
    assert list(place.files) == ["/etc/run"]
    assert place.folders == {"/empty", "/usr/src"}
    (environment / "Dockerfile").write_text("FROM node:22\n")
    with pytest.raises(harbor.MissingImage, match=r"environment/Dockerfile line 1 .* clawgym images build") as found:
        harbor.place_of(environment)
    assert str(found.value).endswith(f" --name {found.value.name}")
    (environment / "Dockerfile").unlink()
    assert harbor.place_of(environment, "debian:12").image == "default"
    with pytest.raises(harbor.MissingImage, match="clawgym images add docker://own:1 --name own:1") as found:
        harbor.place_of(environment, "own:1")
    assert found.value.name is None, "nothing to build"
    with pytest.raises(UnsupportedTask, match="Dockerfile: is missing"):
        harbor.place_of(environment)


def test_place_of_an_exported_task(tmp_path):
    task = next(one for one in load("terminal-basic").tasks if one.inputs)
    harbor.write_task(task, tmp_path / task.id)
    place = harbor.place_of(tmp_path / task.id / "environment")
    assert (place.image, place.workdir) == (task.image, task.workspace)
    assert set(place.files) == {f"{task.workspace}/{file.path}" for file in task.inputs}


SUPPORTED = [
    ("tests/test.sh", "# apt-get update is not needed\ncurl http://localhost:80/\n"),
    ("task.toml", "version = '1.0'\n[environment]\nmemory = '2G'\nstorage = '512M'\n"),
    ("task.toml", "[environment]\nallow_internet = false\nos = 'linux'\nunknown = 3\n[extra]\nx = 1\n"),
    ("environment/Dockerfile", "FROM ubuntu:24.04\nARG D=/app\nWORKDIR $D\nCOPY . ${D}/\nLABEL x=y\nUSER root\n"),
    ("environment/Dockerfile", 'FROM debian:12-slim\nWORKDIR /app\nCOPY ["run.sh", "data/a.txt", "./"]\n'),
]


@pytest.mark.parametrize(("name", "text"), SUPPORTED, ids=lambda value: str(value)[:40])
def test_supported_folder_has_no_reason(folder, name, text):
    (folder / name).write_text(text)
    assert harbor.read_task(folder).unsupported is None


def test_deprecated_sizes_are_mebibytes(folder):
    (folder / "task.toml").write_text("[environment]\nmemory = '2G'\nstorage = '1.5M'\n")
    limits = harbor.read_task(folder).limits
    assert (limits.memory_mb, limits.disk_mb) == (2048, 1)


def test_copy_follows_docker(folder):
    (folder / "environment/Dockerfile").write_text(
        "FROM ubuntu\nWORKDIR /app\nCOPY data new\nCOPY data/a.txt renamed.txt\nCOPY data/a.txt sub/\nCOPY *.sh bin/\n"
    )
    assert [f.path for f in harbor.read_task(folder).inputs] == ["bin/run.sh", "new/a.txt", "renamed.txt", "sub/a.txt"]


def test_prebuilt_plain_image_gets_the_files_of_environment(folder):
    (folder / "environment/Dockerfile").unlink()
    (folder / "task.toml").write_text("[environment]\ndocker_image = 'python:3.13-slim'\nworkdir = '/app'\n")
    task = harbor.read_task(folder)
    assert (task.unsupported, task.workspace) == (None, "/app")
    assert [f.path for f in task.inputs] == ["data/a.txt", "run.sh"]
    (folder / "task.toml").write_text("[environment]\ndocker_image = 'org/own:1'\nworkdir = '/app'\n")
    task = harbor.read_task(folder)
    assert "org/own:1" in str(task.unsupported)
    assert task.image == "org/own:1"


BROKEN = [
    ("task.toml", "schema_version = '2.0'\n", r"task\.toml.*schema_version"),
    ("task.toml", "x = \n", r"task\.toml.*TOML"),
    ("task.toml", "[agent]\ntimeout_sec = nan\n", "agent.timeout_sec"),
    ("task.toml", "[agent]\ntimeout_sec = -1.0\n", "agent.timeout_sec"),
    ("task.toml", "[environment]\nmemory_mb = 0\n", "memory_mb"),
    ("task.toml", "[environment]\nmemory_mb = 'lots'\n", "environment.memory_mb"),
    ("task.toml", "[environment]\nmemory = 'lots'\n", "environment.memory"),
    ("task.toml", "[environment]\ncpus = nan\n", "cpus"),
    ("task.toml", "[metadata.clawgym]\nmodus = 'clean'\n", "modus"),
    ("instruction.md", "# canary\n\n", "instruction"),
    ("tests/test.sh", "", r"test\.sh.*empty"),
    ("tests/test.sh", "a\r\n", r"test\.sh.*Windows"),
]


@pytest.mark.parametrize(("name", "text", "message"), BROKEN, ids=lambda value: str(value)[:40])
def test_invalid_folder_names_the_file(folder, name, text, message):
    (folder / name).write_bytes(text.encode())
    with pytest.raises(TaskError, match=message):
        harbor.read_task(folder)


@pytest.mark.parametrize("name", ["instruction.md", "tests/test.sh", "environment/Dockerfile", "solution/solve.sh"])
def test_missing_file_is_named(folder, name):
    (folder / name).unlink()
    if name == "solution/solve.sh":
        (folder / "solution/other.py").write_text("")
    with pytest.raises(TaskError, match=name.rsplit("/", 1)[-1]):
        harbor.read_task(folder)


def test_several_steps_are_unsupported(folder):
    (folder / "task.toml").write_text("[[steps]]\nname = 'one'\n")
    (folder / "steps/one").mkdir(parents=True)
    (folder / "instruction.md").rename(folder / "steps/one/instruction.md")
    shutil.rmtree(folder / "tests")
    task = harbor.read_task(folder)
    assert "steps" in str(task.unsupported)
    assert "Sort" in task.instruction


FULL = Task(
    id="full",
    instruction="\ufeff\n\n# canary\r\nDo it.",
    verifier=VerifierSpec(
        "reward_sh",
        (TaskFile("reward.sh", b"echo 1\n", executable=True), TaskFile("data/key.bin", b"\x00\xff")),
        mode=GradingMode.FORK,
        mutable_inputs=("a*",),
        env={"SECRET": 'q"\\'},
    ),
    inputs=(TaskFile("a b.txt", b"\xff"), TaskFile("bin/run", b"x", executable=True)),
    workspace="/srv/my job",
    image="registry/own:1",
    limits=Limits(memory_mb=100, pids=9, cpus=0.5, disk_mb=7, agent_seconds=3, verify_seconds=4.5, max_steps=2),
    env={"A": "1 2", "B": "$HOME"},
    metadata={"category": "x", "tags": ["a", {"b": 1.5}], "none": None, "deep key": {"ü": True}},
    solution=(TaskFile("solve.sh", b"true\n"),),
    wrong_solutions=(TaskFile("w.sh", b"false\n"),),
)


WITH_PACKAGES = dataclasses.replace(starter("full"), image="default:python3-cryptography,python3-yaml")


@pytest.mark.parametrize("task", [FULL, starter("full"), WITH_PACKAGES], ids=["full", "starter", "packages"])
def test_written_folder_reads_back_equal(task, tmp_path):
    harbor.write_task(task, tmp_path / "full")
    again = harbor.read_task(tmp_path / "full")
    assert again.content_hash == task.content_hash
    assert (again.unsupported, again.limits) == (task.unsupported, task.limits)
    assert again.verifier.env == task.verifier.env
    assert {k: v for k, v in task.metadata.items() if v is not None}.items() <= again.metadata.items()
    assert {f.path for f in again.solution} == {f.path for f in task.solution}
    assert {f.path for f in again.wrong_solutions} == {f.path for f in task.wrong_solutions}


def test_exported_dockerfile_installs_packages(tmp_path):
    harbor.write_task(WITH_PACKAGES, tmp_path / "full")
    text = (tmp_path / "full/environment/Dockerfile").read_text()
    assert "apt-get install -y python3-cryptography python3-yaml\n" in text


def test_harbor_verifier_survives_both_formats(folder, tmp_path):
    task = harbor.read_task(folder)
    write_clawgym(task, tmp_path / "plain")
    back = read_clawgym(tmp_path / "plain")
    assert back.content_hash == task.content_hash
    assert back.verifier.protocol == "harbor"
    harbor.write_task(back, tmp_path / "plain-task-2")
    assert harbor.read_task(tmp_path / "plain-task-2").content_hash == task.content_hash


def test_changed_dockerfile_of_a_written_folder_is_read(tmp_path):
    harbor.write_task(starter("x"), tmp_path / "x")
    dockerfile = tmp_path / "x/environment/Dockerfile"
    dockerfile.write_text(dockerfile.read_text() + "ENV EXTRA=1\n")
    task = harbor.read_task(tmp_path / "x")
    assert task.env == {"EXTRA": "1"}
    assert task.verifier.protocol == "reward_sh"
    dockerfile.write_text(dockerfile.read_text() + "RUN make\n")
    assert "make" in str(harbor.read_task(tmp_path / "x").unsupported)


def test_tasks_that_harbor_would_misread_are_not_written(tmp_path):
    for changes, message in [
        ({"env": {"A": "${HOME}"}}, "variable A"),
        ({"inputs": (TaskFile("reward/x", b""),)}, "reward/"),
        ({"metadata": {"x": object()}}, "metadata"),
    ]:
        with pytest.raises(TaskError, match=message):
            harbor.write_task(dataclasses.replace(starter("x"), **changes), tmp_path / "x")
        assert not (tmp_path / "x").exists()
    own = dataclasses.replace(starter("x").verifier, files=(*starter("x").verifier.files, TaskFile("test.sh", b"x")))
    with pytest.raises(TaskError, match=r"test\.sh"):
        harbor.write_task(dataclasses.replace(starter("x"), verifier=own), tmp_path / "y")


@pytest.mark.skipif(os.name != "posix", reason="runs bash")
@pytest.mark.parametrize(
    ("work", "more", "reward"),
    [
        ("", "", "0.0"),
        ('{"north": 42, "south": 5, "west": 5}', "", "1.0"),
        ('{"north": 42, "south": 5, "west": 5}', "\necho nan", "0.0"),
        ('{"north": 42, "south": 5, "west": 5}', "\nexit 3", "0.0"),
    ],
)
def test_exported_test_sh_writes_the_reward(tmp_path, work, more, reward):
    """The script as written, with its three absolute folders moved below a scratch folder."""
    workspace = tmp_path / "ws"
    harbor.write_task(dataclasses.replace(starter("x"), workspace=str(workspace)), tmp_path / "x")
    shutil.copytree(tmp_path / "x/environment/inputs", workspace)
    (workspace / "output").mkdir()
    if work:
        (workspace / "output/totals.json").write_text(work)
    tests = tmp_path / "x/tests"
    reward_sh = (tests / "reward.sh").read_text()
    (tests / "reward.sh").write_text(reward_sh.replace("/root/.openclaw/workspace", str(workspace)) + more)
    script = (tests / "test.sh").read_text()
    script = script.replace("/logs/", f"{tmp_path}/logs/").replace("/tests/.", f"{tests}/.")
    subprocess.run(["bash", "-c", script], check=True, timeout=60)
    assert (tmp_path / "logs/verifier/reward.txt").read_text().strip() == reward


def test_written_toml_has_harbors_schema(tmp_path):
    harbor.write_task(FULL, tmp_path / "full")
    document = tomllib.loads((tmp_path / "full/task.toml").read_text())
    assert document["schema_version"] == "1.4"
    assert document["environment"]["memory_mb"] == 100
    assert document["environment"]["network_mode"] == "no-network"
    assert document["verifier"]["timeout_sec"] == 4.5
