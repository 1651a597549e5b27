"""Pins of the tasks' hashes, in ``tests/data/pinned_hashes/``.

The packs' tasks, their verifiers and their solutions must come out the same on every machine and after every
refactoring. Run this program to write the pins again, only after a deliberate change of the tasks::

    CLAWGYM_DATA=path/to/RL/data python tests/pin_hashes.py

Name one or more files without their suffix (``terminal-basic``, ``seeds``) to write only these. The public sets are
skipped if ``CLAWGYM_DATA`` is not set.

Each line holds an id and digests, shortened to 16 hexadecimal digits:

- ``<pack>.txt``: every task of both splits, with content hash, verifier digest, and a digest of its solutions;
- ``seeds.txt``: one digest for each generator, over its tasks of the seeds 0 to 99;
- ``clawgym_train.txt``, ``clawgym_eval.txt``: every task of the public sets, with one digest of the same three;
- ``formats.txt``: tasks read from OSWorld's JSON and from rows of mathematics (:data:`FOREIGN`);
- ``files.txt``: the files of this repository that are copied into tasks, with all 64 digits.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from clawgym.records import Task, TaskFile
from clawgym.registry import packs
from clawgym.tasks import load
from clawgym.tasks.packs import SPLITS, pack

__all__ = ["PINS", "PUBLIC", "SEEDED", "library_files", "read_pins"]

ROOT = Path(__file__).parents[1]
FOLDER = Path(__file__).parent / "data" / "pinned_hashes"
SOURCES = ("clawgym", "tasks", "verifiers", "leaderboards", "trainers", "src")
"""Where the library's files are, now or later."""
SEEDED = tuple(name for name in packs.names() if name != "swe-basic")
"""The packs that are made from seeds."""
PUBLIC = {"clawgym_train": "ClawGym-Train", "clawgym_eval": "ClawGym-Bench"}
"""Folder of the public data -> name of the set."""
SEEDS = 100

_HOME = "/home/user"
_NOTE = {
    "id": "note",
    "snapshot": "os",
    "instruction": "Write milk into note.txt on the desktop.",
    "source": "by hand",
    "config": [
        {"type": "execute", "parameters": {"command": "mkdir ~/Desktop/done", "shell": True}},
        {"type": "sleep", "parameters": {"seconds": 1}},
    ],
    "related_apps": ["os"],
    "evaluator": {
        "func": "exact_match",
        "result": {"type": "vm_command_line", "command": f"cat {_HOME}/Desktop/note.txt"},
        "expected": {"type": "rule", "rules": {"expected": "milk"}},
    },
}
_FILE = {
    "func": ["check_include_exclude", "literal_match"],
    "conj": "or",
    "result": [{"type": "vm_file", "path": f"{_HOME}/Desktop/{name}", "dest": name} for name in ("a.txt", "b.txt")],
    "expected": [
        {"type": "rule", "rules": {"include": ["milk"], "exclude": ["bread"]}},
        {"type": "rule", "rules": {"expected": "Milk"}},
    ],
    "options": [{}, {"ignore_case": True}],
}
_ROWS = [
    {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": "What is 6 * 7?"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": "42", "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": "dapo"},
    },
    {"ID": "aime", "Problem": "What is 200 + 4?", "Solution": "Add.", "Answer": 204},
]
FOREIGN: dict[str, str] = {
    "os/note.json": json.dumps(_NOTE),
    "os/files.json": json.dumps({**_NOTE, "id": "files", "evaluator": _FILE}),
    "os/infeasible.json": json.dumps({**_NOTE, "id": "infeasible", "config": [], "evaluator": {"func": "infeasible"}}),
    "rows.jsonl": "".join(json.dumps(row) + "\n" for row in _ROWS),
}
"""File -> text, of tasks in other formats."""


