"""Build a :class:`~clawgym.records.Task` with a desktop from the :class:`GuiDraft` of a generator.

Invariants: no instruction and no reference chain of actions is in both splits. The expected state is made by the
generator from the start state, without a browser or server. An agent that ends with the wrong one of ``done`` and
``fail`` gets no reward.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Any, Protocol

from clawgym.desktop import COMPUTER_USE
from clawgym.records import Desktop, Limits, Task, TaskFile
from clawgym.tasks.mathematics import checker
from clawgym.tasks.packs.seeded import Generator, draft_of
from clawgym.tasks.worlds import sites

__all__ = [
    "LAST_WORD",
    "TODAY",
    "Action",
    "GuiDraft",
    "Drafted",
    "build",
    "choose",
    "click",
    "day",
    "drag",
    "fill",
    "keys",
    "refill",
    "written",
]

TODAY = "2031-03-05"
"""The day at every site: a Wednesday."""

_MONTHS = (
    *("January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November"),
    "December",
)

Action = dict[str, Any]
Tables = Mapping[str, Sequence[Sequence[Any]]]

LAST_WORD = """
import os
from pathlib import Path

def last_word():
    payload = Path(os.environ.get("OPENCLAW_REWARD_PAYLOAD", "/payload/openclaw_reward_payload.json"))
    word = None
    for step in json.loads(payload.read_text("utf-8", "replace"))["transcript"]:
        for call in step.get("tool_calls") or () if step["role"] == "assistant" else ():
            if call["name"] == "computer_use":
                word = call["arguments"].get("action")
            elif call["name"] == "submit":
                word = "done"
    return word
"""
"""Code at the start of each verifier of this pack: finds whether the agent ended with ``done`` or ``fail``."""

_LIMITS = Limits(memory_mb=1024, pids=512, disk_mb=512, max_steps=30)

_WORLD = """
world = cs.Comparison(checks.workspace / DATA["file"], DATA["world"])
"""
_DONE = """
for table in world.tables:
    checks(table)(lambda: last_word() == "done" and world.share(table))

@checks("nothing_else")
def _():
    return checks.passed(*checks.scores) and world.exact()
"""
_FAIL = """
@checks("cannot_be_done")
def _():
    return last_word() == "fail" and world.exact()
