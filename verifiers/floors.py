"""Floors: what a task pays for no work, so that scores can be corrected for it.

A floor is the best mean of the non-composite checks that one of four cheap policies earns: ``nothing`` (leave the
inputs), ``empty`` (delete them), ``touch`` (an empty file at every output path the prompt names) and ``echo``
(the prompt's own text in each). Measured once for each task content and kept in the user's cache; floors of the
public task sets and of our packs come with the package.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import threading
from functools import cache
from importlib import resources
from pathlib import Path

from platformdirs import user_cache_path

from clawgym.errors import GradingError
from clawgym.records import Task, TaskFile
from clawgym.sandbox.protocol import Archive, Backend
from clawgym.verifiers._workspace import compose
from clawgym.verifiers.grading import Subject, empty_archive, grade, untouched
from clawgym.verifiers.scores import plain_mean

__all__ = [
    "CHEAP_POLICIES",
    "cheap_scores",
    "cheap_workspace",
    "key_of",
    "known_floor",
    "measure_floor",
    "output_paths",
]

CHEAP_POLICIES = ("nothing", "empty", "touch", "echo")

_EXTENSIONS = (
    "json|jsonl|csv|tsv|txt|md|html|htm|yaml|yml|py|sh|js|ts|xml|ini|toml|log|svg|sql|ics|cfg|conf|css|env|patch|diff|"
    "geojson|ndjson|rst|tex|bib|sha256|db|sqlite|zip|gz|tar|png|jpg|pdf|xlsx|r|R"
)
_PATH = re.compile(
    rf"(?<![\w/.-])((?:/root/\.openclaw/workspace/|\./)?[A-Za-z0-9_][\w./-]*\.(?:{_EXTENSIONS}))(?![\w-])"
)
_lock = threading.Lock()


def output_paths(task: Task) -> list[str]:
    """The new files that the instruction names, below the workspace, in order."""
    inputs = {f.path for f in task.inputs}
    found: list[str] = []
    for match in _PATH.finditer(task.instruction):
        path = match[1].removeprefix("/root/.openclaw/workspace/").removeprefix("./")
        if "/" in path and ".." not in path and path not in found and path not in inputs:
            found.append(path)
    return found


def cheap_workspace(task: Task, policy: str) -> Archive:
    """What ``policy`` leaves. A path that cannot be made is skipped."""
    if policy == "empty":
        return empty_archive()
    start = untouched(task)
    if policy == "nothing":
        return start
    content = task.instruction.encode() if policy == "echo" else b""
    taken: set[str] = {f.path for f in task.inputs}
    put: list[TaskFile] = []
    for path in output_paths(task):
        parents = {"/".join(path.split("/")[:i]) for i in range(1, path.count("/") + 1)}
        if parents & taken or any(t.startswith(path + "/") for t in taken) or "//" in path:
            continue
        taken.add(path)
        put.append(TaskFile(path, content))
    return Archive(compose(start.tar, put=put))


async def cheap_scores(task: Task, backend: Backend) -> dict[str, tuple[float | None, float]]:
    """Policy -> (official score, None for a crash; mean of the non-composite checks)."""
    scores: dict[str, tuple[float | None, float]] = {}
    for policy in CHEAP_POLICIES:
        try:
            result = await grade(task, Subject(cheap_workspace(task, policy)), backend)
        except GradingError:
            scores[policy] = (None, 0.0)
            continue
        if result.cause is not None and not result.tampered:
            scores[policy] = (None, 0.0)
        else:
            # The mean is of the strict grading's checks, as in the corrected score that the floor is taken from.
            scores[policy] = (result.official, plain_mean(result.checks))
    return scores


async def measure_floor(task: Task, backend: Backend) -> float:
    """The task's floor; measured with four gradings if it is not known, and kept."""
    known = known_floor(task)
    if known is not None:
        return known
    floor = max(mean for _, mean in (await cheap_scores(task, backend)).values())
    with _lock:
        floors = _cached() | {key_of(task): floor}
        path = _cache_path()
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps(floors))
        temporary.replace(path)
        _read.cache_clear()
    return floor


def known_floor(task: Task) -> float | None:
    """The floor that came with the package or was measured before, or None."""
    key = key_of(task)
    shipped = _shipped().get(key)
    return shipped if shipped is not None else _cached().get(key)


def key_of(task: Task) -> str:
    """Under what a floor is kept: the task's content."""
    return task.content_hash[:24]


@cache
def _shipped() -> dict[str, float]:
    file = resources.files("clawgym.verifiers").joinpath("floors.json.gz")
    return json.loads(gzip.decompress(file.read_bytes())) if file.is_file() else {}


def _cache_path() -> Path:
    return user_cache_path("clawgym") / "floors.json"


@cache
def _read(stamp: int) -> dict[str, float]:
    try:
        return json.loads(_cache_path().read_text())
    except (OSError, ValueError):
        return {}


def _cached() -> dict[str, float]:
    try:
        return _read(_cache_path().stat().st_mtime_ns)
    except OSError:
        return {}
