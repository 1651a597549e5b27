"""Reader of tasks of OSWorld, one JSON file each, within the limits of ClawGym's desktops.

A task is supported if

- its files can be made without a network: commands that create files are interpreted, other commands run in the sandbox
  before the agent's first action, and downloads are read from a folder beside the JSON file with the same name, or from
  a copy of the published files (:data:`CACHE`);
- its programs are on this machine (:mod:`~clawgym.tasks.formats._osworld_programs`);
- its evaluator compares files, settings of programs or the output of a command that only reads, or is ``infeasible``
  (the task is solved by the agent's ``fail``).

Any other task is ``unsupported``, with the reason, which begins with ``image not here``, ``network``, ``platform`` or
``ours``. The workspace is the home folder ``/home/user``; files outside of it are not graded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from clawgym.errors import TaskError
from clawgym.records import Desktop, Limits, Task
from clawgym.registry import formats
from clawgym.tasks.formats import _osworld_programs as programs
from clawgym.tasks.formats._files import check_files, check_task_id, parse_json, read_text
from clawgym.tasks.formats._osworld_evaluator import CheckPlan, ConfigStep, Evaluator, Strict, plan
from clawgym.tasks.formats._osworld_setup import CACHE, HOME, NotSupported, Setup
from clawgym.tasks.formats._schema import validated
from clawgym.tasks.formats.protocol import Reader, TaskFormat

__all__ = ["CACHE", "OsworldFormat", "holds", "is_file", "iter_folder", "read_task"]

_KEYS = {"id", "instruction", "evaluator"}
_LIMITS = Limits(memory_mb=1024, pids=256, max_steps=50)
_LARGER = Limits(memory_mb=4096, pids=1024, max_steps=50, setup_seconds=180)
"""Limits of a task with programs beside the file manager and the editor."""
REASONS = ("image not here", "network", "platform", "ours")
"""What the reason of an unsupported task begins with."""


class _Example(Strict):
    id: str
    instruction: Annotated[str, Field(pattern=r"\S")]
    config: list[ConfigStep] = Field(default=[])
    related_apps: list[str] = Field(default=[])
    evaluator: Evaluator
    proxy: Any = None
    source: Any = None


def is_file(path: Path) -> bool:
    """Whether ``path`` is an OSWorld task."""
    if path.suffix != ".json" or path.name == "data_entry.json" or not path.is_file():
        return False
    try:
        return parse_json(read_text(path.parent, path.name), str(path)).keys() >= _KEYS
    except TaskError:
        return False


def _files(folder: Path) -> Iterator[Path]:
    """JSON files in ``folder`` and its subfolders; in those of ``folder/examples`` if that exists, and then only those
    that ``test_all.json`` lists, if it lists any."""
    examples = folder / "examples"
    listed = _listed(folder / "test_all.json") if examples.is_dir() else set()
    for root in (examples if examples.is_dir() else folder,):
        for entry in sorted(root.iterdir()):
            if entry.is_dir() and not entry.name.startswith("."):
                found = sorted(path for path in entry.iterdir() if path.suffix == ".json")
                yield from (path for path in found if not listed or path.stem in listed)
            elif entry.suffix == ".json":
                yield entry


def _listed(path: Path) -> set[str]:
    """The ids in a list of OSWorld: app -> ids. Empty without such a file."""
    if not path.is_file():
        return set()
    lists = parse_json(read_text(path.parent, path.name), str(path)).values()
    return {name for ids in lists if isinstance(ids, list) for name in ids if isinstance(name, str)}


def holds(path: Path) -> bool:
    """Whether ``path`` is a folder of OSWorld tasks, possibly in subfolders."""
    try:
        return any(map(is_file, islice(_files(path), 5)))
    except OSError:
        return False


def iter_folder(path: Path) -> Iterator[tuple[str, Callable[[], Task]]]:
    """The tasks of the folder ``path`` as (relative path, reader). A reader raises for a JSON file that is no task."""
    for file in _files(path):
        yield str(file.relative_to(path)), partial(read_task, file)


def read_task(path: Path) -> Task:
    """Read the task in the JSON file ``path``. Its downloads are read from the folder of the same name without
    ``.json``. Raises :class:`TaskError`, naming file and field, for an invalid task."""
    where = str(path)
    value = parse_json(read_text(path.parent, path.name), where)
    if not value.keys() >= _KEYS:
        missing = ", ".join(sorted(_KEYS - value.keys()))
        raise TaskError(f"{where}: is not a task, it lacks {missing}: move it away")
    example = validated(_Example, value, where)
    setup = Setup(path.with_suffix(""))
    found = CheckPlan()
    missing: str | None = None
    try:
        for app in example.related_apps:
            if (program := programs.of_app(app)) is not None:
                program.check()
        for number, step in enumerate(example.config):
            setup.step(step.type, step.parameters, f"{where}: field config.{number}.parameters")
        found = plan(example.evaluator, setup, f"{where}: field evaluator")
        found.check()
        _check_offline(example, found)
    except NotSupported as error:
        missing = str(error) if str(error).partition(":")[0] in REASONS else f"ours: {error}"
    inputs = check_files(setup.inputs, where) if missing is None else ()
    desktop = Desktop(1920, 1080)
    if missing is None:
        native = tuple(setup.programs) or (() if setup.opening else (("xfe", "Desktop"),))
        steps = (tuple(setup.opening), tuple(setup.closing))
        desktop = Desktop(1920, 1080, native, opening=steps[0], closing=steps[1])
    return Task(
        id=check_task_id(example.id, f"{where}: field id"),
        instruction=example.instruction,
        verifier=found.verifier(),
        inputs=inputs,
        workspace=HOME,
        limits=_LARGER if desktop.opening or desktop.closing else _LIMITS,
        layers=found.layers() if missing is None else {},
        packages=found.packages,
        desktop=desktop,
        metadata={"category": "desktop", "related_apps": list(example.related_apps)},
        unsupported=missing,
        origin=where,
    )


def _check_offline(example: _Example, found: CheckPlan) -> None:
    """Raise :class:`NotSupported` for a task that sends its agent to the web."""
    browses = {app.lower() for app in example.related_apps} & {"chrome", "browser"}
    if found.infeasible or found.profile:
        return
    if (
        example.proxy is True
        or (browses and len(example.related_apps) > 1)
        or re.search(r"https?://", example.instruction)
    ):
        raise programs.reason("network", "its agent works with pages of the web")


@formats.register("osworld")
class OsworldFormat(TaskFormat):
    """OSWorld's JSON files, a file or a folder of files. Cannot be written."""

    def is_task(self, path: Path) -> bool:
        return is_file(path)

    def read_task(self, path: Path) -> Task:
        return read_task(path)

    def holds(self, path: Path) -> bool:
        return holds(path)

    def iter_tasks(self, path: Path) -> Iterator[tuple[str, Reader]]:
        return iter_folder(path)
