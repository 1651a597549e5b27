"""Small tasks that bring tools."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from clawgym.records import Limits, Task, TaskFile, ToolCall, ToolServer

from ..verifiers.tasks_for_tests import task

TINY = (TaskFile("server.py", (Path(__file__).parent / "tiny_server.py").read_bytes()),)
LIMITS = Limits(
    max_steps=6, memory_mb=256, disk_mb=64, agent_seconds=60, verify_seconds=10, command_seconds=2, output_bytes=4096
)
CHECK = b"""
import json, os, sys
root = sys.argv[1]
def read(path):
    try:
        return open(os.path.join(root, path)).read()
    except OSError:
        return ""
payload = json.load(open(os.environ["OPENCLAW_REWARD_PAYLOAD"]))
print(json.dumps({"noted": float(read("notes.txt") == "42\\n"), "rest": float(read("ended.txt") == "at rest"),
                  "said": float(payload["final_message"] == "forty-two")}))
"""
RIGHT = [
    {"name": "note", "arguments": {"line": "42"}},
    {"name": "submit", "arguments": {"message": "forty-two"}},
]
WRONG = [{"name": "note", "arguments": {"line": "41"}}, {"name": "submit", "arguments": {"message": "forty-two"}}]


def tiny(name: str = "one", *words: str, **env: str) -> ToolServer:
    """The tiny server under a name; a word is put before the name of each of its tools."""
    return ToolServer(name, ("python3", f"/tools/{name}/server.py", *words), TINY, env)


def noting(*more: ToolServer, **changes: Any) -> Task:
    """Have 42 noted by the server, and say so."""
    made = dataclasses.replace(
        task(CHECK),
        id="note",
        instruction="Note 42, and answer with its name.",
        inputs=(),
        limits=LIMITS,
        tools=(tiny(), *more),
        solution=(TaskFile("solve.json", json.dumps(RIGHT).encode()),),
        wrong_solutions=(
            TaskFile("wrong.json", json.dumps(WRONG).encode()),
            TaskFile("unnoted.json", json.dumps(RIGHT[1:]).encode()),
        ),
    )
    return dataclasses.replace(made, **changes)


def call(name: str, id: str = "1", /, **arguments: Any) -> ToolCall:
    return ToolCall(id, name, arguments)
