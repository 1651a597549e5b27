"""What an author of a task format writes: how one task is stored on disk.

>>> from clawgym import Task, TaskFile, VerifierSpec
>>> class NoteFormat(TaskFormat):
...     def is_task(self, path):
...         return path.suffix == ".note"
...
...     def read_task(self, path):
...         check = TaskFile("reward.sh", path.with_suffix(".sh"), executable=True)
...         return Task(path.stem, path.read_text(), VerifierSpec("reward_sh", (check,)))

docs/registry.md says how it gets a name. :func:`clawgym.tasks.read` finds out which format a path has: it asks those
that are built in first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from clawgym.errors import TaskError
from clawgym.records import Task

__all__ = ["Reader", "TaskFormat"]

Reader = Callable[[], Task]
"""Reads one task. Raises :class:`~clawgym.errors.TaskError`, naming file and field, for a broken one."""


class TaskFormat:
    """A format with one file or folder for each task: write :meth:`is_task`, :meth:`read_task`, and
    :meth:`write_task` if it can be written.

    A format that puts many tasks into one file writes :meth:`holds`, :meth:`iter_tasks` and :meth:`write` instead.
    Task files come from others: bound what is read (:mod:`clawgym.tasks.formats._files` does for our own formats), and
    follow no link out of a task.
    """

    def is_task(self, path: Path) -> bool:
        """Whether ``path``, a file or folder that exists, looks like one task. Never raises."""
        return False

    def read_task(self, path: Path) -> Task:
        """The task in ``path``. Raises :class:`~clawgym.errors.TaskError`, naming file and field, for a broken one."""
        raise TaskError(f"{path}: is no single task in this format: name a set of them")

    def write_task(self, task: Task, path: Path) -> None:
        """Write ``task`` as ``path``, which does not exist; reading it back gives the same content hash.

        Raises :class:`~clawgym.errors.TaskError` for a task that cannot be put into this format.
        """
        raise TaskError(f"{path}: this format is only read: write another one (`clawgym list formats`)")

    def holds(self, path: Path) -> bool:
        """Whether ``path`` is a set of tasks that only :meth:`iter_tasks` can read. Never raises."""
        return False

    def iter_tasks(self, path: Path) -> Iterator[tuple[str, Reader]]:
        """The tasks of a set as (where it is, reader), in order. By default those in the folder ``path``.

        Raises :class:`~clawgym.errors.TaskError` if the set cannot be opened.
        """
        return iter_folder(path, [self])

    def write(self, tasks: Iterable[Task], path: Path) -> None:
        """Write a new set. By default a folder, with one task below each id. Raises as :meth:`write_task` does."""
        path.mkdir()
        for task in tasks:
            self.write_task(task, path / task.id)


def iter_folder(folder: Path, formats: Iterable[TaskFormat]) -> Iterator[tuple[str, Reader]]:
    """The entries of ``folder``, each in one of ``formats``; hidden ones are left out."""
    try:
        entries = sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
    except OSError as error:
        raise TaskError(f"{folder}: cannot be listed ({error.strerror}): make it readable") from error
    known = list(formats)
    for entry in entries:
        yield entry.name, _reader(entry, known)


def _reader(entry: Path, formats: Iterable[TaskFormat]) -> Reader:
    def read_entry() -> Task:
        if entry.is_symlink() and not entry.resolve().is_relative_to(entry.parent.resolve()):
            raise TaskError(f"{entry}: is a link out of the set: put a copy of the task there instead")
        return read_one(entry, formats)

    return read_entry


def read_one(path: Path, formats: Iterable[TaskFormat]) -> Task:
    """The task in ``path``, by the first of ``formats`` that knows it. Raises :class:`~clawgym.errors.TaskError`."""
    for one in formats:
        if one.is_task(path):
            return one.read_task(path)
    if not path.is_dir():
        raise TaskError(f"{path}: is a stray file, since a set holds one folder per task: move it away")
    raise TaskError(f"{path}: has neither data_entry.json nor task.toml, so it is not a task: move it away")
