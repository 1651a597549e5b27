"""Reader of tasks of OSWorld, one JSON file each, within the limits of ClawGym's desktops.

A task is supported if

- its files can be made without a network: commands that create files are interpreted, not run, and downloads are read
  from a folder beside the JSON file with the same name;
- it needs no other program than a file manager and a text editor;
- its evaluator compares files or the output of a command that only reads, or is ``infeasible`` (the task is solved by
  the agent's ``fail``).

Any other task is ``unsupported``, with the reason. The workspace is the home folder ``/home/user``; files outside of it
are not graded.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from clawgym.errors import TaskError
from clawgym.records import Desktop, Limits, Task, TaskFile, VerifierSpec
from clawgym.registry import formats
from clawgym.tasks.formats._files import check_files, check_task_id, parse_json, read_text
from clawgym.tasks.formats._osworld_checks import METRICS, OPTIONS
from clawgym.tasks.formats._osworld_setup import HOME, NotSupported, Setup, check_reading, command_text, text_field
from clawgym.tasks.formats._schema import validated
from clawgym.tasks.formats.protocol import Reader, TaskFormat
from clawgym.tasks.mathematics import checker

__all__ = ["OsworldFormat", "holds", "is_file", "iter_folder", "read_task"]

_KEYS = {"id", "instruction", "evaluator"}
_APPS = {"os", "file_manager", "nautilus", "text_editor", "gedit"}
_LIMITS = Limits(memory_mb=1024, pids=256, max_steps=50)
_LONGEST = 1 << 20

_BODY = """
import osworld_checks as ow

def got(source):
    path = checks.workspace / source["path"]
    if source["kind"] == "folder":
        return [entry.name for entry in path.iterdir() if entry.name != ".gitkeep"]
    if source["kind"] == "file":
        return cg.read_text(path)
    return cg.run_program(["bash", "-c", source["command"]], cwd=checks.workspace, timeout=10).out

def holds(test):
    try:
        return ow.METRICS[test["func"]](got(test["result"]), test["expected"], test["options"])
    except (cg.Failed, OSError, TypeError, KeyError, AttributeError):
        return False

@checks("right")
def _():
    if DATA["infeasible"] or ow.last_word() == "fail":
        return DATA["infeasible"] and ow.last_word() == "fail"
    found = [holds(test) for test in DATA["tests"]]
    return bool(found) and (any(found) if DATA["conj"] == "or" else all(found))
