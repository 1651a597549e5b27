"""Task formats: readers and writers of task folders and files.

:func:`read` detects the format of a path; ``clawgym list formats`` lists all formats. An unreadable task does not
affect the others: its error is in :attr:`~clawgym.records.TaskSet.problems`, by folder or line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from clawgym.errors import TaskError
from clawgym.records import Task, TaskSet
from clawgym.registry import formats
from clawgym.tasks.formats._files import atomic_target
from clawgym.tasks.formats.protocol import Reader, TaskFormat, iter_folder, read_one
from clawgym.tasks.formats.rows import RowsFormat, read_row, write_row

__all__ = ["TaskFormat", "collect", "read", "read_row", "read_task", "write", "write_row"]


def _known(format: str | None) -> list[TaskFormat]:
    """The format called ``format``, or all formats."""
    if format is not None:
        return [formats.make(format)]
    return [made() for _, made in formats.things()]


def read_task(path: Path) -> Task:
    """Read one task folder or file of any format. Raises :class:`TaskError` if it has no known format or is invalid."""
    return read_one(path, _known(None))


def read(path: Path, *, name: str | None = None, limit: int | None = None, format: str | None = None) -> TaskSet:
    """Read a task or a set of tasks.

    A set is a folder of tasks (formats may be mixed), a file of rows (JSONL, a JSON list, Parquet), or another path
    that a format recognizes. Hidden entries of a folder are skipped; other unknown entries are in ``problems``.

    Args:
        path: the file or folder.
        name: the name of the set; by default that of the file or folder.
        limit: stop after this many readable tasks.
        format: one of ``clawgym list formats``, or ``package.module:Format``; detected by default.

    Raises :class:`TaskError` if there is no readable task.
    """
    name = name or (path.stem if path.is_file() else path.resolve().name)
    if not path.exists():
        raise TaskError(f"{path}: does not exist: check the path")
    known = _known(format)
    if any(one.is_task(path) for one in known):
        return TaskSet(name, (read_one(path, known),))
    tasks = collect(name, _set_of(path, known), limit=limit)
    if not tasks.tasks and limit != 0:
        why = "; ".join(f"{where}: {problem}" for where, problem in list(tasks.problems.items())[:3])
        raise TaskError(f"{path}: holds no readable task ({why or 'it is empty'}): check the path")
    return tasks


def _set_of(path: Path, known: list[TaskFormat]) -> Iterator[tuple[str, Reader]]:
    for one in known:
        if len(known) == 1 or one.holds(path):
            return one.iter_tasks(path)
    return RowsFormat().iter_tasks(path) if path.is_file() else iter_folder(path, known)


def collect(name: str, readers: Iterable[tuple[str, Reader]], *, limit: int | None = None) -> TaskSet:
    """The tasks of all readers, in order; errors go to ``problems`` under the reader's location.

    A repeated id is a problem, and so is an id that differs only in case, because ids name folders.
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
    tasks: Iterable[Task], dest: Path, format: str = "clawgym", *, on_task: Callable[[Task], None] | None = None
) -> int:
    """Write ``tasks`` as a new set in ``format`` (``clawgym list formats``, or ``package.module:Format``). Returns
    their number.

    ``dest`` appears when it is complete. Raises :class:`TaskError` if it exists, or if the format cannot store a task.
    """
    made: TaskFormat = formats.make(format)
    count = 0

    def counted() -> Iterator[Task]:
        nonlocal count
        for task in tasks:
            yield task
            count += 1
            if on_task:
                on_task(task)

    with atomic_target(dest) as target:
        made.write(counted(), target)
    return count
