"""Task sets as rows of whole task folders: the file ``data/test.jsonl`` of a benchmark data set on the Hub.

A row has the task's ``id``, ``instruction``, ``category``, ``level``, ``content_hash`` and ``files``, the files of its
ClawGym folder. Every task that a ClawGym folder can hold has such a row, also with tools, a desktop and binary files.

Invariant: unpacking gives tasks with the content hashes that the rows name, in their order, or an error. Rows are
untrusted: no path leads out of the folder, no link is made, and nothing outside the library is imported for a task.
"""

from __future__ import annotations

import base64
import binascii
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from clawgym.errors import DownloadError, TaskError
from clawgym.records import Task, TaskSet
from clawgym.snapshots import check_paths
from clawgym.tasks.formats import read
from clawgym.tasks.formats.clawgym import read_task, write_task

__all__ = ["DATA", "pack_rows", "unpack"]

DATA = "data/test.jsonl"
"""The file's path in the data set."""
_FORMAT = "clawgym"
_MAX_TASKS, _MAX_FILES = 50_000, 2_000
"""Tasks of a set, and files of a task."""


def pack_rows(tasks: TaskSet) -> Iterator[bytes]:
    """The rows of a set, as lines of JSON.

    Raises :class:`TaskError` for a task that would not be the same after unpacking.
    """
    for task in tasks.tasks:
        with tempfile.TemporaryDirectory(prefix="clawgym-pack-") as scratch:
            folder = Path(scratch, "task")
            write_task(task, folder)
            if read_task(folder).content_hash != task.content_hash:
                raise TaskError(f"task {task.id}: would be another task in a ClawGym folder: export it by hand")
            files = [_packed(path, folder) for path in sorted(folder.rglob("*")) if path.is_file()]
        _check_row(task.id, files)
        row = {
            "id": task.id,
            "instruction": task.instruction,
            "category": str(task.metadata.get("category") or ""),
            "level": str(task.metadata.get("level") or task.metadata.get("difficulty") or ""),
            "content_hash": task.content_hash,
            "files": files,
        }
        yield json.dumps(row, separators=(",", ":")).encode() + b"\n"


def _packed(path: Path, folder: Path) -> dict[str, Any]:
    data = path.read_bytes()
    try:
        text, binary = data.decode(), None
    except UnicodeDecodeError:
        text, binary = None, base64.b64encode(data).decode()
    return {
        "path": path.relative_to(folder).as_posix(),
        "text": text,
        "base64": binary,
        "executable": bool(path.stat().st_mode & 0o100),
    }


def unpack(rows: Path, folder: Path) -> TaskSet:
    """Write the tasks of the file ``rows`` as folders below the new or empty ``folder``, and read them.

    Raises :class:`TaskError`, with the line, for a row that is damaged or is not the task that it names.
    """
    hashes: list[str] = []
    folder.mkdir(parents=True, exist_ok=True)
    with rows.open("rb") as file:
        for number, line in enumerate(file, 1):
            where = f"{rows.name}, line {number}"
            if number > _MAX_TASKS:
                raise TaskError(f"{where}: more than {_MAX_TASKS} tasks: split the set")
            row = _row(line, where)
            _write(row["files"], folder / f"{number:05d}", where)
            task = read_task(folder / f"{number:05d}")
            _check_task(task, row, where)
            hashes.append(task.content_hash)
    tasks = read(folder, format=_FORMAT)
    if [task.content_hash for task in tasks.tasks] != hashes:
        why = next(iter(tasks.problems.values()), "two rows have one id")
        raise TaskError(f"{rows.name}: cannot be read as a set ({why}): ask its author")
    return tasks


def _row(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
        if not isinstance(row["id"], str) or not isinstance(row["content_hash"], str):
            raise TypeError("id and content_hash are texts")
        for file in row["files"]:
            kinds = [isinstance(file[name], str) for name in ("path", "text", "base64")]
            if kinds not in ([True, True, False], [True, False, True]) or not isinstance(file["executable"], bool):
                raise TypeError("a file has a path, a text or base64, and executable")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise TaskError(f"{where}: is no packed task ({error!r}): push the set again") from error
    _check_row(f"{where}: task", row["files"])
    return row


def _check_row(where: str, files: list[dict[str, Any]]) -> None:
    if len(files) > _MAX_FILES:
        raise TaskError(f"{where}: more than {_MAX_FILES} files: split the task")
    try:
        check_paths(file["path"] for file in files)
    except DownloadError as error:
        raise TaskError(f"{where}: {error}") from error
    if len({file["path"] for file in files}) < len(files):
        raise TaskError(f"{where}: a path is there twice: remove one")


def _write(files: list[dict[str, Any]], folder: Path, where: str) -> None:
    folder.mkdir()
    for file in files:
        target = folder / file["path"]
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            data = file["text"].encode() if file["base64"] is None else base64.b64decode(file["base64"], validate=True)
        except (binascii.Error, ValueError) as error:
            raise TaskError(f"{where}: {file['path']!r} cannot be decoded ({error}): push the set again") from error
        with target.open("xb") as out:
            out.write(data)
        target.chmod(0o755 if file["executable"] else 0o644)


def _check_task(task: Task, row: dict[str, Any], where: str) -> None:
    if task.id != row["id"] or task.content_hash != row["content_hash"]:
        raise TaskError(f"{where}: is not the task {row['id']!r} that it names: ask its author")
    user = task.dialogue.user if task.dialogue is not None else ""
    if ":" in task.verifier.grader or ":" in user:
        raise TaskError(
            f"{where}: task {task.id} names code of this machine ({task.verifier.grader or user}), which a downloaded "
            "task may not: read its folder by path if you trust it"
        )
