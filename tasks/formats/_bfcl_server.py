"""Tool server of a BFCL task with several turns: calls act on the set's own classes, as a grader later repeats them.

Standard library only: it is mounted as ``server.py`` beside ``bfcl_checks.py``, ``scene.json`` and the classes.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

FOLDER = os.path.dirname(os.path.abspath(__file__))


def main() -> None:
    """Answer one message after another, until stdin ends."""
    sys.path[:0] = [FOLDER]
    sys.path += sys.argv[1:]
    import bfcl_checks  # pyright: ignore[reportMissingImports]

    with open(os.path.join(FOLDER, "scene.json"), encoding="utf-8") as file:
        scene = json.load(file)
    stage = bfcl_checks.ClassStage(scene["classes"], scene["config"], scene["long"])
    out, sys.stdout = sys.stdout, sys.stderr  # a class may print
    for line in sys.stdin:
        request = json.loads(line)
        asked, given = request["method"], request.get("params") or {}
        result: dict[str, Any] = {}
        if "id" not in request:
            continue
        if asked == "initialize":
            about = {"name": "bfcl", "version": "1"}
            result = {"protocolVersion": given["protocolVersion"], "capabilities": {"tools": {}}, "serverInfo": about}
        elif asked == "tools/list":
            result = {"tools": scene["tools"]}
        elif asked == "tools/call":
            text = stage.call(given["name"], **(given.get("arguments") or {}))
            result = {"content": [{"type": "text", "text": text}]}
        print(json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": result}), file=out, flush=True)


if __name__ == "__main__":
    main()
