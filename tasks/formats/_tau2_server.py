"""Tool server of a tau2-bench task: tools of the agent, and with the prefix ``user_`` those of the customer.

Standard library only: it is mounted as ``server.py`` beside ``tau2_stage.py``, ``start.json`` and the package. Each
call is written to ``calls.jsonl`` in the workspace, from which the grader repeats it.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

FOLDER = os.path.dirname(os.path.abspath(__file__))
PREFIX = "user_"


def main() -> None:
    """Answer one message after another, until stdin ends."""
    sys.path[:0] = [FOLDER]
    import tau2_stage  # pyright: ignore[reportMissingImports]

    out, sys.stdout = sys.stdout, sys.stderr  # a tool may print
    with open(os.path.join(FOLDER, "start.json"), encoding="utf-8") as file:
        start = json.load(file)
    stage = tau2_stage.DomainStage(FOLDER, start["domain"], start["calls"])
    tools = []
    for requestor, prefix in (("assistant", ""), ("user", PREFIX)):
        for schema in stage.schemas(requestor):
            about = schema["function"]
            tools.append(
                {
                    "name": prefix + about["name"],
                    "description": about["description"],
                    "inputSchema": about["parameters"],
                }
            )
    with open("calls.jsonl", "w", encoding="utf-8") as log:
        for line in sys.stdin:
            request = json.loads(line)
            asked, given = request["method"], request.get("params") or {}
            result: dict[str, Any] = {}
            if "id" not in request:
                continue
            if asked == "initialize":
                about = {"name": "tau2", "version": "1"}
                result = {
                    "protocolVersion": given["protocolVersion"],
                    "capabilities": {"tools": {}},
                    "serverInfo": about,
                }
            elif asked == "tools/list":
                result = {"tools": tools}
            elif asked == "tools/call":
                name, arguments = given["name"], given.get("arguments") or {}
                requestor = "user" if name.startswith(PREFIX) else "assistant"
                call = {"requestor": requestor, "name": name.removeprefix(PREFIX), "arguments": arguments}
                print(json.dumps(call), file=log, flush=True)
                text, _ = stage.call(**call)
                result = {"content": [{"type": "text", "text": text}]}
            print(json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": result}), file=out, flush=True)


if __name__ == "__main__":
    main()
