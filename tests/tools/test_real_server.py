"""An unmodified MCP server from the npm registry, offline in a sandbox."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from clawgym.agents import OracleAgent
from clawgym.agents.programs._npm import npm
from clawgym.agents.programs.install import Installation
from clawgym.errors import AgentError
from clawgym.records import DEFAULT_WORKSPACE, Layer, Outcome, Task, TaskFile, ToolServer, VerifierSpec
from clawgym.sandbox import Backend

from ..rollouts import episode_of
from .conftest import opened
from .tasks_with_tools import call

pytest.importorskip("mcp")
PACKAGE = "@modelcontextprotocol/server-filesystem"
VERSION = "2026.8.31"
CHECK = f'test "$(cat {DEFAULT_WORKSPACE}/out/copy.txt)" = "six times seven" && echo 1.0 || echo 0.0\n'


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory, openclaw: Installation) -> Task:
    """A task whose tools are the reference server for files, run by the Node that came with OpenClaw."""
    folder: Path = tmp_path_factory.mktemp("server")
    folder.chmod(0o755)
    try:
        npm(["install", "--prefix", str(folder), f"{PACKAGE}@{VERSION}"], folder, lambda: None)
    except AgentError as error:
        pytest.skip(f"the npm registry is out of reach: {error}")
    digest = hashlib.sha256((folder / "package-lock.json").read_bytes()).hexdigest()
    program = f"/opt/server/node_modules/{PACKAGE}/dist/index.js"
    calls = [
        {"name": "create_directory", "arguments": {"path": f"{DEFAULT_WORKSPACE}/out"}},
        {
            "name": "move_file",
            "arguments": {
                "source": f"{DEFAULT_WORKSPACE}/in.txt",
                "destination": f"{DEFAULT_WORKSPACE}/out/copy.txt",
            },
        },
        {"name": "submit", "arguments": {"message": "moved"}},
    ]
    return Task(
        "move",
        "Move in.txt to out/copy.txt.",
        VerifierSpec("reward_sh", (TaskFile("reward.sh", CHECK.encode()),), mutable_inputs=("in.txt",)),
        inputs=(TaskFile("in.txt", b"six times seven"),),
        layers={
            "/opt/server": Layer(f"npm/{PACKAGE}", digest, folder),
            "/opt/node": Layer("node", openclaw.digest, openclaw.folder / "node"),
        },
        tools=(ToolServer("files", ("/opt/node/bin/node", program, DEFAULT_WORKSPACE)),),
        solution=(TaskFile("solve.json", json.dumps(calls).encode()),),
    )


async def test_its_tools_are_the_agents(task: Task, backend: Backend) -> None:
    async with opened(task, backend) as made:
        names = [tool["function"]["name"] for tool in made.tools.schemas]
        assert {"read_text_file", "write_file", "move_file", "submit"} <= set(names)
        read, listed, outside, wrong = await made(
            call("read_text_file", path=f"{task.workspace}/in.txt"),
            call("list_directory", path=task.workspace),
            call("read_text_file", path="/etc/passwd"),
            call("read_text_file", path=7),
        )
    assert read == "six times seven"
    assert listed == "[FILE] in.txt"
    assert outside.startswith("[error: ")
    assert "outside allowed directories" in outside
    assert "'path', a string" in wrong


async def test_a_task_is_solved_with_it(task: Task, backend: Backend) -> None:
    episode = await episode_of(task, OracleAgent(), backend)
    assert (episode.outcome, episode.error, episode.final_message) == (Outcome.SOLVED, "", "moved")
