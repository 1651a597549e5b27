"""Grades workspaces and transcripts with PinchBench's own functions.

    python pinch_reference.py CLONE < cases.jsonl > scores.jsonl

A case has the ``file`` of a task, a ``folder`` with the workspace, a ``transcript`` in ClawGym's form, and ``judged``:
whether a model judges too.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pinch_cases import answer

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
    lib_grading.ensure_agent_exists = lambda *_: None

    def asked(*, prompt: str, **_: Any) -> dict[str, Any]:
        return {"transcript": list(openclaw([{"role": "assistant", "content": answer(prompt)}]))}

    lib_grading.run_openclaw_prompt = asked
    for line in sys.stdin:
        case = json.loads(line)
        task = loader.load_task(CLONE / "tasks" / case["file"])
        given = {"transcript": list(openclaw(case["transcript"])), "workspace": case["folder"]}
        try:
            if case["judged"]:
                graded = lib_grading.grade_task(task=task, execution_result=given, skill_dir=CLONE)
            else:
                graded = lib_grading._grade_automated(task, given)
            said: Any = graded.score
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        os.write(out, (json.dumps(said) + "\n").encode())


if __name__ == "__main__":
    main()
