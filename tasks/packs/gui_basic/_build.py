"""Build a :class:`~clawgym.records.Task` with a desktop from the :class:`GuiDraft` of a generator.

Invariants: neither an instruction nor a reference chain of actions is ever on both sides; the state that is expected is
what a generator makes of the start state, and no browser or server; nothing is paid to an agent whose own last word is
not the right one, ``done`` or ``fail``.
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
"""What every verifier here begins with."""

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
    """What a generator makes of its random numbers: work at a page (:class:`GuiDraft`) or in a program."""

    @property
    def instruction(self) -> str: ...

    @property
    def calls(self) -> Sequence[Action]:
        """The reference: what a careful person would do, without the last word."""
        ...

    @property
    def wrong(self) -> Mapping[str, Sequence[Action]]:
        """One or more plausible mistakes: what went wrong -> actions, after which the agent says ``done``."""
        ...

    @property
    def why(self) -> str:
        """What the reference says at the end."""
        ...

    @property
    def possible(self) -> bool: ...

    def task(self, name: str) -> dict[str, Any]:
        """What of the task is not alike for all kinds of work; ``name`` is the generator's."""
        ...


@dataclass(frozen=True)
class GuiDraft:
    """Work at a page. See :class:`Drafted`."""

    instruction: str
    app: str
    start: Mapping[str, Any]
    """What the app reads besides its tables."""
    tables: Tables
    calls: Sequence[Action]
    wrong: Mapping[str, Sequence[Action]]
    end: Tables | None
    """The tables that the task changes, as they should be; None if the task cannot be done."""
    why: str = ""
    page: str = "/"

    @property
    def possible(self) -> bool:
        return self.end is not None

    def task(self, name: str) -> dict[str, Any]:
        """The site, and a verifier of its file."""
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
    """The instance of ``made_by``, whose drafts are :class:`Drafted`, for ``seed``."""
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
    """The reference actions and the last word, as one text."""
    return json.dumps([draft.calls, draft.why], sort_keys=True)


def _calls_file(path: str, calls: Sequence[Action]) -> TaskFile:
    steps = [{"name": COMPUTER_USE, "arguments": call} for call in calls]
    return TaskFile(path, (json.dumps(steps, indent=1, ensure_ascii=False) + "\n").encode())


def _last(word: str, text: str = "") -> Action:
    return {"action": word, "text": text} if text else {"action": word}


# -- what a hand does; elements are named by selectors, and their middle is meant


def click(*selectors: str) -> list[Action]:
    """Click on one after another."""
    return [{"action": "left_click", "coordinate": selector} for selector in selectors]


def keys(*names: str) -> list[Action]:
    """Press one key after another."""
    return [{"action": "key", "keys": [name]} for name in names]


def fill(selector: str, text: str) -> list[Action]:
    """Write into a field that is empty."""
    return [*click(selector), {"action": "type", "text": text}]


def refill(selector: str, text: str) -> list[Action]:
    """Write over what a field holds. No triple click: a browser counts a click just before it, at the same place but
    on another page, as one of the three."""
    return [*click(selector), {"action": "key", "keys": ["ctrl", "a"]}, {"action": "type", "text": text}]


def choose(selector: str, option: str) -> list[Action]:
    """Choose from a list by the first word of an option, which no other option of it begins with."""
    return [*click(selector), {"action": "type", "text": option.split()[0]}, *keys("enter")]


def drag(selector: str, to: str) -> list[Action]:
    """Take a thing to another place."""
    return [{"action": "left_click_drag", "start_coordinate": selector, "coordinate": to}]


# -- words


def day(offset: int) -> str:
    """The day ``offset`` days after today."""
    return (date.fromisoformat(TODAY) + timedelta(days=offset)).isoformat()


def written(iso: str) -> str:
    """``2031-03-05`` as people write it: ``5 March 2031``."""
    when = date.fromisoformat(iso)
    return f"{when.day} {_MONTHS[when.month - 1]} {when.year}"
