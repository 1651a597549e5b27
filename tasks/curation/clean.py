"""Cleaned subsets: the tasks of a set that passed an audit.

The list of a subset is a CSV file in the order of the set, with the columns ``task``, ``hash`` (the first 24 digits of
the content hash) and ``left_out`` (names of flaws, separated by spaces; empty for a task that is kept). ``clawgym tasks
audit`` writes it as ``clean.csv``. The list for the public training tasks is part of the package.
"""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources

from clawgym.errors import TaskError, TaskSetNotFound
from clawgym.records import Task, TaskSet

__all__ = ["HASH_DIGITS", "Verdict", "from_csv", "select", "shipped", "to_csv"]

HASH_DIGITS = 24
_COLUMNS = ["task", "hash", "left_out"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of an audit for one task."""

    task: str
    hash: str
    left_out: tuple[str, ...] = ()
    """Names of flaws; empty if the task is kept."""


def to_csv(verdicts: Iterable[Verdict]) -> str:
    """The list as CSV text."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(_COLUMNS)
    writer.writerows([v.task, v.hash, " ".join(v.left_out)] for v in verdicts)
    return out.getvalue()


def from_csv(text: str, where: str) -> tuple[Verdict, ...]:
    """Read a list. Raises :class:`TaskError`, naming ``where`` and the line, if it is invalid."""
    rows = csv.reader(io.StringIO(text))
    if next(rows, None) != _COLUMNS:
        raise TaskError(f"{where}: line 1 is not {','.join(_COLUMNS)!r}: give a list that `clawgym tasks audit` wrote")
    found = []
    for row in rows:
        if len(row) != len(_COLUMNS) or not row[0] or len(row[1]) != HASH_DIGITS:
            raise TaskError(f"{where}: line {rows.line_num} is not task,hash,left_out: restore it")
        found.append(Verdict(row[0], row[1], tuple(row[2].split())))
    return tuple(found)


def shipped() -> tuple[Verdict, ...]:
    """The list for the public training tasks, from the package."""
    file = resources.files("clawgym.tasks.curation").joinpath("clean.csv")
    return from_csv(file.read_text(encoding="utf-8"), "clean.csv of the package")


def select(tasks: TaskSet, verdicts: Iterable[Verdict], name: str) -> TaskSet:
    """The kept tasks of ``tasks``, in the order of the list and with its ids. Tasks are matched by content hash.

    A task that is missing in ``tasks``, or has another content, is in ``problems``. Raises :class:`TaskSetNotFound` if
    no task matches.
    """
    verdicts = tuple(verdicts)
    by_hash = {task.content_hash[:HASH_DIGITS]: task for task in tasks.tasks}
    kept: list[Task] = []
    problems: dict[str, str] = {}
    for verdict in verdicts:
        if verdict.left_out:
            continue
        if (task := by_hash.get(verdict.hash)) is not None:
            kept.append(task if task.id == verdict.task else dataclasses.replace(task, id=verdict.task))
        elif verdict.task in tasks.problems:
            problems[verdict.task] = tasks.problems[verdict.task]
        elif (other := tasks.by_id.get(verdict.task)) is not None:
            problems[verdict.task] = (
                f"changed since the audit: its hash is {other.content_hash[:12]}, that of the audited task was "
                f"{verdict.hash[:12]}: audit it again with `clawgym tasks audit`, or restore it"
            )
        else:
            problems[verdict.task] = f"is not in {tasks.name}: restore it"
    if not kept:
        raise TaskSetNotFound(
            f"{name}: none of its {len(problems)} tasks is in {tasks.name} as it was audited "
            f"({next(iter(problems.items()), 'the list is empty')}): audit that set with `clawgym tasks audit "
            f"{tasks.name}`"
        )
    return TaskSet(name, tuple(kept), tasks.version, problems)
