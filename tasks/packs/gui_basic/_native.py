"""Drafts of tasks in a native program, and the verifier of the files in the workspace.

Invariants: the verifier compares path and text of every file and folder of the workspace. It ignores line ends at the
end of a file, since editors differ there, and what programs write elsewhere, such as settings and a trash can.
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
"""The workspace. The programs keep their own files outside of it."""

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
"""Path below the workspace -> text. A path that ends with ``/`` is a folder without files; its text is empty."""


@dataclass(frozen=True)
class Chore:
    """The draft of a task in a native program. See :class:`~clawgym.tasks.packs.gui_basic._build.Drafted`."""

    instruction: str
    program: tuple[str, ...]
    """Command line of the program that is open at the start."""
    files: Tree
    """The files at the start. No folder is empty."""
    calls: Sequence[Action]
    wrong: Mapping[str, Sequence[Action]]
    end: Tree | None
    """All files and folders at the end; None if the task cannot be done."""
    why: str = ""

    @property
    def possible(self) -> bool:
        """See :class:`~clawgym.tasks.packs.gui_basic._build.Drafted`."""
        return self.end is not None

    def task(self, name: str) -> dict[str, Any]:
        """Return the files, the program, the limits, and a verifier of the files."""
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
    """All files and folders of ``tree``, as the verifier reads them."""
    found: dict[str, str] = {}
    for path, text in tree.items():
        parts = path.split("/")[:-1]
        found.update({"/".join(parts[: n + 1]) + "/": "" for n in range(len(parts))})
        if not path.endswith("/"):
            found[path] = text.rstrip("\n")
    return found


def without(tree: Tree, *paths: str) -> dict[str, str]:
    """Return ``tree`` without the files ``paths``. Their folders stay."""
    left = {path: text for path, text in tree.items() if path not in paths}
    return {**left, **{path.rpartition("/")[0] + "/": "" for path in paths if "/" in path}}


class Names:
    """Draws names of files and folders, none of them twice, and texts for the files."""

    def __init__(self, rng: random.Random) -> None:
        self._words = iter(rng.sample(WORDS, len(WORDS)))
        self.rng = rng

    def word(self) -> str:
        """Return a word that was not drawn before. Raises :class:`StopIteration` once all are used."""
        return next(self._words)

    def file(self, ending: str = "") -> str:
        """Return a file name that was not drawn before, such as ``maple-list-27.txt``."""
        kind = self.rng.choice(("draft", "list", "notes", "plan", "report"))
        return (
            f"{self.word()}-{kind}-{self.rng.randint(10, 99)}.{ending or self.rng.choice(('txt', 'md', 'csv', 'log'))}"
        )

    def text(self, lines: int = 4) -> str:
        """Return a text of some lines, each like ``maple: 120``."""
        return "".join(f"{self.rng.choice(WORDS)}: {self.rng.randint(10, 999)}\n" for _ in range(lines))


# -- actions


def write(text: str) -> list[Action]:
    """Type ``text``."""
    return [{"action": "type", "text": text}]


def click_at(x: int, y: int) -> list[Action]:
    """Click at a pixel of the screen, for what has no key."""
    return [{"action": "left_click", "coordinate": [x, y]}]


def press(*combinations: str) -> list[Action]:
    """Press key combinations, one after another: ``press("ctrl+s", "enter")``."""
    return [action for keys_ in combinations for action in _together(keys_.split("+"))]


def _together(names: list[str]) -> list[Action]:
    return keys(*names) if len(names) == 1 else [{"action": "key", "keys": names}]
