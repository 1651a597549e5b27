"""Grades workspaces and transcripts with PinchBench's own function for automated grading.

    python pinch_reference.py CLONE < cases.jsonl > scores.jsonl

A case has the ``file`` of a task, a ``folder`` with the workspace, and a ``transcript`` in ClawGym's form.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CLONE = Path(sys.argv[1])


def openclaw(transcript: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The lines of a session file of OpenClaw."""
    for said in transcript:
        content: list[dict[str, Any]] = [{"type": "text", "text": said["content"]}] if said["content"] else []
        content += [
            {"type": "toolCall", "name": call["name"], "arguments": call["arguments"]}
            for call in said.get("tool_calls", ())
        ]
        yield {"type": "message", "message": {"role": said["role"], "content": content}}
        for result in said.get("results", ()):
            body = [{"type": "text", "text": result["content"]}]
            yield {"type": "message", "message": {"role": "toolResult", "content": body}}


def main() -> None:
    """The score of each case, or the error."""
    sys.path.insert(0, str(CLONE / "scripts"))
    import lib_grading  # pyright: ignore[reportMissingImports]
    import lib_tasks  # pyright: ignore[reportMissingImports]

    out = os.dup(1)
    os.dup2(2, 1)  # what grading functions print
    loader = lib_tasks.TaskLoader(CLONE / "tasks")
    for line in sys.stdin:
        case = json.loads(line)
        task = loader.load_task(CLONE / "tasks" / case["file"])
        given = {"transcript": list(openclaw(case["transcript"])), "workspace": case["folder"]}
        try:
            said: Any = lib_grading._grade_automated(task, given).score
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        os.write(out, (json.dumps(said) + "\n").encode())


if __name__ == "__main__":
    main()
