"""Tool server of a tau2-bench task: tools of the agent, and with the prefix ``user_`` those of the customer.

Standard library only: it is mounted as ``server.py`` beside ``tool_server.py``, ``tau2_stage.py``, ``start.json`` and
the package. Each call is written to ``calls.jsonl`` in the workspace, from which the grader repeats it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

FOLDER = os.path.dirname(os.path.abspath(__file__))
PREFIX = "user_"


def make() -> tuple[list[Any], Callable[[str, dict[str, Any]], str]]:
    """The tools of both sides, and the function that calls one."""
    import tau2_stage  # pyright: ignore[reportMissingImports]

    with open(os.path.join(FOLDER, "start.json"), encoding="utf-8") as file:
        start = json.load(file)
    stage = tau2_stage.DomainStage(FOLDER, start["domain"], start["calls"])
    tools = [
        {
            "name": prefix + schema["function"]["name"],
            "description": schema["function"]["description"],
            "inputSchema": schema["function"]["parameters"],
        }
        for requestor, prefix in (("assistant", ""), ("user", PREFIX))
        for schema in stage.schemas(requestor)
    ]
    log = open("calls.jsonl", "w", encoding="utf-8")  # noqa: SIM115  # until the process ends

    def call(name: str, arguments: dict[str, Any]) -> str:
        requestor = "user" if name.startswith(PREFIX) else "assistant"
        made = {"requestor": requestor, "name": name.removeprefix(PREFIX), "arguments": arguments}
        print(json.dumps(made), file=log, flush=True)
        return stage.call(**made)[0]

    return tools, call


if __name__ == "__main__":
    sys.path[:0] = [FOLDER]
    import tool_server  # pyright: ignore[reportMissingImports]

    tool_server.serve("tau2", make)
