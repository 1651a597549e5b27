"""The MCP side of tool servers of published sets, over stdin and stdout.

Standard library only: it is mounted as ``tool_server.py`` beside the set's own server.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any


def serve(name: str, make: Callable[[], tuple[Sequence[Any], Callable[[str, dict[str, Any]], str]]]) -> None:
    """Answer one message after another, until stdin ends.

    ``make`` returns the tools, as MCP lists them, and the function that calls one of them. What the set's own code
    prints goes to stderr.
    """
    out, sys.stdout = sys.stdout, sys.stderr
    tools, call = make()
    for line in sys.stdin:
        request = json.loads(line)
        asked, given = request["method"], request.get("params") or {}
        result: dict[str, Any] = {}
        if "id" not in request:
            continue
        if asked == "initialize":
            about = {"name": name, "version": "1"}
            result = {"protocolVersion": given["protocolVersion"], "capabilities": {"tools": {}}, "serverInfo": about}
        elif asked == "tools/list":
            result = {"tools": tools}
        elif asked == "tools/call":
            text = call(given["name"], given.get("arguments") or {})
            result = {"content": [{"type": "text", "text": text}]}
        print(json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": result}), file=out, flush=True)
