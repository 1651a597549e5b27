"""Reader and writer of ClawGym task folders.

A task folder holds ``data_entry.json``, ``input_files/`` (if it has inputs) and ``reward/`` with its entry script
``reward.sh``. This library adds ``solution/solve.sh`` and ``wrong/*.sh``. A task with tool servers has
``tools/<server>/``, a task with a desktop has ``site/``; both have ``solution/solve.json`` and ``wrong/*.json``. Fields
that the published layout lacks (limits, workspace, ...) are in one object, ``clawgym``, in ``data_entry.json``; the
original harness ignores it. The page docs/how-to/task-sets.md lists irregularities of the published data and how they
are handled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Literal

from clawgym.errors import TaskError
from clawgym.records import Task, TaskFile, VerifierSpec
from clawgym.registry import formats
from clawgym.tasks.curation.categories import with_category, without_rule_category
from clawgym.tasks.formats._files import (
    check_files,
    check_task_id,
    executes_agent_code,
    make_folder,
    parse_json,
    read_text,
    walk,
    write_files,
)
from clawgym.tasks.formats._reward import reward_sh_files
from clawgym.tasks.formats.protocol import TaskFormat
from clawgym.tools.calls import read_calls
from clawgym.verifiers.protocols import protocol_of
from clawgym.verifiers.protocols.reward_sh import RewardScript

if TYPE_CHECKING:
    from clawgym.tasks.layers import Lock

__all__ = ["ClawGymFormat", "is_task", "read_locks", "read_task", "write_task"]

ENTRY_FILE = "data_entry.json"
AGENT_SEES = ("input_files", "environment")


def is_task(folder: Path) -> bool:
    """Whether ``folder`` looks like a ClawGym task."""
    return (folder / ENTRY_FILE).is_file()


def read_task(folder: Path) -> Task:
    """Read one task folder, without the contents of its inputs.

    Raises :class:`TaskError`, naming file and field, if it is invalid.
    """
    from clawgym.tasks.formats._schema import TaskEntry, validated

    where = str(folder / ENTRY_FILE)
    entry = validated(TaskEntry, parse_json(read_text(folder, ENTRY_FILE), where), where)
    check_task_id(entry.task_id, f"{where}: field task_id")
    extras = entry.clawgym
    calls = bool(extras.tools) or extras.desktop is not None or extras.dialogue is not None
    if extras.metadata is not None:
        raise TaskError(f"{where}: field clawgym.metadata: is for rows only: put it into metadata")
    graded = walk_part(folder, "reward")
    if extras.grader:
        if graded and not any(file.path == "check.py" for file in graded):
            raise TaskError(
                f"{folder}/reward: has no check.py, which is what the grader of {ENTRY_FILE} can run: add it, or take "
                "the folder out"
            )
        verifier = replace(extras.read_grader(where), files=graded)
    else:
        verifier = read_verifier(graded, str(folder / "reward"), extras.protocol)
    return extras.task(
        where,
        verifier,
        id=entry.task_id,
        instruction=entry.user_query,
        inputs=_read_inputs(folder, entry.input_mount_dir, extras.workspace, where),
        metadata=with_category(entry.metadata, entry.user_query),
        solution=check_solution(walk_part(folder, "solution"), f"{folder}/solution", tools=calls),
        wrong_solutions=check_wrong(walk_part(folder, "wrong"), f"{folder}/wrong", tools=calls),
        tool_files=walk_part(folder, "tools"),
        site_files=walk_part(folder, "site"),
        origin=str(folder),
    )


def write_task(task: Task, folder: Path) -> None:
    """Write ``task`` as a new folder. Reading it back gives the same content hash.

    Raises :class:`TaskError` if the folder exists or this format cannot store the task.
    """
    from clawgym.tasks.formats._schema import Extras

    where = f"task {task.id}"
    entry: dict[str, Any] = {
        "task_id": check_task_id(task.id, where),
        "user_query": task.instruction,
        "metadata": without_rule_category(task.metadata),
    }
    if task.inputs:
        entry["input_mount_dir"] = task.workspace
    if extras := Extras.of(task, "reward_sh"):
        entry["clawgym"] = extras
    make_folder(folder)
    (folder / ENTRY_FILE).write_bytes(to_json(entry, where, indent=2))
    served = [replace(f, path=f"{s.name}/{f.path}") for s in task.tools for f in s.files]
    site = task.desktop.site.files if task.desktop and task.desktop.site else ()
    parts = {
        "reward": task.verifier.files if task.verifier.grader else reward_sh_files(task),
        "input_files": task.inputs,
        "tools": served,
        "site": site,
        "solution": task.solution,
        "wrong": task.wrong_solutions,
    }
    for name, files in parts.items():
        if files:
            write_files(folder / name, files)


def read_locks(folder: Path) -> list[Lock]:
    """The locks of the layers of the task in ``folder``. Raises :class:`TaskError` as :func:`read_task` does."""
    from clawgym.tasks.formats._schema import TaskEntry, validated
    from clawgym.tasks.layers import lock_of

    where = str(folder / ENTRY_FILE)
    layers = validated(TaskEntry, parse_json(read_text(folder, ENTRY_FILE), where), where).clawgym.layers
    return [lock_of(body, f"{where}: clawgym.layers[{target!r}]") for target, body in layers.items()]


def to_json(value: Mapping[str, Any], where: str, indent: int | None = None) -> bytes:
    """``value`` as a JSON document with a final newline. Raises :class:`TaskError` if it has no JSON form."""
    try:
        return (json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False) + "\n").encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise TaskError(f"{where}: its metadata cannot be written as JSON ({error}): correct it") from error


def walk_part(folder: Path, name: str) -> tuple[TaskFile, ...]:
    """The files of the part ``name`` of a task folder; empty if it is missing.

    Raises :class:`TaskError` for links out of the task folder. Inputs may not link to other parts of it either.
    """
    part = folder / name
    if part.is_symlink():
        raise TaskError(f"{part}: is a link: replace it by the folder itself")
    if part.exists() and not part.is_dir():
        raise TaskError(f"{part}: is not a folder: move the file away")
    return walk(part, within=None if name in AGENT_SEES else folder) if part.is_dir() else ()


def read_verifier(
    files: tuple[TaskFile, ...], where: str, protocol: Literal["reward_sh", "harbor"] | None = None
) -> VerifierSpec:
    """The verifier of ``files``. If its ``protocol`` is not ``reward_sh``, ``reward.sh`` was added by a writer and is
    left out.

    Raises :class:`TaskError` if the entry script is missing, cannot be run by bash, or needs a missing ``check.py``.
    """
    by_path = {file.path: file for file in files}
    entry = protocol_of(VerifierSpec(protocol or "reward_sh")).entry
    if RewardScript.entry not in by_path:
        raise TaskError(f"{where}/reward.sh: is missing: add it, every verifier needs this entry script")
    if entry not in by_path:
        raise TaskError(f"{where}/{entry}: is missing, but clawgym.protocol is {protocol!r}: restore it")
    if entry != RewardScript.entry:
        del by_path[RewardScript.entry]
    script = by_path[entry].read()
    check_script(script, f"{where}/{entry}")
    if b"/reward/check.py" in script and "check.py" not in by_path:
        raise TaskError(f"{where}/check.py: is missing, but {entry} runs it: restore it")
    by_path[entry] = replace(by_path[entry], executable=True)
    kept = tuple(by_path.values())
    return VerifierSpec(protocol or "reward_sh", kept, executes_agent_code=executes_agent_code(kept, where))


def check_script(script: bytes, where: str) -> None:
    """Raise :class:`TaskError` if ``script`` is empty or has Windows line ends, which bash cannot run."""
    if not script.strip():
        raise TaskError(f"{where}: is empty: write the script")
    if b"\r\n" in script:
        raise TaskError(f"{where}: has Windows line ends, which bash cannot run: convert them to LF")


def check_solution(files: tuple[TaskFile, ...], where: str, *, tools: bool = False) -> tuple[TaskFile, ...]:
    """Return the files of a reference solution. Raises :class:`TaskError` if its entry (``solve.sh``, or ``solve.json``
    for a task with ``tools``) is missing or invalid."""
    if files:
        name, check = ("solve.json", read_calls) if tools else ("solve.sh", check_script)
        entry = next((file for file in files if file.path == name), None)
        if entry is None:
            raise TaskError(f"{where}/{name}: is missing: add it, every solution needs this entry")
        check(entry.read(), f"{where}/{name}")
    return files


def check_wrong(files: tuple[TaskFile, ...], where: str, *, tools: bool = False) -> tuple[TaskFile, ...]:
    """Return the files of wrong solutions: scripts, or lists of calls for a task with ``tools``. Raises
    :class:`TaskError` for other files."""
    ending, kind, check = (".json", "lists of calls", read_calls) if tools else (".sh", "scripts", check_script)
    for file in files:
        if not file.path.endswith(ending) or "/" in file.path:
            raise TaskError(f"{where}/{file.path}: only {kind} *{ending} belong here: move it away")
        check(file.read(), f"{where}/{file.path}")
    return files


def _read_inputs(folder: Path, mount: str | None, workspace: str, where: str) -> tuple[TaskFile, ...]:
    """The inputs with their paths below the workspace. Paths are compared by component, not as string prefixes."""
    files = walk_part(folder, "input_files")
    if mount is None:
        if files:
            raise TaskError(
                f"{where}: field input_mount_dir: is missing, but input_files/ has files: set it to {workspace!r}"
            )
        return ()
    if not (folder / "input_files").is_dir():
        raise TaskError(
            f"{folder}/input_files: is missing, but {ENTRY_FILE} sets input_mount_dir: restore it, or remove the field"
        )
    path = PurePosixPath(mount)
    if ".." in path.parts or not path.is_relative_to(workspace):
        raise TaskError(f"{where}: field input_mount_dir: {mount!r} is not in the workspace {workspace!r}: correct it")
    below = path.relative_to(workspace)
    return check_files((replace(f, path=str(below / f.path)) for f in files), where)


@formats.register("clawgym")
class ClawGymFormat(TaskFormat):
    """ClawGym folders: ``data_entry.json``, inputs, a checker, solutions."""

    def is_task(self, path: Path) -> bool:
        return is_task(path)

    def read_task(self, path: Path) -> Task:
        return read_task(path)

    def write_task(self, task: Task, path: Path) -> None:
        write_task(task, path)
