"""Programs that run in boxes and offer tools: a Python session, and worlds over an SQLite file.

Everything here but this file is standard library only, for Python 3.9 or newer, and is mounted into the box as it is.
:func:`interpreter_server` and :func:`world_server` make the :class:`~clawgym.records.ToolServer` of a task.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from clawgym.records import TaskFile, ToolServer

__all__ = ["PARTS", "WORLD_FILE", "interpreter_server", "world_server"]

WORLD_FILE = "world.sqlite"
"""Where a world is, below the workspace."""

PARTS = ("bank", "calendar", "inventory", "mail")

# __main__.py is run with its folder, read-only, to import from. (Python would find it in the folder, and takes a
# quarter of its start for that.)
_FLAGS = ("-E", "-s", "-S", "-B")
_MAIN = "import sys\n\nfrom servers.{module} import main\n\nmain(sys.argv[1:])\n"


def interpreter_server(
    name: str = "python", *, seconds: float = 30.0, output: int = 16 * 1024, memory_mb: int = 512, path: str = ""
) -> ToolServer:
    """The tool ``code_interpreter``. Limits of a call: ``seconds``, and ``output`` bytes kept of both ends together.

    ``memory_mb`` (MiB) is the most private memory of the session; ``path`` folders, separated by ``:``, are importable.
    """
    env = {"PYTHONPATH": path} if path else {}
    argv = (f"{seconds:g}", str(output), str(memory_mb))
    return _server(name, "interpreter", ("_session",), argv, env=env)


def world_server(parts: Sequence[str], seed: Mapping[str, Any], name: str = "world") -> ToolServer:
    """A world with ``parts`` (of :data:`PARTS`), which begins as ``seed``: ``{"today": "2031-03-04", table: rows}``.

    Each row is a list of values in the order of the table's columns. The file is :data:`WORLD_FILE` in the workspace.
    """
    modules = ("world", "_text", *(f"world_{part}" for part in PARTS))
    text = json.dumps(dict(seed), indent=1, ensure_ascii=False, sort_keys=True)
    files = (TaskFile("seed.json", text.encode()),)
    return _server(name, "world", modules, (f"/tools/{name}/seed.json", WORLD_FILE, *parts), files=files)


def _server(
    name: str,
    main: str,
    modules: Sequence[str],
    argv: Sequence[str],
    *,
    files: tuple[TaskFile, ...] = (),
    env: Mapping[str, str] | None = None,
) -> ToolServer:
    folder = Path(__file__).parent
    kept = sorted({main, "clawgym_tools", *modules})
    programs = (
        TaskFile("__main__.py", _MAIN.format(module=main).encode()),
        TaskFile("servers/__init__.py", b""),
        *(TaskFile(f"servers/{module}.py", folder / f"{module}.py") for module in kept),
    )
    return ToolServer(name, ("python3", *_FLAGS, f"/tools/{name}/__main__.py", *argv), (*files, *programs), env or {})
