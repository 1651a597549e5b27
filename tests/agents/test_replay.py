"""Replaying recorded commands and run folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clawgym.agents import ReplayAgent, ScriptAgent
from clawgym.errors import AgentError
from clawgym.records import ToolCall


def write_lines(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
    return path


async def test_replayed_commands_share_one_shell(work, tmp_path: Path):
    commands = ["mkdir a && cd a && x=7", "echo $x\u2028 > out.txt"]
    path = write_lines(tmp_path / "c.jsonl", {"task_id": "t1", "commands": commands})
    attempt = await work()
    await attempt.run(ReplayAgent.from_path(path))
    assert await attempt.file("a/out.txt") == "7\u2028\n"
    assert [s.tool_calls[0].arguments["command"] for s in attempt.steps] == commands
    assert attempt.steps[0].observations[0].content.endswith("/workspace/a]")


async def test_sample_replays_attempt_of_same_index(work, tmp_path: Path):
    rows = [{"task_id": "t1", "commands": [f"echo {n} > out.txt"]} for n in range(2)]
    agent = ReplayAgent.from_path(write_lines(tmp_path / "c.jsonl", *rows))
    for sample, text in ((0, "0\n"), (1, "1\n"), (5, "0\n")):
        attempt = await work(sample=sample)
        await attempt.run(agent)
        assert await attempt.file("out.txt") == text


async def test_replay_repeats_writes_and_names_skipped_tools(work):
    calls = [
        ToolCall("1", "write_file", {"path": "out.txt", "content": "hi"}),
        ToolCall("2", "read_file", {"path": "out.txt"}),
        ToolCall("3", "web_search", {"q": "x"}),
        ToolCall("4", "submit", {}),
    ]
    attempt = await work()
    report = await attempt.run(ReplayAgent({"t1": [calls]}))
    assert await attempt.file("out.txt") == "hi"
    assert report.final_message == "Not replayed: calls of web_search."


async def test_replay_run_folder(work, tmp_path: Path):
    from clawgym.records import Episode, Outcome
    from clawgym.records.run_folder import RunFolder, make_manifest

    first = await work()
    await first.run(ScriptAgent(b"echo 42 > out.txt"))
    episode = Episode("t1", "h" * 64, 0, 0, "script", Outcome.FAILED, steps=tuple(first.steps))
    with RunFolder.open(tmp_path / "run", make_manifest("eval")) as run:
        run.record(episode)
    attempt = await work()
    await attempt.run(ReplayAgent.from_path(tmp_path / "run"))
    assert await attempt.file("out.txt") == "42\n"
    assert [s.tool_calls for s in attempt.steps] == [s.tool_calls for s in first.steps]


async def test_task_without_recording_raises_agent_error(work):
    attempt = await work()
    with pytest.raises(AgentError, match="record it first"):
        await attempt.run(ReplayAgent({}))


@pytest.mark.parametrize("line", ["{", "[]", "3", '{"task_id": "a"}', '{"task_id": "a", "commands": "ls"}'])
def test_malformed_line_is_named(tmp_path: Path, line: str):
    path = tmp_path / "c.jsonl"
    path.write_text('{"task_id": "a", "commands": []}\n' + line)
    with pytest.raises(AgentError, match=r"c\.jsonl:2"):
        ReplayAgent.from_path(path)


def test_missing_path_is_named(tmp_path: Path):
    with pytest.raises(AgentError, match="run folder"):
        ReplayAgent.from_path(tmp_path / "none")
