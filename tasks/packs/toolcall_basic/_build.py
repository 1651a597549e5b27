"""Build a :class:`~clawgym.records.Task` with tools from the :class:`ToolCallDraft` of a generator.

Invariants: no instruction and no reference chain of calls is in both splits. The expected state is the world after the
reference calls.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from textwrap import dedent
from typing import Any, Literal

from clawgym.errors import TaskError
from clawgym.records import Layer, Task, TaskFile, ToolServer
from clawgym.tasks.mathematics import ANSWER_CHECK, MATH_FOLDER, checker, math_layer
from clawgym.tasks.packs.seeded import Generator, draft_of
from clawgym.tasks.worlds import servers
from clawgym.tasks.worlds.servers.world import World

__all__ = ["TODAY", "Call", "ToolCallDraft", "build", "call", "python", "world_shape"]

Call = dict[str, Any]
"""A tool call: ``{"name": ..., "arguments": {...}}``."""

TODAY = "2031-03-05"
"""The day in every world: a Wednesday."""

_WORLD_CHECK = """
world = cs.Comparison(checks.workspace / DATA["file"], DATA["world"])

for table in world.tables:
    checks(table)(lambda: world.share(table))
"""
_ANSWER_CHECK = {
    "": "",
    "text": """
@checks("answer")
def _():
    return ca.same_text(ca.answer_in(ca.final_message()), DATA["answer"])
""",
    "words": """
WORDS = ca.answer_in(ca.final_message()).casefold().split()
WANTED = DATA["answer"].casefold().split()

@checks("some_words")
def _():
    return cg.share(WORDS, WANTED)

@checks("all_words")
def _():
    return sorted(WORDS) == sorted(WANTED)

@checks("order")
def _():
    return WORDS == WANTED
""",
    "number": """
@checks("answer")
def _():
    return ca.equal(ca.answer_in(ca.final_message()), DATA["answer"])
""",
    "math": ANSWER_CHECK,
}
_NOTHING_ELSE = """
@checks("nothing_else")
def _():
    return checks.passed(*checks.scores) and world.exact()
"""


@dataclass(frozen=True)
class ToolCallDraft:
    """The draft of a task with tools. It has ``start`` or ``inputs``, not both."""

    instruction: str
    calls: Sequence[Call]
    """The reference solution: the calls of a careful agent, which looks things up first."""
    wrong: Mapping[str, tuple[Sequence[Call], str]]
    """Wrong solutions, three or more: name of the mistake -> calls and answer."""
    answer: str = ""
    """The answer that the closing message must have; empty if only the state counts."""
    kind: Literal["", "text", "words", "number", "math"] = ""
    """How the answer is compared; empty without an answer. ``math`` needs the layer of the mathematics library."""
    said: str = ""
    """The answer of the reference solution, if it is another form of :attr:`answer`."""
    parts: tuple[str, ...] = ()
    """Parts of the world, such as ``mail``. Without any, the interpreter is the only server."""
    start: Mapping[str, Any] = field(default_factory=dict)
    """Table of the world -> rows at the start."""
    code: bool = False
    """Whether the task has the interpreter beside the world."""
    inputs: Mapping[str, str] = field(default_factory=dict)
    """Path below the workspace -> text."""


def call(name: str, **arguments: Any) -> Call:
    """Return a call of the tool ``name``."""
    return {"name": name, "arguments": arguments}


def python(code: str) -> Call:
    """Return a call of the interpreter that runs ``code``, without its common indentation."""
    return call("code_interpreter", code=dedent(code).strip("\n"))


def build(made_by: Generator[ToolCallDraft], seed: int) -> Task:
    """Return the task of ``made_by`` for ``seed``.

    Raises :class:`TaskError` as :func:`draft_of` does, and if a reference call fails.
    """
    draft = draft_of(made_by, seed, chain_of)
    data: dict[str, Any] = {}
    if draft.kind:
        data["answer"] = draft.answer
    layers: dict[str, Layer] = {}
    unsupported = None
    if draft.kind == "math":
        data["library"] = MATH_FOLDER
        layer, unsupported = math_layer()
        layers = {MATH_FOLDER: layer}
    if draft.parts:
        data |= {"file": servers.WORLD_FILE, "world": _expected(made_by.name, draft)}
    body = _WORLD_CHECK * bool(draft.parts) + _ANSWER_CHECK[draft.kind] + _NOTHING_ELSE * bool(draft.parts)
    return Task(
        id=made_by.task_id(seed),
        instruction=draft.instruction,
        verifier=checker(made_by.name, data, body, world=bool(draft.parts)),
        inputs=tuple(TaskFile(path, text.encode()) for path, text in sorted(draft.inputs.items())),
        layers=layers,
        tools=_tools(draft),
        metadata=made_by.metadata(seed),
        solution=(_calls_file("solve.json", draft.calls, draft.said or draft.answer),),
        wrong_solutions=tuple(_calls_file(f"{what}.json", *wrong) for what, wrong in draft.wrong.items()),
        unsupported=unsupported,
        origin=f"toolcall-basic:{made_by.name}:{seed}",
    )


def _tools(draft: ToolCallDraft) -> tuple[ToolServer, ...]:
    session = servers.interpreter_server(path=MATH_FOLDER if draft.kind == "math" else "")
    if not draft.parts:
        return (session,)
    world = servers.world_server(draft.parts, {"today": TODAY, **draft.start})
    return (world, session) if draft.code else (world,)


def chain_of(draft: ToolCallDraft) -> str:
    """Return the reference calls and the answer as JSON."""
    return json.dumps([draft.calls, draft.answer], sort_keys=True)


def _expected(name: str, draft: ToolCallDraft) -> dict[str, Any]:
    """The world before and after the reference calls, for :class:`clawgym.verifiers.state.Comparison`."""
    world = World(":memory:", list(draft.parts), {"today": TODAY, **draft.start})
    try:
        start = world.tables()
        for step in draft.calls:
            if step["name"] in world.tools:
                result = world.call(step["name"], step["arguments"])
                if result["isError"]:
                    raise TaskError(f"{name}: its own solution fails: {step}: {result['content'][0]['text']}")
        return {"shape": world_shape(draft.parts), "start": start, "end": world.tables()}
    finally:
        world.db.close()


_PART_OF = {
    "attendees": ["event", "events"],
    "recipients": ["mail", "mails"],
    "labels": ["mail", "mails"],
    "order_lines": ["order_id", "orders"],
}


@cache
def world_shape(parts: tuple[str, ...]) -> dict[str, Any]:
    """The form of the tables of ``parts``, for :class:`clawgym.verifiers.state.Comparison`."""
    db = sqlite3.connect(":memory:")
    try:
        World.begin(db, list(parts), {})
        shape = {}
        for name, sql in db.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table'").fetchall():
            columns = db.execute(f"PRAGMA table_info({name})").fetchall()
            keys = [row[1] for row in sorted(columns, key=lambda row: row[5]) if row[5]]
            shape[name] = {"sql": sql, "columns": [row[1] for row in columns], "keys": keys}
            if name in _PART_OF:
                shape[name]["part_of"] = _PART_OF[name]
        return shape
    finally:
        db.close()


def _calls_file(path: str, calls: Sequence[Call], answer: str) -> TaskFile:
    closing = call("submit", message=f"Answer: {answer}" if answer else "Done.")
    return TaskFile(path, (json.dumps([*calls, closing], indent=1, ensure_ascii=False) + "\n").encode())
