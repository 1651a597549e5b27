"""Recipes: JSON descriptions of the tasks made from one source package, without code of the package.

A recipe has the digests of the archive and the wheels. For each instance it has the bytes to replace, the tests that
then fail, and the failures that the issue shows.

Invariant: building a recipe gives the recorded tasks, or an error. :func:`instance_hash` covers the agent's view and
the list of tests, but not the program that runs them.
"""

from __future__ import annotations

import ast
import gzip
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from clawgym.errors import TaskError
from clawgym.records import Layer, Task, TaskFile
from clawgym.tasks.formats._schema import validated
from clawgym.tasks.layers import Lock, Progress, lock_of, prepare
from clawgym.tasks.swe.mutations import Edit, apply
from clawgym.tasks.swe.scripts import reference, wrong
from clawgym.tasks.swe.sources import Sdist, Source, read_source
from clawgym.tasks.swe.trial import LIMITS, SITE, WORKSPACE, environment
from clawgym.tasks.swe.verifier import tests_verifier
from clawgym.tasks.swe.words import Example, describe

__all__ = [
    "Instance",
    "Place",
    "Recipe",
    "ShownFiles",
    "build",
    "build_all",
    "instance_hash",
    "issue",
    "read_recipe",
    "write_recipe",
]

_LARGEST = 32 * 2**20


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Place(_Strict):
    """A replacement of the bytes ``start`` to ``end`` of a file by ``text``."""

    start: int
    end: int
    text: str
    operator: str


class ShownFiles(_Strict):
    """A failure that the issue shows. Its statement is read from the archive."""

    test: str
    file: str
    statement: tuple[int, int] | None
    """Byte range in ``file``."""
    type: str
    message: str


class Instance(_Strict):
    """One instance: a bug and its failing tests."""

    id: str
    path: str
    edit: Place
    before: str
    """``before`` and ``after``: hex SHA-256 of the file in the archive, and with the bug."""
    after: str
    fail: list[str]
    """The tests that fail with the bug; the recipe's other tests pass."""
    shown: list[ShownFiles]
    others: list[Place]
    """Other bugs at the same place, for wrong solutions."""
    hash: str
    """:func:`instance_hash`; empty before it is recorded."""


class _Archive(_Strict):
    filename: str
    sha256: str


class Recipe(_Strict):
    """The instances of one package."""

    format: Literal[1]
    project: str
    version: str
    licence: str
    sdist: _Archive
    lock: dict[str, Any]
    arguments: list[str]
    """Arguments of pytest."""
    tests: list[str]
    """Tests that always pass without a bug."""
    seconds: float
    """Duration of one run of the suite on the machine where the recipe was made."""
    seed: int
    tried: int
    instances: list[Instance]

    @property
    def source(self) -> Sdist:
        return Sdist(self.project, self.version, self.sdist.filename, self.sdist.sha256)

    @property
    def layer(self) -> Lock:
        return lock_of(self.lock, f"recipe of {self.project}: lock")


def read_recipe(data: bytes, where: str) -> Recipe:
    """Read a recipe from JSON, gzipped or not. Raises :class:`TaskError`, naming ``where`` and the field, if it is
    invalid."""
    try:
        body = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    except (ValueError, OSError, EOFError) as error:
        raise TaskError(f"{where}: is not a recipe ({error}): restore it") from error
    if not isinstance(body, dict):
        raise TaskError(f"{where}: is not a recipe (not an object): restore it")
    return validated(Recipe, body, where)


def write_recipe(recipe: Recipe) -> bytes:
    """The recipe as JSON, for :func:`read_recipe`."""
    return (json.dumps(recipe.model_dump(), indent=1, ensure_ascii=False) + "\n").encode()


def build_all(recipes: Iterable[tuple[str, Recipe]], *, progress: Progress | None = None) -> list[Task]:
    """Build the tasks of ``recipes``, pairs of a location for messages and a recipe, in order.

    Missing files are downloaded once. Raises :class:`DownloadError` if a file cannot be downloaded,
    :class:`TaskError` for a task that differs from the recorded one, and :class:`MissingDependency` without the extra
    ``packages``.
    """
    tasks: list[Task] = []
    for where, recipe in recipes:
        source = read_source(recipe.source, progress=progress)
        site = prepare(recipe.layer, progress=progress)
        for instance in recipe.instances:
            task = build(recipe, instance, source, site)
            if (got := instance_hash(task)) != instance.hash:
                raise TaskError(
                    f"{where}: {instance.id} differs from the recorded task ({got[:12]}, not {instance.hash[:12]}): "
                    "use the version of the library that has this recipe"
                )
            tasks.append(task)
    return tasks


