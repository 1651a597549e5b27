"""How a generator becomes a Task: a :class:`TerminalDraft` goes in, a :class:`~clawgym.records.Task` comes out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import Any, Literal

import clawgym.verifiers.checks
from clawgym.records import Task, TaskFile, VerifierSpec
from clawgym.tasks.packs.seeded import Generator, draft_of
from clawgym.verifiers.protocols.reward_sh import standard_reward_sh

__all__ = ["TerminalDraft", "build", "here", "program_draft", "python", "template"]

TEMPLATES = Path(__file__).parent / "templates"


class _Template(Template):
    delimiter = "@@"


def template(path: str, **values: object) -> str:
    """The file ``templates/<path>.tmpl``, with each ``@@{name}`` replaced by a value. Ends with a line break.

    Raises :class:`KeyError` if a value is missing.
    """
    return _Template((TEMPLATES / f"{path}.tmpl").read_text("utf-8")).substitute(values)


TABLE_CHECK = template("shared/table.py")
"""Compares the CSV file ``path`` with ``header`` and ``rows``: its keys (first column), each column, its layout."""

PROGRAM_CHECK = template("shared/program.py")
"""Runs the program that the agent wrote on hidden cases and compares what it prints and its exit status."""


@dataclass(frozen=True)
class TerminalDraft:
    """What a generator makes of its random numbers."""

    instruction: str
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
    check: str = ""
    """Python source of the checks; it finds ``cg``, ``checks``, ``WS`` (the workspace) and ``DATA``. By default the
    template ``check.py`` of the generator."""


def build(made_by: Generator[TerminalDraft], seed: int) -> Task:
    """The instance of ``made_by`` for ``seed``."""
    draft = draft_of(made_by, seed)
    expected = json.dumps(draft.data, indent=1, sort_keys=True)
    body = draft.check or template(f"{made_by.name}/check.py")
    check = template("shared/grader.py", name=made_by.name, data=expected, body=body.strip("\n"))
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
            TaskFile(path, data if isinstance(data, bytes) else data.encode(), executable=path.endswith(".sh"))
            for path, data in sorted(draft.inputs.items())
        ),
        metadata=made_by.metadata(seed),
        solution=(_script("solve.sh", draft.solve),),
        wrong_solutions=tuple(_script(f"{what}.sh", script) for what, script in draft.wrong.items()),
        origin=f"terminal-basic:{made_by.name}:{seed}",
    )


def _script(path: str, script: str) -> TaskFile:
    return TaskFile(path, ("#!/usr/bin/env bash\n" + script.strip("\n") + "\n").encode(), executable=True)


def here(path: str, content: str) -> str:
    """Bash that writes ``content`` to ``path``."""
    return f"cat > {path} <<'END_OF_FILE'\n{content}END_OF_FILE\n"


def python(program: str) -> str:
    """Bash that runs a Python program."""
    return f"python3 - <<'END_OF_FILE'\n{program}END_OF_FILE\n"


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