def _short(value: str) -> str:
    return value[:16]


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _solutions(task: Task) -> str:
    """A digest of the files of the reference solution and of the wrong solutions."""

    def rows(files: Iterable[TaskFile]) -> list[tuple[str, bool, str]]:
        return sorted((file.path, file.executable, file.sha256) for file in files)

    return _digest([rows(task.solution), rows(task.wrong_solutions)])


def _digests(task: Task) -> tuple[str, str, str]:
    return task.content_hash, task.verifier.digest, _solutions(task)


def of_pack(name: str) -> Iterator[str]:
    """A line for each split of a pack, with the hash of the whole, and a line for each task."""
    for split in SPLITS:
        tasks = load(f"{name}:{split}")
        yield f"{name}@{tasks.version}:{split} {_short(tasks.content_hash)}"
        for task in tasks.tasks:
            yield " ".join([task.id, *map(_short, _digests(task))])


def of_seeds() -> Iterator[str]:
    """A line for each generator of the seeded packs: one digest over its tasks of the first seeds."""
    for name in SEEDED:
        found: dict[str, list[object]] = defaultdict(list)
        for first, split in enumerate(SPLITS):  # even seeds are for training
            for task in pack(name).load(split, range(first, SEEDS, 2)).tasks:
                found[task.metadata["generator"]].append([task.id, *_digests(task)])
        for generator, rows in found.items():
            yield f"{name}/{generator} {_short(_digest(rows))}"


def of_public(folder: str) -> Iterator[str]:
    """A line for each task of a public set."""
    for task in load(PUBLIC[folder]).tasks:
        yield f"{task.id} {_short(_digest(_digests(task)))}"


def of_formats() -> Iterator[str]:
    """A line for each task of :data:`FOREIGN`; one that cannot run says why, except for a missing layer."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in FOREIGN.items():
            path = Path(folder, name)
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, "utf-8")
            for task in load(str(path)).tasks:
                why = [] if task.layers or task.unsupported is None else [f"unsupported: {task.unsupported}"]
                yield " ".join([task.id, *map(_short, _digests(task)), *why])


def library_files() -> Iterator[Path]:
    """The files of the library."""
    for source in SOURCES:
        for path in sorted((ROOT / source).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                yield path


def of_files() -> Iterator[str]:
    """A line for each file of the library that is copied into tasks, by its base name.

    ``_osworld_checks.py`` is named here, since no pack has a task in OSWorld's format.
    """
    copied: set[bytes] = set()
    for name in packs.names():
        for task in load(f"{name}:train").tasks:
            site = task.desktop.site.files if task.desktop and task.desktop.site else ()
            served = (file for server in task.tools for file in server.files)
            for file in (*task.verifier.files, *served, *site, *task.solution):
                copied.add(file.read())
    found = {
        f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}"
        for path in library_files()
        if path.name == "_osworld_checks.py" or (path.read_bytes() in copied and path.stat().st_size)
    }
    yield from sorted(found)


PINS: dict[str, Callable[[], Iterator[str]]] = {
    **{name: lambda name=name: of_pack(name) for name in packs.names()},
    "seeds": of_seeds,
    **{folder: lambda folder=folder: of_public(folder) for folder in PUBLIC},
    "formats": of_formats,
    "files": of_files,
}
"""File of pins, without its suffix -> its lines as they are now."""


def read_pins(name: str) -> list[str]:
    """The pinned lines."""
    return (FOLDER / f"{name}.txt").read_text("utf-8").splitlines()


def main(names: list[str]) -> None:
    """Write the pins."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in names or PINS:
        if name in PUBLIC and "CLAWGYM_DATA" not in os.environ:
            print(f"{name}: skipped: CLAWGYM_DATA is not set")
            continue
        lines = list(PINS[name]())
        (FOLDER / f"{name}.txt").write_text("".join(f"{line}\n" for line in lines), "utf-8")
        print(f"{name}: {len(lines)} lines")


if __name__ == "__main__":
    main(sys.argv[1:])
