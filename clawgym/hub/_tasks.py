"""The files of a task set that is pushed to the Hub as a benchmark data set."""

from __future__ import annotations

import json
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from clawgym.evaluation.findings import FLAWS
from clawgym.files import read_below
from clawgym.hub._card import portable
from clawgym.hub._checkpoint import HubError
from clawgym.hub._upload import Upload, UploadPlan, refuse_secrets, render, repo_name
from clawgym.records import TaskSet
from clawgym.redteam.rates import OURS as OWN_GRADER
from clawgym.redteam.rates import task_class
from clawgym.tasks.packed import DATA, pack_rows

__all__ = ["OURS", "PULLED", "plan_tasks"]

PULLED = re.compile(re.escape(DATA))
OURS = re.compile(rf"{PULLED.pattern}|eval\.yaml|README\.md")
_SPLIT = "test"


@contextmanager
def plan_tasks(
    tasks: TaskSet, *, audit: str | Path | None = None, attack: str | Path | None = None
) -> Iterator[UploadPlan]:
    """Collect and check the files of a benchmark data set: the tasks as rows, ``eval.yaml`` and the card.

    Args:
        tasks: the set; every task must be readable.
        audit: the folder of ``clawgym tasks audit`` on this very set.
        attack: the folder of ``clawgym redteam exploits`` on this very set.

    The rows are in a temporary folder until the context ends.

    Raises:
        HubError: a task could not be read, a folder belongs to another set, or something looks like a secret.
        TaskError: a task cannot be stored.
    """
    if tasks.problems:
        where, why = next(iter(tasks.problems.items()))
        raise HubError(f"{len(tasks.problems)} tasks could not be read ({where}: {why}): repair or remove them")
    audited = _report(audit, "audit.json", tasks, "clawgym tasks audit")
    attacked = _report(attack, "attack.json", tasks, "clawgym redteam exploits")
    notes = [
        f"the card has no {what}: run `{command}`, then give its folder with {option}"
        for what, found, command, option in (
            ("audit", audited, "clawgym tasks audit", "--audit"),
            ("attack rate", attacked, "clawgym redteam exploits", "--attack"),
        )
        if found is None
    ]
    name = repo_name(portable(tasks.name.removeprefix("hf://")))
    with tempfile.TemporaryDirectory(prefix="clawgym-push-") as scratch:
        rows = Path(scratch, "test.jsonl")
        with rows.open("wb") as file:
            for line in pack_rows(tasks):
                refuse_secrets(_texts(line), "the task")
                file.write(line)
        card = _card(name, tasks, audited, attacked)
        listing = yaml.safe_dump(_listing(name, tasks), sort_keys=False, allow_unicode=True)
        refuse_secrets([("README.md", card), ("eval.yaml", listing)], "the task set")
        uploads = (
            Upload("README.md", card.encode()),
            Upload(DATA, rows),
            Upload("eval.yaml", listing.encode()),
        )
        yield UploadPlan(name, "dataset", f"{name}: {len(tasks)} tasks", uploads, tuple(notes), OURS)


def _texts(line: bytes) -> Iterator[tuple[str, str]]:
    row = json.loads(line)
    yield f"task {row['id']}", row["instruction"]
    for file in row["files"]:
        if file["text"] is not None:
            yield f"task {row['id']}: {file['path']}", file["text"]


def _report(folder: str | Path | None, name: str, tasks: TaskSet, command: str) -> dict[str, Any] | None:
    if folder is None:
        return None
    try:
        found = json.loads(read_below(Path(folder), name))
        digest = found["task_set"]["hash"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise HubError(f"{Path(folder) / name}: cannot be read ({error}): give the folder of `{command}`") from error
    if digest != tasks.content_hash:
        raise HubError(f"{folder}: is about other tasks (hash {str(digest)[:12]}): run `{command}` on this set")
    if not found.get("complete"):
        raise HubError(f"{folder}: is not finished: run the same `{command}` command again to resume")
    return found


def _listing(name: str, tasks: TaskSet) -> dict[str, Any]:
    """The content of ``eval.yaml``, the Hub's description of a benchmark."""
    return {
        "name": name,
        "description": f"{len(tasks)} agent tasks in sandboxes, graded by code. Content hash {tasks.content_hash}.",
        "evaluation_framework": "clawgym",
        "tasks": [{"id": name, "config": "default", "split": _SPLIT}],
    }


def _card(name: str, tasks: TaskSet, audit: Mapping[str, Any] | None, attack: Mapping[str, Any] | None) -> str:
    counts = Counter(str(task.metadata.get("category") or "(none)") for task in tasks.tasks)
    size = len(tasks)
    flaws = {flaw.name: flaw.about for flaw in FLAWS}
    sizes = ((1_000, "n<1K"), (10_000, "1K<n<10K"), (100_000, "10K<n<100K"))
    header = {
        **({"license": tasks.license.lower()} if tasks.license else {}),
        "tags": ["clawgym", "benchmark", "agent", "evaluation"],
        "size_categories": [next((word for limit, word in sizes if size < limit), "n>100K")],
        "configs": [{"config_name": "default", "data_files": [{"split": _SPLIT, "path": DATA}]}],
    }
    rates = [rate for rate in (attack or {}).get("rates", ()) if rate.get("harness") == OWN_GRADER]
    return render(
        "tasks.md.j2",
        header=yaml.safe_dump(header, sort_keys=False),
        name=name,
        slug=name,
        tasks=tasks,
        categories=sorted(counts.items()),
        classes=sorted(Counter(task_class(task).replace("_", " ") for task in tasks.tasks).items()),
        solutions=sum(bool(task.solution) for task in tasks.tasks),
        audit=audit,
        flaws=[(flaw, count, flaws.get(flaw, "")) for flaw, count in (audit or {}).get("flaws", {}).items() if count],
        attack=attack,
        rates=rates,
    )
