"""Calls the check function of a task written in Python, and prints its scores as one JSON object.

Runs in the grading sandbox as ``check.py``, beside the task's module, and is part of the hash of every such task.
"""

import contextlib
import json
import sys
import traceback
from pathlib import Path


def scores(workspace):
    with contextlib.redirect_stdout(sys.stderr):
        import task_module  # pyright: ignore[reportMissingImports]

        call = json.loads(Path(__file__).with_name("call.json").read_text(encoding="utf-8"))
        check = getattr(task_module, call["check"])
        try:
            found = check(workspace, **call["expected"])
        except Exception:
            # Most often a file that the agent did not write. Its traceback is in the log of the grading.
            traceback.print_exc()
            return {call["check"]: 0.0}
    if not isinstance(found, dict) or not found:
        raise TypeError("{}() returned {!r}: return a dict, name -> score from 0 to 1".format(call["check"], found))
    return {str(name): float(score) for name, score in found.items()}


print(json.dumps(scores(Path(sys.argv[1]))))