"""


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class _Step(_Strict):
    type: str
    parameters: dict[str, Any] = {}


def _listed(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


Many = Annotated[list[Any], BeforeValidator(_listed)]


class _Evaluator(_Strict):
    func: Annotated[list[Annotated[str, Field(min_length=1)]], BeforeValidator(_listed), Field(min_length=1)]
    result: Many = [None]
    expected: Many = [None]
    options: Many = [None]
    conj: Literal["and", "or"] = "and"
    postconfig: list[_Step] = []


class _Example(_Strict):
    id: str
    instruction: Annotated[str, Field(pattern=r"\S")]
    config: list[_Step] = []
    related_apps: list[str] = []
    evaluator: _Evaluator
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
    """JSON files in ``folder`` and its subfolders; in those of ``folder/examples`` if that exists."""
    examples = folder / "examples"
    for root in (examples if examples.is_dir() else folder,):
        for entry in sorted(root.iterdir()):
            if entry.is_dir() and not entry.name.startswith("."):
                yield from sorted(path for path in entry.iterdir() if path.suffix == ".json")
            elif entry.suffix == ".json":
                yield entry


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
    data: dict[str, Any] = {"infeasible": False, "conj": "and", "tests": []}
    missing: str | None = None
    try:
        for app in example.related_apps:
            if app.lower() not in _APPS:
                raise NotSupported(f"it needs the app {app!r}")
        for number, step in enumerate(example.config):
            setup.step(step.type, step.parameters, f"{where}: field config.{number}.parameters")
        data = _plan(example.evaluator, setup, f"{where}: field evaluator")
    except NotSupported as error:
        missing = str(error)
    inputs = check_files(setup.inputs, where) if missing is None else ()
    programs = tuple(setup.programs) or (("xfe", "Desktop"),)
    return Task(
        id=check_task_id(example.id, f"{where}: field id"),
        instruction=example.instruction,
        verifier=_verifier(data),
        inputs=inputs,
        workspace=HOME,
        limits=_LIMITS,
        desktop=Desktop(1920, 1080, programs=programs if missing is None else ()),
        metadata={"category": "desktop", "related_apps": list(example.related_apps)},
        unsupported=missing,
        origin=where,
    )


def _verifier(data: dict[str, Any]) -> VerifierSpec:
    spec = checker("a task of OSWorld", data, _BODY)
    beside = TaskFile("osworld_checks.py", Path(__file__).with_name("_osworld_checks.py"))
    return dataclasses.replace(spec, files=(*spec.files, beside), mutable_inputs=("*",))


def _plan(evaluator: _Evaluator, setup: Setup, where: str) -> dict[str, Any]:
    """The data of the checker. Raises :class:`NotSupported` and :class:`TaskError`."""
    if evaluator.func == ["infeasible"]:
        return {"infeasible": True, "conj": "and", "tests": []}
    for step in evaluator.postconfig:
        if step.type != "sleep":
            raise NotSupported(f"its evaluator begins with a step {step.type!r}")
    count = len(evaluator.func)
    parts = {"result": evaluator.result, "expected": evaluator.expected, "options": evaluator.options}
    for name, part in parts.items():
        if len(part) != count and part != [None]:
            raise TaskError(f"{where}.{name}: has {len(part)} entries for {count} functions: correct it")
    tests = []
    for number, func in enumerate(evaluator.func):
        if func not in METRICS:
            raise NotSupported(f"its evaluator is {func!r}")
        result, expected, options = (part[number] if len(part) == count else None for part in parts.values())
        options = _mapping(options or {}, f"{where}.options")
        if unknown := sorted(set(options) - set(OPTIONS.get(func, ()))):
            raise NotSupported(f"its evaluator has the option {unknown[0]!r}")
        tests.append(
            {
                "func": func,
                "result": _result(_mapping(result, f"{where}.result"), setup, f"{where}.result"),
                "expected": _expected(func, _mapping(expected, f"{where}.expected"), setup, f"{where}.expected"),
                "options": options,
            }
        )
    return {"infeasible": False, "conj": evaluator.conj, "tests": tests}


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise TaskError(f"{where}: is not an object: correct it")
    return value


def _result(given: Mapping[str, Any], setup: Setup, where: str) -> dict[str, Any]:
    match given.get("type"):
        case "vm_file" if not given.get("multi"):
            return {"kind": "file", "path": setup.place(text_field(given, "path", where))}
        case "list_directory":
            return {"kind": "folder", "path": setup.place(text_field(given, "path", where))}
        case "vm_command_line":
            text = command_text(given.get("command"), f"{where}.command")
            check_reading(text)
            return {"kind": "command", "path": "", "command": text}
    raise NotSupported(f"its evaluator looks at {given.get('type')!r}")


def _expected(func: str, given: Mapping[str, Any], setup: Setup, where: str) -> Any:
    kind = given.get("type")
    if func == "compare_text_file":
        if kind != "cloud_file" or given.get("multi"):
            raise NotSupported(f"its evaluator expects {kind!r}")
        name = given.get("dest") or given.get("path")
        path = setup.local(text_field(given, "path", where), text_field({"dest": name}, "dest", where))
        if path.stat().st_size > _LONGEST:
            raise TaskError(f"{path}: is longer than {_LONGEST} bytes: use a shorter text to compare with")
        return read_text(path.parent, path.name)
    if kind != "rule":
        raise NotSupported(f"its evaluator expects {kind!r}")
    rules = _mapping(given.get("rules"), f"{where}.rules")
    if func in ("check_include_exclude", "check_list"):
        for name in ("include", "exclude", "expect", "unexpect"):
            texts = rules.get(name, [])
            if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
                raise TaskError(f"{where}.rules.{name}: is not a list of texts: correct it")
        for pattern in (*rules.get("expect", ()), *rules.get("unexpect", ())):
            try:
                re.compile(pattern)
            except re.error as error:
                raise TaskError(f"{where}.rules: {pattern!r} is not a valid pattern ({error}): correct it") from error
    elif "expected" not in rules:
        raise TaskError(f"{where}.rules.expected: is missing: add the expected value")
    return dict(rules)


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
