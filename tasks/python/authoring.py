"""The API for authors of tasks: :func:`task`, a decorator of functions that return a :class:`TaskDraft`."""

from __future__ import annotations

import hashlib
import json
import re
import textwrap
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType
from typing import Any, overload

from clawgym.errors import TaskError, TaskSetNotFound
from clawgym.records import Task, TaskFile, TaskSet, VerifierSpec
from clawgym.tasks.formats._files import check_files as check_paths
from clawgym.tasks.formats._files import check_task_id
from clawgym.tasks.packs.seeded import Split, split_of
from clawgym.tasks.python._source import call_script, check_files, check_source
from clawgym.verifiers.protocols.reward_sh import standard_reward_sh
from clawgym.verifiers.scan import scan_checker

__all__ = ["Maker", "PythonTasks", "TaskDraft", "task"]

Work = str | Callable[..., Any]
"""Bash code that runs in the workspace, or a function of the module that is called there."""


@dataclass(frozen=True)
class TaskDraft:
    """One task, as its author writes it.

    ``check``, and solutions that are functions, must be top-level functions of the same module. They are called in a
    sandbox as ``function(workspace, **expected)``, where ``workspace`` is a :class:`pathlib.Path`. They may use the
    standard library, other functions and constants of the module, and ``clawgym.verifiers.checks``.

    >>> TaskDraft(
    ...     "Write the sum of numbers.txt to sum.txt.",
    ...     check,
    ...     files={"numbers.txt": "1\\n2\\n"},
    ...     expected={"total": 3},
    ...     solution="awk '{s += $1} END {print s}' numbers.txt > sum.txt",
    ...     wrong={"counts lines": "wc -l < numbers.txt > sum.txt", "writes nothing": "touch sum.txt"},
    ... )  # doctest: +SKIP
    """

    instruction: str
    check: Callable[..., Mapping[str, float]] | None = None
    """Returns name -> score from 0 to 1. The task is solved if all scores are 1; their mean is the partial score. An
    exception scores 0."""
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    """Input files: path below the workspace -> content."""
    expected: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of ``check``, as JSON values. The agent never sees them."""
    solution: Work | None = None
    """The reference solution; it must score 1."""
    wrong: Mapping[str, Work] = field(default_factory=dict)
    """Wrong solutions by name: at least two plausible mistakes. They must not pass."""
    may_change: Sequence[str] = ()
    """Patterns of input files that the task asks to change. The others are restored before grading."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Metadata; reports show ``category`` and ``level``."""
    grader: str = ""
    """A grader on the host in place of ``check``, such as ``rubric`` (docs/concepts/grading.md)."""
    grader_options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Maker:
    """One function that makes tasks."""

    function: Callable[..., TaskDraft]
    seeds: tuple[int, ...] | None
    where: str
    """The path of the module, for messages."""
    source: bytes

    @property
    def name(self) -> str:
        return self.function.__name__.replace("_", "-")

    def seeds_of(self, split: Split | None) -> tuple[int | None, ...]:
        if self.seeds is None:
            return () if split == "heldout" else (None,)
        return tuple(seed for seed in self.seeds if split in (None, split_of(seed)))

    def make(self, seed: int | None) -> Task:
        """The task for ``seed``. Raises :class:`TaskError`, naming file and function, if it cannot be made."""
        call = f"{self.where}: {self.function.__name__}({'' if seed is None else seed})"
        try:
            draft = self.function() if seed is None else self.function(seed)
        except TaskError:
            raise
        except Exception as error:
            lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == self.where]
            at = f", line {lines[-1]}" if lines else ""
            raise TaskError(f"{call} raised {type(error).__name__}{at}: {error}: correct it") from error
        if not isinstance(draft, TaskDraft):
            raise TaskError(f"{call} returned {type(draft).__name__}: return a TaskDraft")
        return self._built(draft, self.name if seed is None else f"{self.name}-{seed}", seed, call)

    def _built(self, draft: TaskDraft, id: str, seed: int | None, call: str) -> Task:
        if not isinstance(draft.instruction, str) or not draft.instruction.strip():
            raise TaskError(f"{call}: its instruction is empty: write one")
        text = check_source(self.source, self.where)
        expected = _json(draft.expected, call)
        wrong = {f"{_slug(what, call)}.sh": work for what, work in draft.wrong.items()}
        if len(wrong) < len(draft.wrong):
            raise TaskError(f"{call}: two wrong solutions have the same name: rename one")

        def script(path: str, work: Work) -> TaskFile:
            if isinstance(work, str):
                body = textwrap.dedent(work).strip("\n") + "\n"
            else:
                body = call_script(text, self._named(work, call), expected)
            return TaskFile(path, body.encode(), executable=True)

        return Task(
            id=check_task_id(id, call),
            instruction=draft.instruction,
            verifier=self._verifier(draft, text, expected, call),
            inputs=_inputs(draft.files, call),
            metadata={"generator": self.name, **({} if seed is None else {"seed": seed}), **draft.metadata},
            solution=() if draft.solution is None else (script("solve.sh", draft.solution),),
            wrong_solutions=tuple(script(path, work) for path, work in wrong.items()),
            origin=call,
        )

    def _verifier(self, draft: TaskDraft, text: str, expected: str, call: str) -> VerifierSpec:
        if (draft.check is None) is not bool(draft.grader):
            raise TaskError(f"{call}: set either check=, a function of this module, or grader=, the name of a grader")
        may_change = tuple(draft.may_change)
        if draft.check is None:
            options = json.loads(_json(draft.grader_options, call))
            return VerifierSpec("grader", grader=draft.grader, grader_options=options, mutable_inputs=may_change)
        self._named(draft.check, call)
        files = check_files(text, draft.check, expected)
        return VerifierSpec(
            "reward_sh",
            (
                TaskFile("reward.sh", standard_reward_sh(), executable=True),
                *(TaskFile(path, c.encode() if isinstance(c, str) else c) for path, c in files.items()),
            ),
            executes_agent_code=scan_checker(text),
            mutable_inputs=may_change,
        )

    def _named(self, function: Any, call: str) -> str:
        """The name of ``function`` in the module. Raises :class:`TaskError` if a sandbox would not find it."""
        name = getattr(function, "__name__", "")
        own = self.function.__globals__ if isinstance(self.function, FunctionType) else {}
        if not isinstance(function, FunctionType) or own.get(name) is not function:
            raise TaskError(
                f"{call}: {name or type(function).__name__!r} is not a top-level function of this module, so the "
                "sandbox would not find it: define it there with def"
            )
        if function.__module__ != self.function.__module__:
            raise TaskError(
                f"{call}: {name}() is in the module {function.__module__}, but only this file is copied into the "
                "sandbox: define it here"
            )
        return name


