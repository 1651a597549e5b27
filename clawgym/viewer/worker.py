"""The process that makes the indexes, so that answers do not wait for it: ``python -m clawgym.viewer.worker``.

It reads one JSON object per line, ``{"id": ..., "run": ..., "index": ...}``, and writes one after each part of the
work: ``{"id": ..., "done": ..., "total": ..., "problem": ...}``. New lines of a run, and its figures, come before the
transcripts of any run. It ends with its input.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import sqlite3
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from clawgym.errors import ClawGymError
from clawgym.evaluation.answers import run_answer, run_figures
from clawgym.evaluation.summary import summarize_rows
from clawgym.records.run_folder import RunFolder
from clawgym.reporting.page import to_json
from clawgym.viewer.index import RunIndex

__all__ = ["compute", "refresh"]


def compute(index: RunIndex) -> None:
    """Compute the figures of a run, unless they are there. Raises ValueError for a damaged run."""
    if (state := index.state) == index.get("answered"):
        return
    run = RunFolder(index.run, index.manifest, index.rows(), None)
    try:
        scores = summarize_rows(run.manifest, run.rows)
        answer, figures = run_answer(run, scores), run_figures(run.manifest, scores)
    except (TypeError, KeyError, AttributeError, ValueError, OverflowError) as error:
        raise ValueError(f"its results are damaged ({type(error).__name__}: {str(error)[:200]})") from error
    index.put("answer", to_json(answer))
    index.put("figures", to_json({"complete": scores.complete, "run": figures}))
    index.put("answered", state)


def refresh(index: RunIndex, report: Callable[[], None] = lambda: None) -> str:
    """Take in what is new, and compute the figures. Returns what is wrong with the run; otherwise an empty text.

    ``report`` is called after each part.
    """
    try:
        while index.update():
            report()
        compute(index)
    except (ClawGymError, ValueError, sqlite3.Error, OSError) as error:
        return str(error)
    return ""


def _tasks() -> queue.Queue[dict[str, Any] | None]:
    tasks: queue.Queue[dict[str, Any] | None] = queue.Queue()

    def read() -> None:
        for line in sys.stdin:
            tasks.put(json.loads(line))
        tasks.put(None)

    threading.Thread(target=read, daemon=True).start()
    return tasks


def _main() -> None:
    with contextlib.suppress(OSError):
        os.nice(10)
    tasks = _tasks()
    indexes: dict[str, RunIndex] = {}
    problems: dict[str, str] = {}
    reading: dict[str, Iterator[tuple[int, int]]] = {}

    def say(id: str) -> None:
        done, total = indexes[id].progress() if id in indexes else (0, 0)
        said = {"id": id, "done": done, "total": total, "problem": problems.get(id, "")}
        os.write(1, json.dumps(said).encode() + b"\n")

    while True:
        try:
            task = tasks.get(block=not reading)
        except queue.Empty:
            id = next(iter(reading))
            try:
                next(reading[id])
            except StopIteration:
                del reading[id]
            except (ClawGymError, sqlite3.Error, OSError) as error:
                del reading[id]
                problems[id] = str(error)
            say(id)
            continue
        if task is None:
            return
        id = task["id"]
        try:
            if id not in indexes:
                indexes[id] = RunIndex(Path(task["run"]), Path(task["index"]))
                indexes[id].forget_changed()
        except (sqlite3.Error, OSError) as error:
            problems[id] = f"its index cannot be made ({error}): free disk space in the cache folder"
        else:
            problems[id] = refresh(indexes[id], partial(say, id))
            if not problems[id]:
                reading[id] = indexes[id].index_texts()
        say(id)


if __name__ == "__main__":
    _main()
