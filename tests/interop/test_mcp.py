"""ClawGym as a server of MCP, driven by the client of the official SDK over standard input and output.

Needs the package ``mcp``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mcp.client.stdio", reason="needs MCP: clawgym interop check mcp")

from mcp import StdioServerParameters, stdio_client
from mcp.client.client import Client

TASKS = "terminal-basic:heldout"


@asynccontextmanager
async def client(root: Path, *options: str) -> AsyncIterator[Client]:
    """A client of ``clawgym mcp ROOT``, which it starts."""
    command = ["-c", "from clawgym.cli import main; main()", "mcp", str(root), "--sandbox", "namespace", *options]
    async with Client(stdio_client(StdioServerParameters(command=sys.executable, args=command))) as one:
        yield one


async def called(one: Client, tool: str, **arguments: Any) -> dict[str, Any]:
    answer = await one.call_tool(tool, arguments)
    assert not answer.is_error, answer.content
    assert answer.structured_content is not None
    assert len(json.dumps(answer.structured_content)) <= 41_000
    return answer.structured_content


async def refused(one: Client, tool: str, **arguments: Any) -> str:
    answer = await one.call_tool(tool, arguments)
    assert answer.is_error, answer
    return answer.content[0].text  # pyright: ignore[reportAttributeAccessIssue]


async def evaluated(one: Client, **arguments: Any) -> dict[str, Any]:
    await called(one, "start_evaluation", **arguments)
    return await called(one, "wait_for_evaluation", run=arguments["run"], seconds=120)


async def test_an_assistant_evaluates_and_compares(tmp_path: Path, record_property: Callable[..., None]) -> None:
    told: list[tuple[float, float | None, str | None]] = []

    async def progress(done: float, total: float | None, message: str | None) -> None:
        told.append((done, total, message))

    async with client(tmp_path / "runs") as one:
        tools = {tool.name for tool in (await one.list_tools()).tools}
        assert tools >= {"list_task_sets", "list_agents", "start_evaluation", "get_episode", "compare_runs"}
        assert any(row["name"] == "terminal-basic" for row in (await called(one, "list_task_sets"))["task_sets"])
        assert {"oracle", "noop"} <= {row["name"] for row in (await called(one, "list_agents"))["agents"]}
        started = await called(one, "start_evaluation", task_set=TASKS, agent="oracle", run="good", limit=6)
        assert started["total"] == 6
        busy = await refused(one, "start_evaluation", task_set=TASKS, agent="noop", run="bad")
        assert "in progress" in busy
        answer = await one.call_tool("wait_for_evaluation", {"run": "good", "seconds": 120}, progress_callback=progress)
        assert answer.structured_content is not None
        assert answer.structured_content | {"solved": 6, "done": 6, "state": "finished"} == answer.structured_content
        assert len(told) > 1
        assert told == sorted(told, key=lambda row: row[0])
        bad = await evaluated(one, task_set=TASKS, agent="noop", run="bad", limit=6)
        assert (bad["solved"], bad["state"]) == (0, "finished")
        again = await evaluated(one, task_set=TASKS, agent="noop", run="bad", limit=6)
        assert (again["done"], again["total"]) == (6, 6)
        assert (await called(one, "list_runs"))["runs"] == ["bad", "good"]
        run = await called(one, "get_run", run="good")
        assert run["summary"]["scores"]["strict"]["value"] == 1
        task = run["episodes"][0]["task_id"]
        episode = await called(one, "get_episode", run="good", task_id=task)
        assert episode["outcome"] == "solved"
        assert episode["number_of_steps"] == len(episode["steps"]) > 1
        compared = await called(one, "compare_runs", first="bad", second="good")
        assert compared["scores"]["strict"]["told_apart"] is True
    record_property("held", "the client of the official SDK runs two evaluations, reads an episode and compares them")


async def test_a_stopped_evaluation_resumes(tmp_path: Path, record_property: Callable[..., None]) -> None:
    async with client(tmp_path) as one:
        await called(one, "start_evaluation", task_set=TASKS, agent="oracle", run="a", limit=40)
        stopped = await called(one, "stop_evaluation", run="a")
        assert stopped["state"] == "stopped"
        assert stopped["done"] < 40
        ended = await evaluated(one, task_set=TASKS, agent="oracle", run="a", limit=40)
        assert (ended["done"], ended["total"]) == (40, 40)
    record_property("held", "an evaluation that was stopped resumes by the same call")


REFUSED: list[dict[str, Any]] = [
    {"run": "../out"},
    {"run": "a/b"},
    {"run": "/tmp/x"},
    {"run": "link"},
    {"run": ""},
    {"task_set": "own.py"},
    {"task_set": "terminal-basic:../own.py"},
    {"task_set": "os:system"},
    {"agent": "os:system"},
    {"agent": "script", "agent_options": {"source": "/etc/passwd"}},
    {"agent": "tool-loop", "model": "m", "agent_options": {"base_url": "http://127.0.0.1:9"}},
    {"agent": "tool-loop", "model": "/"},
    {"limit": 0},
    {"samples": 21},
]


async def test_what_could_run_code_is_refused(tmp_path: Path, record_property: Callable[..., None]) -> None:
    root = tmp_path / "runs"
    root.mkdir()
    (root / "link").symlink_to(tmp_path)
    (tmp_path / "own.py").write_text("raise SystemExit('it ran')")
    async with client(root) as one:
        for arguments in REFUSED:
            await refused(one, "start_evaluation", **{"task_set": TASKS, "agent": "noop", "run": "a"} | arguments)
        assert (await called(one, "list_runs"))["runs"] == []
    assert sorted(path.name for path in root.iterdir()) == ["link"]
    record_property("held", f"{len(REFUSED)} arguments that leave the folder or could run code are refused")


async def test_with_trust_options_are_taken(tmp_path: Path) -> None:
    script = tmp_path / "script.sh"
    script.write_text("yes $'\\e[31m' | head -c 200000; echo")
    async with client(tmp_path / "runs", "--trusted") as one:
        options = {"source": str(script)}
        await evaluated(one, task_set=TASKS, agent="script", run="a", limit=1, agent_options=options)
        task = (await called(one, "get_run", run="a"))["episodes"][0]["task_id"]
        episode = await called(one, "get_episode", run="a", task_id=task)
        assert episode["outcome"] == "failed"
        assert "\x1b" not in json.dumps(episode, ensure_ascii=False)
        assert "more characters" in json.dumps(episode)
        for wrong in (
            {"run": "../runs/a"},
            {"run": "none"},
            {"run": "a", "task_id": "none"},
            {"run": "a", "sample": 9},
        ):
            await refused(one, "get_episode", **{"task_id": task} | wrong)