@dataclass(frozen=True)
class PythonTasks:
    """A task set written in Python; a :class:`~clawgym.tasks.packs.Pack`."""

    name: str
    makers: tuple[Maker, ...]

    @property
    def version(self) -> str:
        """12 hex digits of the hash of the module's text."""
        return hashlib.sha256(b"\0".join(maker.source for maker in self.makers)).hexdigest()[:12]

    def load(self, split: Split | None = None, seeds: Sequence[int] | None = None) -> TaskSet:
        """The tasks, one for each function and seed.

        The split ``train`` has the even seeds and the functions without seeds; ``heldout`` has the odd seeds. Without a
        split, all tasks are loaded. ``seeds`` replaces the author's seeds. Raises :class:`TaskError` for a task that
        cannot be made, and :class:`TaskSetNotFound` if there is no task.
        """
        tasks: dict[str, Task] = {}
        for maker in self.makers:
            chosen = maker.seeds_of(split) if seeds is None or maker.seeds is None else tuple(seeds)
            for made in map(maker.make, chosen):
                if tasks.setdefault(made.id, made) is not made:
                    raise TaskError(f"{made.origin}: the id {made.id!r} is taken: rename one of the functions")
        name = f"{self.name}:{split}" if split else self.name
        if not tasks:
            raise TaskSetNotFound(f"{name} has no task: give its functions seeds; odd ones are the held-out split")
        return TaskSet(name, tuple(tasks.values()), self.version)


