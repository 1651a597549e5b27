"""No-model baselines: the score of a task without any work, for baseline-adjusted scores.

The baseline is the best mean of the non-composite checks over the cheap policies (:mod:`clawgym.verifiers.cheap`). It
is measured once for each task content and kept in the user's cache. Baselines of the public task sets and of the packs
are part of the package (``floors.json.gz``).
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import threading
from functools import cache
from importlib import resources
from pathlib import Path

from platformdirs import user_cache_path

from clawgym.records import Task
from clawgym.sandbox.protocol import Backend
from clawgym.verifiers.cheap import CHEAP_POLICIES, cheap_workspace, grade_cheaply

__all__ = ["key_of", "known_baseline", "measure_baseline"]

_lock = threading.Lock()


async def measure_baseline(task: Task, backend: Backend) -> float:
    """The task's no-model baseline in [0, 1]. If it is not known, four gradings measure it; the result is cached."""
    known = known_baseline(task)
    if known is not None:
        return known
    task = task.frozen()  # so that the measured content is the one in the key
    baseline = max([(await grade_cheaply(task, cheap_workspace(task, p), backend)).mean for p in CHEAP_POLICIES])
    with _lock:
        known_baselines = _cached() | {key_of(task): baseline}
        path = _cache_path()
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(known_baselines))
            temporary.replace(path)
        except OSError:  # a full disk: the baseline is measured again next time
            with contextlib.suppress(OSError):
                temporary.unlink()
        _read.cache_clear()
    return baseline


def known_baseline(task: Task) -> float | None:
    """The baseline from the package or the cache, or None."""
    key = key_of(task)
    shipped = _shipped().get(key)
    return shipped if shipped is not None else _cached().get(key)


def key_of(task: Task) -> str:
    """The key of a baseline: the first 24 digits of the task's content hash."""
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