def build(recipe: Recipe, instance: Instance, source: Source, site: Layer) -> Task:
    """Build the task of one instance. Raises :class:`TaskError` if the file in the archive is not the recorded one."""
    good = original(source, instance.path, instance.before, instance.id)
    bad = apply(good, _edit(instance.edit))
    if hashlib.sha256(bad).hexdigest() != instance.after:
        raise TaskError(f"{instance.id}: its edit of {instance.path} gives another text: restore the recipe")
    fails = frozenset(instance.fail)
    inputs = (replace(f, source=bad) if f.path == instance.path else f for f in source.files)
    return Task(
        id=instance.id,
        instruction=issue(recipe, instance, source),
        verifier=tests_verifier(
            fail_to_pass=instance.fail,
            pass_to_pass=[test for test in recipe.tests if test not in fails],
            arguments=recipe.arguments,
        ),
        inputs=tuple(inputs),
        workspace=WORKSPACE,
        limits=LIMITS,
        env=environment(source.root),
        layers={SITE: site},
        metadata={
            "category": "swe",
            "package": recipe.project,
            "version": recipe.version,
            "operator": instance.edit.operator,
            "tests": len(recipe.tests),
            "failing": len(instance.fail),
        },
        solution=reference(instance.path, bad, good),
        wrong_solutions=wrong(
            instance.path, bad, instance.fail, [apply(good, _edit(other)) for other in instance.others]
        ),
        origin=f"recipe of {recipe.project} {recipe.version}",
    )


def original(source: Source, path: str, sha256: str, where: str) -> bytes:
    """The content of a file in the archive. Raises :class:`TaskError` if it is missing or has another digest."""
    data = source.by_path[path].read() if path in source.by_path else b""
    if hashlib.sha256(data).hexdigest() != sha256:
        raise TaskError(f"{where}: {path} of {source.sdist.filename} is not the file it was made for: restore {where}")
    return data


def _edit(place: Place) -> Edit:
    return Edit(place.start, place.end, place.text, place.operator)


def issue(recipe: Recipe, instance: Instance, source: Source) -> str:
    """The issue text of an instance (:func:`~clawgym.tasks.swe.words.describe`)."""
    examples = []
    for shown in instance.shown:
        text = b""
        if shown.statement is not None and shown.file in source.by_path:
            text = source.by_path[shown.file].read()[shown.statement[0] : shown.statement[1]]
        examples.append(Example(shown.test, text.decode("utf-8", "replace"), shown.type, shown.message))
    return describe(recipe.project, recipe.version, public_names(source), examples, len(instance.fail))


@cache
def _names(folder: Path, paths: tuple[str, ...]) -> frozenset[str]:
    found: set[str] = set()
    for path in paths:
        try:
            tree = ast.parse((folder / path).read_bytes())
        except (SyntaxError, ValueError):
            continue
        kinds = (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)
        found.update(node.name for node in ast.walk(tree) if isinstance(node, kinds))
    return frozenset(found)


def public_names(source: Source) -> frozenset[str]:
    """Names of the functions and classes that the package defines."""
    return _names(source.folder, source.library)


def instance_hash(task: Task) -> str:
    """Hex SHA-256 of instruction, repository, environment, layers and tests."""
    plan = next(file for file in task.verifier.files if file.path == "tests.json")
    tests = json.loads(plan.read())
    what: Sequence[Any] = [
        task.instruction,
        task.workspace,
        sorted(task.env.items()),
        sorted((target, layer.digest) for target, layer in task.layers.items()),
        sorted((file.path, file.executable, _sha256(file)) for file in task.inputs),
        [tests["fail_to_pass"], tests["pass_to_pass"], tests["arguments"]],
    ]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()


def _sha256(file: TaskFile) -> str:
    """The file's digest. For a file in the cache, which never changes, it is computed once."""
    return file.sha256 if isinstance(file.source, bytes) else _sha256_at(file.source)


@cache
def _sha256_at(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
