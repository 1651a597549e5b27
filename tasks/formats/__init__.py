"""Readers and writers of task folders and files: ClawGym folders, ClawGym rows, Harbor folders; and of others, to be
read alone: rows, and OSWorld's JSON files.

:func:`read` finds out which of them a path holds. One bad task never hides the others: what could
not be read is in :attr:`~clawgym.records.TaskSet.problems`, by folder or line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Literal, get_args

from clawgym.errors import TaskError
from clawgym.records import Task, TaskSet
from clawgym.tasks.formats import clawgym, harbor, osworld
from clawgym.tasks.formats._files import atomic_target
from clawgym.tasks.formats.rows import iter_rows, read_row, write_row

__all__ = ["FORMATS", "Format", "collect", "read", "read_row", "read_task", "write", "write_row"]

Format = Literal["clawgym", "rows", "harbor"]
FORMATS: tuple[Format, ...] = get_args(Format)

_FOLDERS = {"clawgym": clawgym, "harbor": harbor}


def read_task(folder: Path) -> Task:
    """Read one task folder of either layout. Raises :class:`TaskError` if it is neither, or broken."""
    for layout in _FOLDERS.values():
        if layout.is_task(folder):
            return layout.read_task(folder)
    raise TaskError(f"{folder}: has neither data_entry.json nor task.toml, so it is not a task: move it away")


def read(path: Path, *, name: str | None = None, limit: int | None = None) -> TaskSet:
    """Read a task folder, a folder of task folders, a file of rows (JSONL, a JSON list, Parquet), or OSWorld's tasks: a
    JSON file, or a folder of them.

    ``limit`` stops after that many readable tasks. Hidden entries of a folder are left out; any other stray entry is
    in ``problems``. Raises :class:`TaskError` if there is nothing there that looks like a task.
    """
    name = name or (path.stem if path.is_file() else path.resolve().name)
    if not path.exists():
        raise TaskError(f"{path}: does not exist: check the path")
    if path.is_file() and osworld.is_file(path):
        return TaskSet(name, (osworld.read_task(path),))
    if path.is_file():
        tasks = collect(name, iter_rows(path), limit=limit)
    elif any(layout.is_task(path) for layout in _FOLDERS.values()):
        return TaskSet(name, (read_task(path),))
    else:
        tasks = collect(name, osworld.iter_folder(path) if osworld.holds(path) else _iter_folder(path), limit=limit)
    if not tasks.tasks and limit != 0:
        why = "; ".join(f"{where}: {problem}" for where, problem in list(tasks.problems.items())[:3])
        raise TaskError(f"{path}: holds no readable task ({why or 'it is empty'}): check the path")
    return tasks


def _iter_folder(folder: Path) -> Iterator[tuple[str, Callable[[], Task]]]:
    try:
        entries = sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
    except OSError as error:
        raise TaskError(f"{folder}: cannot be listed ({error.strerror}): make it readable") from error
    for entry in entries:
        yield entry.name, _reader(entry)


def _reader(entry: Path) -> Callable[[], Task]:
    def read_entry() -> Task:
        if entry.is_symlink() and not entry.resolve().is_relative_to(entry.parent.resolve()):
            raise TaskError(f"{entry}: is a link out of the set: put a copy of the task there instead")
        if not entry.is_dir():
            raise TaskError(f"{entry}: is a stray file, since a set holds one folder per task: move it away")
        return read_task(entry)

    return read_entry


def collect(name: str, readers: Iterable[tuple[str, Callable[[], Task]]], *, limit: int | None = None) -> TaskSet:
    """The tasks that the readers give, in order, and the problems of the others, by where they are.

    A second task with an id that is taken is a problem, as is an id that differs only in case: ids name folders.
    """
    tasks: list[Task] = []
    problems: dict[str, str] = {}
    taken: dict[str, str] = {}
    for where, reader in readers:
        if limit is not None and len(tasks) >= limit:
            break
        try:
            task = reader()
        except TaskError as error:
            problems[where] = str(error)
            continue
        if (other := taken.setdefault(task.id.casefold(), where)) != where:
            problems[where] = f"{where}: the id {task.id!r} is taken by {other}: rename one of them"
            continue
        tasks.append(task)
    return TaskSet(name, tuple(tasks), problems=problems)


def write(
    tasks: Iterable[Task], dest: Path, format: Format = "clawgym", *, on_task: Callable[[Task], None] | None = None
) -> int:
    """Write ``tasks`` as a new folder of task folders, or as a new JSONL file of rows; return how many.

    ``dest`` appears whole or not at all. Raises :class:`TaskError` if it exists, or if a task cannot be put into this
    format.
    """
    count = 0
    with atomic_target(dest) as target:
        if format == "rows":
            with target.open("wb") as file:
                for task in tasks:
                    file.write(write_row(task))
                    count += 1
                    if on_task:
                        on_task(task)
            return count
        target.mkdir()
        for task in tasks:
            _FOLDERS[format].write_task(task, target / task.id)
            count += 1
            if on_task:
                on_task(task)
    return count
