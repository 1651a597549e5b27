"""How a generator becomes a Task: a :class:`Draft` goes in, a :class:`~clawgym.records.Task` comes out.

Invariants: a draft depends on ``random.Random(f"{generator}:{seed}")`` and on nothing else; even seeds are
for training and odd seeds are held out, and no instruction text is ever on both sides.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import dedent
from typing import Any, Literal

import clawgym.verifiers.checks
from clawgym.errors import TaskError
from clawgym.records import Task, TaskFile, VerifierSpec
from clawgym.verifiers.stock import stock_reward_sh

__all__ = [
    "Draft",
    "Generator",
    "WORDS",
    "build",
    "csv_text",
    "generator",
    "here",
    "program_draft",
    "python",
    "split_of",
]

_WORDS = """
acorn amber anvil apple arrow badge barn basil beach birch blaze bloom brick brook brush cabin cable camel candle
canoe cedar chalk cherry chess cider clay cliff clock cloud clover coast cobalt comet coral cotton crane creek crown
daisy delta diamond dolphin drum eagle elbow ember fable falcon feather fern field flint flute forest fossil frost
garden ginger glacier globe grape gravel guitar hammer harbor hazel heron hill honey ivory jacket jasmine jungle
kettle kiwi ladder lagoon lantern lemon lilac lily linen lotus magnet mango maple marble meadow melon mint mirror moss
nectar needle nickel nutmeg oasis ocean olive onion orbit otter oyster paddle panda parrot pebble pepper piano pilot
planet plum pocket poplar prairie puzzle quartz quilt rabbit raven reef ribbon river robin saddle saffron salmon satin
shadow silver spruce squid summit sunset
"""
WORDS = tuple(_WORDS.split())
"""Plain words; none is part of another, so that a substring search finds whole words only."""

CHECK_PY = '''\
"""Grades one instance of {name}: prints named checks in [0, 1] as one JSON object."""

import json

import clawgym_checks as cg

DATA = json.loads(r"""
{data}
""")
checks = cg.Checks()
WS = checks.workspace

{body}
checks.finish()
'''

TABLE_CHECK = """
def table():
    rows = [[cell.strip() for cell in row] for row in cg.read_csv(WS / DATA["path"])]
    return rows[0], [row for row in rows[1:] if len(row) == len(DATA["header"])], len(rows) - 1

@checks("rows")
def _():
    _, rows, _ = table()
    return cg.share([row[0] for row in rows], [row[0] for row in DATA["rows"]])

for column, name in list(enumerate(DATA["header"]))[1:]:
    @checks(name)
    def _():
        _, rows, number = table()
        got = {row[0]: row[column] for row in rows}
        return sum(got.get(row[0]) == row[column] for row in DATA["rows"]) / max(number, len(DATA["rows"]))

@checks("layout")
def _():
    header, rows, number = table()
    keys, wanted = ([row[0] for row in some] for some in (rows, DATA["rows"]))
    return header == DATA["header"] and number == len(rows) and keys == wanted
"""
"""Compares the CSV file ``path`` with ``header`` and ``rows``: its keys (first column), each column, its layout."""

PROGRAM_CHECK = """
def passes(case):
    cg.read_bytes(WS / DATA["program"])
    with cg.scratch(WS) as box:
        for path, text in case["files"].items():
            (box / path).parent.mkdir(parents=True, exist_ok=True)
            (box / path).write_bytes(bytes.fromhex(text[4:]) if text.startswith("hex:") else text.encode())
        ran = cg.run_program(case["argv"], cwd=box, stdin=case["stdin"])
        return ran.code == case["code"] and ran.out.rstrip() == case["out"].rstrip()

for group, cases in DATA["groups"].items():
    checks(group)(lambda: sum(passes(case) for case in cases) / len(cases))
