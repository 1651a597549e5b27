"""The base class of task formats.

>>> from clawgym import Task, TaskFile, VerifierSpec
>>> from clawgym.registry import formats
>>> @formats.register("note")  # doctest: +SKIP
>>> class NoteFormat(TaskFormat):
...     def is_task(self, path):
...         return path.suffix == ".note"
...
...     def read_task(self, path):
...         check = TaskFile("reward.sh", path.with_suffix(".sh"), executable=True)
...         return Task(path.stem, path.read_text(), VerifierSpec("reward_sh", (check,)))

:func:`clawgym.tasks.read` detects the format of a path; it asks built-in formats first. docs/reference/registry.md says
how to register a format of another package.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from clawgym.errors import TaskError
from clawgym.records import Task

__all__ = ["Reader", "TaskFormat"]

Reader = Callable[[], Task]
"""Reads one task. Raises :class:`~clawgym.errors.TaskError`, naming file and field, for an invalid one."""


class TaskFormat:
    """A format of tasks on disk.

    If each task is one file or folder, override :meth:`is_task` and :meth:`read_task`, and :meth:`write_task` if the
    format can be written. If one file holds many tasks, override :meth:`holds`, :meth:`iter_tasks` and :meth:`write`.

    Task files are untrusted: limit how much is read (as :mod:`clawgym.tasks.formats._files` does for the built-in
    formats), and follow no link out of a task.
    """

    def is_task(self, path: Path) -> bool:
        """Whether ``path``, a file or folder that exists, looks like one task. Never raises."""
        return False

    def read_task(self, path: Path) -> Task:
        """Read the task in ``path``. Raises :class:`~clawgym.errors.TaskError`, naming file and field, if it is
        invalid."""
        raise TaskError(f"{path}: this format has no files or folders of single tasks: give the path of a set")

    def write_task(self, task: Task, path: Path) -> None:
        """Write ``task`` to ``path``, which does not exist. Reading it back must give the same content hash.

        Raises :class:`~clawgym.errors.TaskError` if the format cannot store the task.
        """
        raise TaskError(f"{path}: this format cannot be written: choose another (`clawgym list formats`)")

    def holds(self, path: Path) -> bool:
        """Whether ``path`` is a set of tasks that :meth:`iter_tasks` of this format must read. Never raises."""
        return False

    def iter_tasks(self, path: Path) -> Iterator[tuple[str, Reader]]:
        """The tasks of a set as (location, reader), in order. By default the entries of the folder ``path``.

        Raises :class:`~clawgym.errors.TaskError` if the set cannot be opened.
        """
        return iter_folder(path, [self])

    def write(self, tasks: Iterable[Task], path: Path) -> None:
        """Write a new set. By default a folder with one entry per task, named by its id. Raises as :meth:`write_task`
        does."""
        path.mkdir()
        for task in tasks:
            self.write_task(task, path / task.id)


def iter_folder(folder: Path, formats: Iterable[TaskFormat]) -> Iterator[tuple[str, Reader]]:
    """The entries of ``folder`` as (name, reader), each in one of ``formats``; hidden entries are skipped."""
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
    """Read the task in ``path`` with the first of ``formats`` that accepts it. Raises
    :class:`~clawgym.errors.TaskError` if none does, or if it is invalid."""
    for one in formats:
        if one.is_task(path):
            return one.read_task(path)
    if not path.is_dir():
        raise TaskError(f"{path}: is not a task, and a set holds only tasks: move the file away")
    raise TaskError(f"{path}: has neither data_entry.json nor task.toml, so it is not a task: move it away")
