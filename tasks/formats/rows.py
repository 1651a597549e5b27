"""ClawGym rows: one task per JSON line, as in the data sets on the Hub.

A row has ``prompt``, ``hook_code``, ``input_files`` (including the verifier, below ``reward/``), ``rule`` and
``origin_template``, whose front matter holds the id. The checker ``reward/test.py`` of a row is ``check.py`` of a
folder, and the hook becomes ``reward.sh``, so that a task has the same content hash in both formats. This library adds
the keys ``clawgym``, ``solution`` and ``wrong``, and ``executable`` of a file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clawgym.errors import TaskError
from clawgym.records import Task, TaskFile
from clawgym.registry import formats
from clawgym.tasks.curation.categories import with_category, without_rule_category
from clawgym.tasks.formats._files import check_files, check_task_id, decode
from clawgym.tasks.formats._reward import hook_of, normal_hook, reward_sh_files
from clawgym.tasks.formats._tables import iter_values
from clawgym.tasks.formats.clawgym import check_solution, check_wrong, read_verifier, to_json
from clawgym.tasks.formats.protocol import Reader, TaskFormat
from clawgym.verifiers.protocols.reward_sh import standard_reward_sh

if TYPE_CHECKING:
    from clawgym.tasks.formats._schema import Row, RowFile

__all__ = ["RowsFormat", "iter_rows", "read_row", "write_row"]

_DEFAULT_METADATA = {"category": "", "grading_type": "automated"}


def iter_rows(path: Path) -> Iterator[tuple[str, Callable[[], Task]]]:
    """The tasks of a file of rows as (``<file>:<number>``, reader), in order; empty lines are skipped.

    A row without an id gets the id ``task_00042`` by its index among the JSON lines, as the published converter does.
    Raises :class:`TaskError` if the file cannot be opened; a reader raises it for an invalid row.
    """
    index = 0
    for where, value in iter_values(path):
        try:
            row = value()
        except TaskError as error:
            yield where, partial(_refuse, error)
            continue
        yield where, partial(read_row, row, where, f"task_{index:05d}")
        index += 1


def _refuse(error: TaskError) -> Task:
    raise error


def read_row(value: dict[str, Any], where: str = "row", default_id: str = "") -> Task:
    """The task in one row of ClawGym, SWE-bench or mathematics. Raises :class:`TaskError`, naming ``where`` and the
    field, for an invalid row."""
    from clawgym.tasks.formats import math_rows, swe_rows
    from clawgym.tasks.formats._schema import Row, check_folders_only, validated

    if swe_rows.is_row(value):
        return swe_rows.read_row(value, where)
    if math_rows.is_row(value):
        return math_rows.read_row(value, where, default_id)

    row = validated(Row, value, where)
    check_folders_only(row.clawgym, where, "rows")
    task_id = check_task_id(_id_in(row.origin_template) or default_id, f"{where}: field origin_template (id)")
    verifier_files, inputs = _split(row, where)
    metadata = row.clawgym.metadata
    if metadata is None:
        metadata = {**_DEFAULT_METADATA, **({"rule": row.rule} if row.rule else {})}
    return row.clawgym.task(
        where,
        read_verifier(verifier_files, f"{where}: reward", row.clawgym.protocol),
        id=task_id,
        instruction=row.prompt,
        inputs=inputs,
        metadata=with_category(metadata, row.prompt),
        solution=check_solution(_files(row.solution, where), f"{where}: solution"),
        wrong_solutions=check_wrong(_files(row.wrong, where), f"{where}: wrong"),
        origin=where,
    )


def _id_in(template: str | None) -> str:
    """The value of the first ``id:`` line of the front matter, or an empty text."""
    for line in (template or "").splitlines():
        key, colon, value = line.strip().partition(":")
        if colon and key == "id":
            value = value.strip()
            return value[1:-1] if len(value) > 1 and value[0] in "\"'" and value[0] == value[-1] else value
    return ""


def _split(row: Row, where: str) -> tuple[tuple[TaskFile, ...], tuple[TaskFile, ...]]:
    """The files of the verifier, with its entry script, and the inputs."""
    verifier: list[TaskFile] = []
    inputs: list[TaskFile] = []
    for number, file in enumerate(row.input_files or ()):
        field = f"{where}: field input_files.{number}.file_path"
        path = file.file_path.removeprefix("./")
        if path.startswith("reward/"):
            path = path.removeprefix("reward/")
            verifier.append(_task_file(file, "check.py" if path == "test.py" else path, field))
        else:
            inputs.append(_task_file(file, path, field))
    if not verifier:
        raise TaskError(f"{where}: field input_files: has no verifier (files below reward/): add it")
    if not any(file.path == "reward.sh" for file in verifier):
        verifier.append(TaskFile("reward.sh", standard_reward_sh(normal_hook(row.hook_code)), executable=True))
    field = f"{where}: field input_files"
    return check_files(verifier, field), check_files(inputs, field)


def _task_file(file: RowFile, path: str, field: str) -> TaskFile:
    try:
        return file.task_file(path)
    except TaskError as error:
        raise TaskError(f"{field}: {error}") from error


def _files(files: Iterable[RowFile], where: str) -> tuple[TaskFile, ...]:
    return check_files((_task_file(file, file.file_path, where) for file in files), where)


def write_row(task: Task) -> bytes:
    """``task`` as one JSON line. Reading it back gives the same content hash.

    Raises :class:`TaskError` for a task with layers, tools, a desktop or a grader, for files that are not UTF-8 text,
    and for inputs below ``reward/`` (rows keep the verifier there).
    """
    from clawgym.tasks.formats._schema import Extras, check_folders_only

    where = f"task {task.id}"
    check_task_id(task.id, where)
    check_folders_only(task, where, "rows")
    files = [_row_file(file, file.path, where) for file in task.inputs]
    if any(file["file_path"].startswith("reward/") for file in files):
        raise TaskError(f"{where}: has an input below reward/, where rows keep the verifier: write folders instead")
    hook = None
    for file in reward_sh_files(task):
        if file.path == "reward.sh":
            hook = hook_of(file.read())
            if hook is not None:
                continue
        path = "test.py" if file.path == "check.py" else file.path
        if file.path == "test.py":
            raise TaskError(f"{where}: its verifier has a file test.py, a name rows keep for check.py: rename it")
        files.append(_row_file(file, f"reward/{path}", where))
    metadata = without_rule_category(task.metadata)
    rule = metadata.get("rule")
    row: dict[str, Any] = {
        "prompt": task.instruction,
        "hook_code": (hook or "").replace("/reward/check.py", "/reward/test.py"),
        "input_files": files,
        "rule": rule,
        "origin_template": f"---\nid: {task.id}\n---\n",
    }
    extras = Extras.of(task, "reward_sh")
    if metadata != {**_DEFAULT_METADATA, **({"rule": rule} if rule else {})}:
        extras["metadata"] = metadata
    parts = {"clawgym": extras, "solution": task.solution, "wrong": task.wrong_solutions}
    row.update({k: v if k == "clawgym" else [_row_file(f, f.path, where) for f in v] for k, v in parts.items() if v})
    return to_json(row, where)


def _row_file(file: TaskFile, path: str, where: str) -> dict[str, Any]:
    row = {"file_path": path, "content": decode(file.read(), f"{where}: {file.path}", keep_bom=True)}
    return {**row, "executable": True} if file.executable and path != "reward/reward.sh" else row


@formats.register("rows")
class RowsFormat(TaskFormat):
    """Rows, one task each: JSONL, a JSON list or Parquet; written as JSONL. The default format of files."""

    def iter_tasks(self, path: Path) -> Iterator[tuple[str, Reader]]:
        return iter_rows(path)

    def write(self, tasks: Iterable[Task], path: Path) -> None:
        with path.open("wb") as file:
            for task in tasks:
                file.write(write_row(task))
