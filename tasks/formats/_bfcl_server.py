"""Tool server of a BFCL task with several turns: calls act on the set's own classes, as a grader later repeats them.

Standard library only: it is mounted as ``server.py`` beside ``tool_server.py``, ``bfcl_checks.py``, ``scene.json`` and
the classes.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

FOLDER = os.path.dirname(os.path.abspath(__file__))


def make() -> tuple[list[Any], Callable[[str, dict[str, Any]], str]]:
    """The tools of the scene, and the function that calls one."""
    import bfcl_checks  # pyright: ignore[reportMissingImports]

    with open(os.path.join(FOLDER, "scene.json"), encoding="utf-8") as file:
        scene = json.load(file)
    stage = bfcl_checks.ClassStage(scene["classes"], scene["config"], scene["long"])
    return scene["tools"], lambda name, arguments: stage.call(name, **arguments)


if __name__ == "__main__":
    sys.path[:0] = [FOLDER]
    sys.path += sys.argv[1:]
    import tool_server  # pyright: ignore[reportMissingImports]

    tool_server.serve("bfcl", make)
