"""Tool server of a Claw-Eval task: the tools that the task lists, answered by the set's own services.

Standard library only: it is mounted as ``server.py`` beside ``tool_server.py``, ``claw_stage.py``, ``stand_ins.py``,
``task.json`` and the folder ``claw``. Each call is written to ``calls.jsonl`` in the workspace, from which the grader
repeats it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

FOLDER = os.path.dirname(os.path.abspath(__file__))


def make() -> tuple[list[Any], Callable[[str, dict[str, Any]], str]]:
    """The tools of the task, and the function that calls one."""
    import claw_stage  # pyright: ignore[reportMissingImports]

    with open(os.path.join(FOLDER, "task.json"), encoding="utf-8") as file:
        task = json.load(file)
    log = open("calls.jsonl", "w", encoding="utf-8")  # noqa: SIM115  # until the process ends
    claw_stage.install()
    stage = claw_stage.ServiceStage(os.path.join(FOLDER, "claw"), task)

    def call(name: str, arguments: dict[str, Any]) -> str:
        print(json.dumps({"name": name, "arguments": arguments}), file=log, flush=True)
        return json.dumps(stage.call(name, arguments)[1], ensure_ascii=False)

    tools = [
        {"name": tool["name"], "description": tool["description"], "inputSchema": tool["input_schema"]}
        for tool in task["tools"]
    ]
    return tools, call


if __name__ == "__main__":
    sys.path[:0] = [FOLDER]
    import tool_server  # pyright: ignore[reportMissingImports]

    tool_server.serve("claw", make)
