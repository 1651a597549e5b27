"""How a generator becomes a Task: a :class:`TerminalDraft` goes in, a :class:`~clawgym.records.Task` comes out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import dedent
from typing import Any, Literal

import clawgym.verifiers.checks
from clawgym.records import Task, TaskFile, VerifierSpec
from clawgym.tasks.packs.seeded import Generator, draft_of
from clawgym.verifiers.protocols.reward_sh import standard_reward_sh

__all__ = ["TerminalDraft", "build", "here", "program_draft", "python"]

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
class TerminalDraft:
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


def build(made_by: Generator[TerminalDraft], seed: int) -> Task:
    """The instance of ``made_by`` for ``seed``."""
    draft = draft_of(made_by, seed)
    data = json.dumps(draft.data, indent=1, sort_keys=True)
    check = CHECK_PY.format(name=made_by.name, data=data, body=dedent(draft.check).strip("\n"))
    helpers = Path(clawgym.verifiers.checks.__file__)
    return Task(
        id=made_by.task_id(seed),
        instruction=draft.instruction,
        verifier=VerifierSpec(
            protocol="reward_sh",
            files=(
                TaskFile("reward.sh", standard_reward_sh(), executable=True),
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
        metadata=made_by.metadata(seed),
        solution=(_script("solve.sh", draft.solve),),
        wrong_solutions=tuple(_script(f"{what}.sh", text) for what, text in draft.wrong.items()),
        origin=f"terminal-basic:{made_by.name}:{seed}",
    )


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
) -> TerminalDraft:
    """A task to write ``program``; each mistake is one (old, new) replacement in the right ``source``."""
    source = dedent(source).strip("\n")
    return TerminalDraft(
        instruction=instruction,
        check=PROGRAM_CHECK,
        data={"program": program, "groups": dict(groups)},
        solve=here(program, source),
        wrong={what: here(program, replaced(source, *change)) for what, change in mistakes.items()},
        inputs=inputs or {},
        may_change=may_change,
        executes_agent_code="subprocess",
    )