"""
"""Runs the program that the agent wrote on hidden cases and compares what it prints and its exit status."""


@dataclass(frozen=True)
class Draft:
    """What a generator makes of its random numbers."""

    instruction: str
    check: str
    """Python source of the checks; it finds ``cg``, ``checks``, ``WS`` (the workspace) and ``DATA``."""
    data: Mapping[str, Any]
    """What the checks expect, computed here and never from the workspace; becomes ``DATA`` (as JSON)."""
    solve: str
    """Bash; runs in the workspace with relative paths."""
    wrong: Mapping[str, str]
    """Three plausible mistakes: what went wrong -> bash."""
    inputs: Mapping[str, str | bytes] = field(default_factory=dict)
    may_change: tuple[str, ...] = ()
    """Patterns of the inputs that the task asks to change."""
    executes_agent_code: Literal["in_process", "subprocess"] | None = None


@dataclass(frozen=True)
class Generator:
    """A named family of instances, one for each seed."""

    name: str
    family: str
    level: int
    draft: Callable[[random.Random], Draft]
    summary: str


def generator(
    name: str, *, family: str, level: int, into: dict[str, Generator]
) -> Callable[[Callable[[random.Random], Draft]], Callable[[random.Random], Draft]]:
    """Register the decorated function in ``into`` under ``name``; its docstring is the summary."""

    def register(draft: Callable[[random.Random], Draft]) -> Callable[[random.Random], Draft]:
        into[name] = Generator(name, family, level, draft, (draft.__doc__ or "").partition("\n")[0])
        return draft

    return register


def split_of(seed: int) -> Literal["train", "heldout"]:
    """Even seeds are for training, odd seeds are held out."""
    return "heldout" if seed % 2 else "train"


def build(made_by: Generator, seed: int) -> Task:
    """The instance of ``made_by`` for ``seed``."""
    if seed < 0:
        raise TaskError(
            f"{made_by.name}: seed {seed} is negative: give 0, 2, 4, ... (train) or 1, 3, 5, ... (held out)"
        )
    draft = _draft_on_its_side(made_by, seed)
    data = json.dumps(draft.data, indent=1, sort_keys=True)
    check = CHECK_PY.format(name=made_by.name, data=data, body=dedent(draft.check).strip("\n"))
    helpers = Path(clawgym.verifiers.checks.__file__)
    return Task(
        id=f"{made_by.name}-{split_of(seed)[0]}{seed:04d}",
        instruction=draft.instruction,
        verifier=VerifierSpec(
            protocol="reward_sh",
            files=(
                TaskFile("reward.sh", stock_reward_sh(), executable=True),
                TaskFile("check.py", check.encode()),
                TaskFile("clawgym_checks.py", helpers),
            ),
            executes_agent_code=draft.executes_agent_code,
            mutable_inputs=draft.may_change,
        ),
        inputs=tuple(
            TaskFile(path, text if isinstance(text, bytes) else text.encode(), executable=path.endswith(".sh"))
            for path, text in sorted(draft.inputs.items())
        ),
        metadata={
            "category": made_by.family,
            "family": made_by.family,
            "generator": made_by.name,
            "level": made_by.level,
            "seed": seed,
        },
        solution=(_script("solve.sh", draft.solve),),
        wrong_solutions=tuple(_script(f"{what}.sh", text) for what, text in draft.wrong.items()),
        origin=f"terminal-basic:{made_by.name}:{seed}",
    )


def _draft_on_its_side(made_by: Generator, seed: int) -> Draft:
    """Draw until the instruction's hash falls on the seed's side: this is what keeps the splits apart."""
    rng = random.Random(f"{made_by.name}:{seed}")
    for _ in range(1000):
        draft = made_by.draft(rng)
        if hashlib.sha256(draft.instruction.encode()).digest()[0] % 2 == seed % 2:
            return draft
    raise TaskError(f"{made_by.name}: its instructions do not vary: put something drawn from the seed into the text")


def _script(path: str, text: str) -> TaskFile:
    return TaskFile(path, ("#!/usr/bin/env bash\n" + plain(text)).encode(), executable=True)


def plain(text: str) -> str:
    """The lines of an indented text."""
    return dedent(text).strip("\n") + "\n"


def here(path: str, text: str) -> str:
    """Bash that writes ``text`` to ``path``."""
    return f"cat > {path} <<'END_OF_FILE'\n{plain(text)}END_OF_FILE\n"


def python(text: str) -> str:
    """Bash that runs a Python program."""
    return f"python3 - <<'END_OF_FILE'\n{plain(text)}END_OF_FILE\n"


def replaced(text: str, old: str, new: str) -> str:
    """``text`` with its one ``old`` made ``new``: a wrong solution that differs from the right one in one place."""
    if text.count(old) != 1:
        raise ValueError(f"{old!r} occurs {text.count(old)} times, not once: choose a longer piece")
    return text.replace(old, new)


def csv_text(rows: list[list[Any]], delimiter: str = ",", end: str = "\n") -> str:
    """Rows as CSV text, quoted only where needed."""

    def cell(value: Any) -> str:
        text = "" if value is None else str(value)
        return '"' + text.replace('"', '""') + '"' if set(text) & {delimiter, '"', "\n", "\r"} else text

    return "".join(delimiter.join(cell(value) for value in row) + end for row in rows)


def case(argv: list[str], out: str, *, stdin: str = "", code: int = 0, files: Mapping[str, str] | None = None) -> dict:
    """One hidden case for :data:`PROGRAM_CHECK`. A file's text may be ``hex:`` and hexadecimal bytes."""
    return {"argv": argv, "out": out, "stdin": stdin, "code": code, "files": dict(files or {})}


def program_draft(
    instruction: str,
    *,
    program: str,
    source: str,
    mistakes: Mapping[str, tuple[str, str]],
    groups: Mapping[str, list[dict]],
    inputs: Mapping[str, str | bytes] | None = None,
    may_change: tuple[str, ...] = (),
) -> Draft:
    """A task to write ``program``; each mistake is one (old, new) replacement in the right ``source``."""
    source = dedent(source).strip("\n")
    return Draft(
        instruction=instruction,
        check=PROGRAM_CHECK,
        data={"program": program, "groups": dict(groups)},
        solve=here(program, source),
        wrong={what: here(program, replaced(source, *change)) for what, change in mistakes.items()},
        inputs=inputs or {},
        may_change=may_change,
        executes_agent_code="subprocess",
    )
