"""Work in a native program on files of the workspace: a :class:`Chore` goes in, a verifier of the files comes out.

Invariants: every file and folder of the workspace counts, by its path and its text but for line ends at the end of a
file, which editors treat as they like; what programs write elsewhere (settings, a trash can) does not.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from clawgym.records import Desktop, Limits, TaskFile
from clawgym.tasks.mathematics import checker
from clawgym.tasks.packs.seeded import WORDS

from ._build import LAST_WORD, Action, keys

__all__ = ["HERE", "Chore", "Names", "Tree", "click_at", "press", "without", "write"]

HERE = "/root/Documents"
"""The workspace, as the programs show it. Their own files are beside it."""

_LIMITS = Limits(memory_mb=1024, pids=256, disk_mb=256, max_steps=50)

_TREE = """
def tree():
    found = {}
    folders = [""]
    for folder in folders:
        for entry in os.scandir(checks.workspace / folder):
            path = folder + entry.name
            if path == "reward":
                continue  # where some graders put this file
            if entry.is_dir(follow_symlinks=False):
                found[path + "/"] = ""
                folders.append(path + "/")
            else:
                found[path] = cg.read_text(entry.path).rstrip("\\n")
            if len(found) > 500:
                raise cg.Failed("too many files")
    return found
"""
_DONE = """
@checks("asked")
def _():
    start, end, now = DATA["start"], DATA["end"], tree()
    asked = [path for path in {**start, **end} if start.get(path) != end.get(path)]
    return last_word() == "done" and sum(now.get(path) == end.get(path) for path in asked) / len(asked)

@checks("nothing_else")
def _():
    return checks.passed("asked") and tree() == DATA["end"]
"""
_FAIL = """
@checks("cannot_be_done")
def _():
    return last_word() == "fail" and tree() == DATA["start"]
"""

Tree = Mapping[str, str]
"""Path below the workspace -> text. Folders are those of the files, and paths that end with ``/``, without a text."""


@dataclass(frozen=True)
class Chore:
    """See :class:`~clawgym.tasks.packs.gui_basic._build.Drafted`."""

    instruction: str
    program: tuple[str, ...]
    files: Tree
    """At the start; no folder is empty."""
    calls: Sequence[Action]
    wrong: Mapping[str, Sequence[Action]]
    end: Tree | None
    """All files and folders as they should be; None if the task cannot be done."""
    why: str = ""

    @property
    def possible(self) -> bool:
        return self.end is not None

    def task(self, name: str) -> dict[str, Any]:
        """The files, the program, and a verifier of the files."""
        data = {"start": _whole(self.files), "end": _whole(self.files if self.end is None else self.end)}
        verifier = checker(name, data, LAST_WORD + _TREE + (_DONE if self.possible else _FAIL))
        return {
            "verifier": replace(verifier, mutable_inputs=("*",)),
            "inputs": tuple(TaskFile(path, text.encode()) for path, text in self.files.items()),
            "workspace": HERE,
            "limits": _LIMITS,
            "desktop": Desktop(programs=(self.program,)),
        }


def _whole(tree: Tree) -> dict[str, str]:
    """As the verifier sees it."""
    found: dict[str, str] = {}
    for path, text in tree.items():
        parts = path.split("/")[:-1]
        found.update({"/".join(parts[: n + 1]) + "/": "" for n in range(len(parts))})
        if not path.endswith("/"):
            found[path] = text.rstrip("\n")
    return found


def without(tree: Tree, *paths: str) -> dict[str, str]:
    """``tree`` without some files, whose folders stay."""
    left = {path: text for path, text in tree.items() if path not in paths}
    return {**left, **{path.rpartition("/")[0] + "/": "" for path in paths if "/" in path}}


class Names:
    """Names of files and of folders, and lines of text: none comes twice."""

    def __init__(self, rng: random.Random) -> None:
        self._words = iter(rng.sample(WORDS, len(WORDS)))
        self.rng = rng

    def word(self) -> str:
        return next(self._words)

    def file(self, ending: str = "") -> str:
        """Such as ``maple-list-27.txt``."""
        kind = self.rng.choice(("draft", "list", "notes", "plan", "report"))
        return (
            f"{self.word()}-{kind}-{self.rng.randint(10, 99)}.{ending or self.rng.choice(('txt', 'md', 'csv', 'log'))}"
        )

    def text(self, lines: int = 4) -> str:
        """Such as ``maple: 120``, line by line."""
        return "".join(f"{self.rng.choice(WORDS)}: {self.rng.randint(10, 999)}\n" for _ in range(lines))


# -- what a hand does at a keyboard


def write(text: str) -> list[Action]:
    return [{"action": "type", "text": text}]


def click_at(x: int, y: int) -> list[Action]:
    """For what has no key: at a pixel of the screen that tasks have."""
    return [{"action": "left_click", "coordinate": [x, y]}]


def press(*combinations: str) -> list[Action]:
    """``press("ctrl+s", "enter")``: one after another."""
    return [action for keys_ in combinations for action in _together(keys_.split("+"))]


def _together(names: list[str]) -> list[Action]:
    return keys(*names) if len(names) == 1 else [{"action": "key", "keys": names}]
