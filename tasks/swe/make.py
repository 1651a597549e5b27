"""Make instances: try mutations of a package in sandboxes and keep those that its test suite detects.

A mutation is kept if some tests fail and most still pass, if the suite is collected completely and does not hang, if
two runs agree, and if an issue can be written from the failures without revealing it.

Invariant: the kept mutations depend on package, version, lock and seed. The same command resumes an interrupted run
(:class:`Journal`).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from clawgym.errors import TaskError
from clawgym.records import Layer
from clawgym.sandbox.protocol import Backend
from clawgym.tasks.layers import Lock, Progress
from clawgym.tasks.swe import recipes
from clawgym.tasks.swe.mutations import OPERATORS, Edit, apply, edits, usable
from clawgym.tasks.swe.recipes import Instance, Place, Recipe, ShownFiles
from clawgym.tasks.swe.sources import Source
from clawgym.tasks.swe.trial import Suite, run_suite
from clawgym.tasks.swe.verifier import PROTECTED
from clawgym.tasks.swe.words import clean_message, reveals, statement_at

__all__ = ["ARGUMENTS", "Baseline", "Candidate", "Journal", "baseline", "candidates", "make", "try_candidate"]

ARGUMENTS = ("-o", "addopts=")
_LEAST_SECONDS = 10.0
"""Least time limit of a suite; the limit is four times its duration without a bug, if that is more."""
_MOST_BROKEN = 0.3
"""Largest share of tests that an instance may break."""
_RECURSION_ERRORS = ("RecursionError", "MemoryError")
"""Errors that depend on the recursion limit, which differs between versions of Python."""
_SHOWN = 2
_OTHERS = 1


@dataclass(frozen=True, slots=True)
class Candidate:
    """A mutation to try."""

    path: str
    edit: Edit


@dataclass(frozen=True)
class Baseline:
    """The results of the suite without a bug."""

    tests: tuple[str, ...]
    """Tests that always pass, sorted."""
    seconds: float
    """Duration of the slower run."""
    dropped: int
    """The number of tests that fail, vary or do not run."""


@dataclass
class Journal:
    """The results of tried candidates, on disk, so that an interrupted run can be resumed."""

    path: Path | None
    head: dict[str, Any]
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path, head: dict[str, Any]) -> Journal:
        """Read or create a journal. Raises :class:`TaskError` if it was written by another command."""
        journal = cls(path, head)
        if path.is_file():
            lines = path.read_text(encoding="utf-8").splitlines()
            found = [row for row in map(_row, lines) if row is not None]
            if found and found[0] != head:
                changed = [key for key in head if found[0].get(key) != head[key]]
                raise TaskError(
                    f"{path}: was started with another {', '.join(changed)}: use the same command, or another folder"
                )
            journal.rows = {row["key"]: row for row in found[1:]}
            path.write_text("".join(json.dumps(row) + "\n" for row in [head, *journal.rows.values()]))
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(head) + "\n")
        return journal

    def add(self, key: str, row: dict[str, Any]) -> None:
        self.rows[key] = {"key": key, **row}
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(self.rows[key]) + "\n")


def _row(line: str) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None  # an incomplete line of an interrupted run
    return found if isinstance(found, dict) else None


async def baseline(backend: Backend, source: Source, site: Layer) -> Baseline:
    """Run the unchanged suite twice. Raises :class:`TaskError` if it does not run, or has fewer than 10 passing
    tests."""
    arguments = (*ARGUMENTS, "--tb=short")
    runs = [await run_suite(backend, source.files, source.root, site, arguments, seconds=120.0) for _ in range(2)]
    name = f"{source.sdist.project} {source.sdist.version}"
    for run in runs:
        if run.fault is not None:
            raise TaskError(
                f"{name}: its suite does not run in a sandbox ({run.fault}): add packages that its tests import with "
                f"--with, or choose another package. Its output:\n{run.log[-1500:]}"
            )
    passed = runs[0].named("passed") & runs[1].named("passed")
    if len(passed) < 10:
        raise TaskError(f"{name}: only {len(passed)} tests pass: choose a package with a test suite in its archive")
    ids = {test for run in runs for test in run.tests}
    usual = [test for test in sorted(passed) if test.isprintable()]
    return Baseline(tuple(usual), max(run.seconds for run in runs), len(ids) - len(usual))


def candidates(source: Source, seed: int) -> Iterator[Candidate]:
    """All usable mutations of a package in the order to try them. Operators take turns, in an order given by
    ``seed``."""
    by_operator: dict[str, list[Candidate]] = defaultdict(list)
    texts: dict[str, bytes] = {}
    for path in source.library:
        if any(fnmatchcase(path, pattern) for pattern in PROTECTED):
            continue  # the agent could not fix it, since changes of protected files are reverted
        texts[path] = source.by_path[path].read()
        for edit in edits(texts[path]):
            by_operator[edit.operator].append(Candidate(path, edit))
    dice = random.Random(f"{source.sdist.project}:{source.sdist.version}:{seed}")
    queues = []
    for operator in OPERATORS:
        dice.shuffle(by_operator[operator])
        queues.append(iter(by_operator[operator]))
    while queues:
        dice.shuffle(queues)
        for queue in list(queues):
            for candidate in queue:
                if usable(texts[candidate.path], candidate.edit):
                    yield candidate
                    break
            else:
                queues.remove(queue)


async def make(
    backend: Backend,
    source: Source,
    lock: Lock,
    site: Layer,
    *,
    number: int,
    seed: int,
    journal: Journal,
    jobs: int = 2,
    progress: Progress | None = None,
) -> Recipe:
    """Try mutations until ``number`` are kept, at most 40 for each, and return the recipe. Raises :class:`TaskError` if
    none is kept."""
    tell = progress or (lambda what, done, total: None)
    tell("running the suite", 0, number)
    if "baseline" not in journal.rows:
        found = await baseline(backend, source, site)
        journal.add("baseline", {"tests": found.tests, "seconds": round(found.seconds, 2), "dropped": found.dropped})
    row = journal.rows["baseline"]
    base = Baseline(tuple(row["tests"]), row["seconds"], row["dropped"])
    kept: list[Instance] = []
    scopes: set[tuple[str, str]] = set()
    tried = 0
    async for candidate, row in _tried(backend, source, site, base, seed, journal, jobs, scopes):
        tried += 1
        where = (candidate.path, candidate.edit.scope)
        if "kept" in row and where not in scopes:
            scopes.add(where)
            name = f"{source.sdist.project}-{source.sdist.version}-{len(kept) + 1:03d}"
            kept.append(Instance(**row["kept"], id=name))
        tell(f"tried {tried}", len(kept), number)
        if len(kept) == number or tried >= 40 * number:
            break
    if not kept:
        raise TaskError(f"{source.sdist.project}: its suite detects none of {tried} bugs: choose another package")
    recipe = Recipe(
        format=1,
        project=source.sdist.project,
        version=source.sdist.version,
        licence=source.licence,
        sdist={"filename": source.sdist.filename, "sha256": source.sdist.sha256},  # type: ignore[reportArgumentType]
        lock=lock.as_dict(),
        arguments=[],
        tests=list(base.tests),
        seconds=base.seconds,
        seed=seed,
        tried=tried,
        instances=kept,
    )
    return recorded(recipe, source, site)


def recorded(recipe: Recipe, source: Source, site: Layer) -> Recipe:
    """The recipe with the current hash of each instance."""
    hashes = [recipes.instance_hash(recipes.build(recipe, i, source, site)) for i in recipe.instances]
    rows = [i.model_copy(update={"hash": h}) for i, h in zip(recipe.instances, hashes, strict=True)]
    return recipe.model_copy(update={"instances": rows})


async def _tried(
    backend: Backend,
    source: Source,
    site: Layer,
    base: Baseline,
    seed: int,
    journal: Journal,
    jobs: int,
    done: set[tuple[str, str]],
) -> AsyncIterator[tuple[Candidate, dict[str, Any]]]:
    """Candidates with their results, in order; ``jobs`` are tried at the same time. Functions in ``done`` are
    skipped."""
    waiting = (c for c in candidates(source, seed) if (c.path, c.edit.scope) not in done)
    running: list[tuple[Candidate, asyncio.Task[dict[str, Any]]]] = []

    async def one(candidate: Candidate) -> dict[str, Any]:
        key = json.dumps([candidate.path, candidate.edit.start, candidate.edit.end, candidate.edit.replacement])
        if key not in journal.rows:
            journal.add(key, await try_candidate(backend, source, site, base, candidate))
        return journal.rows[key]

    try:
        while True:
            while len(running) < jobs and (candidate := next(waiting, None)) is not None:
                running.append((candidate, asyncio.create_task(one(candidate))))
            if not running:
                return
            candidate, task = running[0]
            row = await task
            del running[0]
            yield candidate, row
    finally:
        for _, task in running:
            task.cancel()
        await asyncio.gather(*(task for _, task in running), return_exceptions=True)


async def try_candidate(
    backend: Backend, source: Source, site: Layer, base: Baseline, candidate: Candidate
) -> dict[str, Any]:
    """Run the suite with the mutation. Returns ``{"kept": ...}`` with an instance without id, or ``{"why": ...}``."""
    good = source.by_path[candidate.path].read()
    first = await _run(backend, source, site, base, candidate)
    if (why := _unfit(first, base)) is not None:
        return {"why": why}
    second = await _run(backend, source, site, base, candidate)
    fails = sorted(first.named("failed").intersection(base.tests))
    if first.tests != second.tests:
        return {"why": "varies"}
    shown = _shown(source, candidate, fails, first, second)
    if not shown:
        return {"why": "cannot be told"}
    others = []
    for other in _others(good, candidate):
        run = await _run(backend, source, site, base, Candidate(candidate.path, other))
        if run.fault is None and run.named("failed").intersection(base.tests):
            others.append(_place(other).model_dump())
        if len(others) == _OTHERS:
            break
    kept = {
        "path": candidate.path,
        "edit": _place(candidate.edit).model_dump(),
        "before": hashlib.sha256(good).hexdigest(),
        "after": hashlib.sha256(apply(good, candidate.edit)).hexdigest(),
        "fail": fails,
        "shown": [row.model_dump() for row in shown],
        "others": others,
        "hash": "",
    }
    return {"kept": kept}


def _place(edit: Edit) -> Place:
    return Place(start=edit.start, end=edit.end, text=edit.replacement, operator=edit.operator)


async def _run(backend: Backend, source: Source, site: Layer, base: Baseline, candidate: Candidate) -> Suite:
    bad = apply(source.by_path[candidate.path].read(), candidate.edit)
    files = [replace(f, source=bad) if f.path == candidate.path else f for f in source.files]
    seconds = max(_LEAST_SECONDS, 4 * base.seconds)
    stop = f"--maxfail={_most(base) + base.dropped + 1}"
    return await run_suite(backend, files, source.root, site, (*ARGUMENTS, stop), seconds=seconds)


def _most(base: Baseline) -> int:
    """Most tests that an instance may break."""
    return max(1, int(_MOST_BROKEN * len(base.tests)))


def _unfit(run: Suite, base: Baseline) -> str | None:
    """Why a mutation cannot be an instance, by one run of the suite; or None."""
    if run.fault is not None:
        return run.fault
    fails = run.named("failed").intersection(base.tests)
    if not fails:
        return "breaks nothing"
    if len(fails) > _most(base):
        return "breaks too much"
    if not run.named("passed").union(fails).issuperset(base.tests):
        return "tests are missing"
    if run.seconds > 2 * base.seconds + 5:
        return "slow"
    if any(run.failures[test].type in _RECURSION_ERRORS for test in fails if test in run.failures):
        return "too deep"
    return None


def _shown(source: Source, candidate: Candidate, fails: Sequence[str], first: Suite, second: Suite) -> list[ShownFiles]:
    """Up to two short failures from different statements that do not reveal the bug."""
    rows: list[ShownFiles] = []
    for test in fails:
        failure, again = first.failures.get(test), second.failures.get(test)
        if failure is None or again is None or failure.file not in source.by_path:
            continue
        message = clean_message(failure.message)
        if message != clean_message(again.message):
            continue
        data = source.by_path[failure.file].read()
        span = statement_at(data, failure.line) if failure.line is not None else None
        rows.append(ShownFiles(test=test, file=failure.file, statement=span, type=failure.type, message=message))
    rows.sort(key=lambda row: (row.type != "AssertionError", row.statement is None, len(row.message), row.test))
    chosen: list[ShownFiles] = []
    good = source.by_path[candidate.path].read()
    for row in rows:
        if any((row.file, row.statement) == (c.file, c.statement) for c in chosen):
            continue
        data = source.by_path[row.file].read()[slice(*row.statement)] if row.statement else b""
        text = f"{row.test}\n{data.decode('utf-8', 'replace')}\n{row.type}: {row.message}"
        if reveals(text, candidate.path, good, candidate.edit) is None:
            chosen.append(row)
        if len(chosen) == _SHOWN:
            break
    return chosen


def _others(good: bytes, candidate: Candidate) -> Iterator[Edit]:
    """Up to three other mutations in the same function, the nearest first."""
    here = candidate.edit
    near = [e for e in edits(good) if e.scope == here.scope and e != here and e.operator != "body"]
    near = [e for e in near if apply(good, e) != apply(good, here)]
    near.sort(key=lambda e: (abs(e.start - here.start) + abs(e.end - here.end), e))
    number = 0
    for edit in near:
        if number < 3 and usable(good, edit):
            number += 1
            yield edit