@overload
def task(function: Callable[..., TaskDraft], /) -> PythonTasks: ...


@overload
def task(*, seeds: Iterable[int]) -> Callable[[Callable[..., TaskDraft]], PythonTasks]: ...


def task(function: Any = None, /, *, seeds: Iterable[int] | None = None) -> Any:
    """Decorator: turn a function that returns a :class:`TaskDraft` into a task set.

    With ``seeds``, the function is called with each of these integers and makes one task for each. Otherwise it is
    called without an argument. It must return the same task for the same seed on every machine: draw from
    ``random.Random(seed)``.

    Example:
        >>> @task(seeds=range(50))  # doctest: +SKIP
        ... def add_up(seed):
        ...     numbers = [random.Random(seed).randint(1, 99) for _ in range(9)]
        ...     text = "\\n".join(map(str, numbers))
        ...     return TaskDraft("Write the sum of numbers.txt to sum.txt.", check, {"numbers.txt": text},
        ...                      expected={"total": sum(numbers)})

    The result is a task set: ``add_up.load()``, ``clawgym.load("my_tasks.py")``, ``my_package.my_tasks:add_up``.
    """
    if function is None:
        return lambda wrapped: _made(wrapped, seeds)
    return _made(function, seeds)


def _made(function: Any, seeds: Iterable[int] | None) -> PythonTasks:
    if not isinstance(function, FunctionType):
        raise TaskError(f"@task is for functions, not for {type(function).__name__}: use it on a def")
    chosen = None if seeds is None else tuple(seeds)
    if chosen is not None and (
        not all(isinstance(seed, int) and seed >= 0 for seed in chosen) or len(set(chosen)) < len(chosen)
    ):
        raise TaskError(f"@task of {function.__name__}: seeds must be distinct integers of at least 0: correct them")
    where = function.__globals__.get("__file__")
    loader = function.__globals__.get("__source__")
    try:
        source = loader if isinstance(loader, bytes) else Path(where or "").read_bytes()
    except OSError as error:
        raise TaskError(
            f"@task of {function.__name__}: the source file of its module cannot be read, but it is copied to the "
            "grading sandbox: write the module to a file (in a notebook: %%writefile my_tasks.py) and load that"
        ) from error
    maker = Maker(function, chosen, str(where), source)
    return PythonTasks(maker.name, (maker,))


def _inputs(files: Mapping[str, str | bytes], call: str) -> tuple[TaskFile, ...]:
    made = []
    for path, content in sorted(files.items()):
        if not isinstance(content, str | bytes):
            raise TaskError(f"{call}: file {path!r} is {type(content).__name__}: give text or bytes")
        data = content.encode() if isinstance(content, str) else content
        made.append(TaskFile(path, data, executable=path.endswith(".sh")))
    return check_paths(made, call)


def _json(value: Mapping[str, Any], call: str) -> str:
    """``value`` as JSON that reads back equal. Raises :class:`TaskError`."""
    try:
        text = json.dumps(dict(value), sort_keys=True, allow_nan=False)
        same = json.loads(text) == dict(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise TaskError(f"{call}: its expected values are not JSON ({error}): use texts, numbers and lists") from error
    if not same:
        raise TaskError(
            f"{call}: its expected values change when stored as JSON: use lists, not tuples, and dicts with text keys"
        )
    return text


def _slug(what: str, call: str) -> str:
    slug = re.sub(r"[^a-z0-9]+", "-", what.lower()).strip("-")
    if not slug:
        raise TaskError(f"{call}: a wrong solution is named {what!r}: use letters or digits")
    return slug