"""


class Drafted(Protocol):
    """The draft of a task with a desktop: at a web page (:class:`GuiDraft`), or in a native program
    (:class:`~clawgym.tasks.packs.gui_basic._native.Chore`)."""

    @property
    def instruction(self) -> str:
        """The instruction of the task."""
        ...

    @property
    def calls(self) -> Sequence[Action]:
        """The reference solution: the actions of a careful person, without the final ``done`` or ``fail``."""
        ...

    @property
    def wrong(self) -> Mapping[str, Sequence[Action]]:
        """Wrong solutions, at least one: name of the mistake -> actions. The agent then ends with ``done``."""
        ...

    @property
    def why(self) -> str:
        """The text of the final ``done`` or ``fail`` of the reference solution; may be empty."""
        ...

    @property
    def possible(self) -> bool:
        """Whether the task can be done. If not, the right end is ``fail``."""
        ...

    def task(self, name: str) -> dict[str, Any]:
        """Return the fields of the task that depend on the kind of draft. ``name`` is the name of the generator."""
        ...


@dataclass(frozen=True)
class GuiDraft:
    """The draft of a task at a web page. See :class:`Drafted`."""

    instruction: str
    app: str
    """Name of the site, such as ``forms`` (:mod:`clawgym.tasks.worlds.sites`)."""
    start: Mapping[str, Any]
    """What the site reads besides its tables."""
    tables: Tables
    """Table -> rows at the start."""
    calls: Sequence[Action]
    wrong: Mapping[str, Sequence[Action]]
    end: Tables | None
    """The tables that the task changes, with their rows at the end; None if the task cannot be done."""
    why: str = ""
    page: str = "/"
    """Path of the page that is open at the start."""

    @property
    def possible(self) -> bool:
        """See :class:`Drafted`."""
        return self.end is not None

    def task(self, name: str) -> dict[str, Any]:
        """Return the site, the limits, and a verifier that reads the database file of the site."""
        end = {**self.tables, **(self.end or {})}
        data = {
            "file": sites.SITE_FILE,
            "world": {
                "shape": sites.shape(self.app),
                "start": sites.tables(self.app, self.tables),
                "end": sites.tables(self.app, end),
            },
        }
        start = {"today": TODAY, **self.start, "tables": self.tables}
        body = LAST_WORD + _WORLD + (_DONE if self.possible else _FAIL)
        return {
            "verifier": checker(name, data, body, world=True),
            "limits": _LIMITS,
            "desktop": Desktop(site=sites.site_server(self.app, start), page=self.page),
        }


def build(made_by: Generator[Any], seed: int) -> Task:
    """Return the task of ``made_by``, whose drafts are :class:`Drafted`, for ``seed``. Raises as :func:`draft_of`."""
    draft: Drafted = draft_of(made_by, seed, chain_of)
    right, other = ("done", "fail") if draft.possible else ("fail", "done")
    wrong = {what: [*calls, _last("done")] for what, calls in draft.wrong.items()}
    wrong[f"only-says-{other}"] = [_last(other)]
    if not draft.possible:
        wrong["changes-it-and-says-fail"] = [*next(iter(draft.wrong.values())), _last("fail")]
    else:
        wrong["only-says-done"] = [_last("done")]
        wrong["does-it-and-says-fail"] = [*draft.calls, _last("fail")]
    return Task(
        id=made_by.task_id(seed),
        instruction=draft.instruction,
        **draft.task(made_by.name),
        metadata=made_by.metadata(seed),
        solution=(_calls_file("solve.json", [*draft.calls, _last(right, draft.why)]),),
        wrong_solutions=tuple(_calls_file(f"{what}.json", calls) for what, calls in wrong.items()),
        origin=f"gui-basic:{made_by.name}:{seed}",
    )


def chain_of(draft: Drafted) -> str:
    """Return the reference actions and the final text as JSON."""
    return json.dumps([draft.calls, draft.why], sort_keys=True)


def _calls_file(path: str, calls: Sequence[Action]) -> TaskFile:
    steps = [{"name": COMPUTER_USE, "arguments": call} for call in calls]
    return TaskFile(path, (json.dumps(steps, indent=1, ensure_ascii=False) + "\n").encode())


def _last(word: str, text: str = "") -> Action:
    return {"action": word, "text": text} if text else {"action": word}


# -- actions; an element is named by a CSS selector, and its middle is meant


def click(*selectors: str) -> list[Action]:
    """Click on the elements, one after another."""
    return [{"action": "left_click", "coordinate": selector} for selector in selectors]


def keys(*names: str) -> list[Action]:
    """Press the keys, one after another."""
    return [{"action": "key", "keys": [name]} for name in names]


def fill(selector: str, text: str) -> list[Action]:
    """Type ``text`` into an empty field."""
    return [*click(selector), {"action": "type", "text": text}]


def refill(selector: str, text: str) -> list[Action]:
    """Replace the text of a field by ``text``.

    Selects with ctrl+a. A triple click would count a click just before it at the same place of another page.
    """
    return [*click(selector), {"action": "key", "keys": ["ctrl", "a"]}, {"action": "type", "text": text}]


def choose(selector: str, option: str) -> list[Action]:
    """Choose ``option`` of a list by typing its first word, with which no other option may begin."""
    return [*click(selector), {"action": "type", "text": option.split()[0]}, *keys("enter")]


def drag(selector: str, to: str) -> list[Action]:
    """Drag one element onto another."""
    return [{"action": "left_click_drag", "start_coordinate": selector, "coordinate": to}]


# -- words


def day(offset: int) -> str:
    """Return the ISO date ``offset`` days after :data:`TODAY`."""
    return (date.fromisoformat(TODAY) + timedelta(days=offset)).isoformat()


def written(iso: str) -> str:
    """Format an ISO date for a text: ``2031-03-05`` is ``5 March 2031``."""
    when = date.fromisoformat(iso)
    return f"{when.day} {_MONTHS[when.month - 1]} {when.year}"
