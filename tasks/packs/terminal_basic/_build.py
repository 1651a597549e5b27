"""Build a :class:`~clawgym.records.Task` from the :class:`TerminalDraft` of a generator."""

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
    """Return the file ``templates/<path>.tmpl`` with each ``@@{name}`` replaced by its value.

    Raises :class:`KeyError` if a value is missing.
    """
    return _Template((TEMPLATES / f"{path}.tmpl").read_text("utf-8")).substitute(values)


TABLE_CHECK = template("shared/table.py")
"""Source of checks that compare a CSV file with the expected header and rows: its keys (first column), each column, and
its layout."""

PROGRAM_CHECK = template("shared/program.py")
"""Source of checks that run the agent's program on hidden cases and compare its output and exit status."""


@dataclass(frozen=True)
class TerminalDraft:
    """The draft of a task for a shell."""

    instruction: str
    data: Mapping[str, Any]
    """What the checks expect: JSON data, called ``DATA`` in the checks. The generator computes it, never from the
    workspace."""
    solve: str
    """The reference solution: a bash script that runs in the workspace."""
    wrong: Mapping[str, str]
    """Three wrong solutions: name of the mistake -> bash script."""
    inputs: Mapping[str, str | bytes] = field(default_factory=dict)
    """Path below the workspace -> content. Files ``*.sh`` are executable."""
    may_change: tuple[str, ...] = ()
    """Glob patterns of the inputs that the task asks to change."""
    executes_agent_code: Literal["in_process", "subprocess"] | None = None
    """Whether the checks import or run files of the agent."""
    check: str = ""
    """Python source of the checks; it finds ``cg``, ``checks``, ``WS`` (the workspace) and ``DATA``. By default the
    template ``check.py`` of the generator."""


def build(made_by: Generator[TerminalDraft], seed: int) -> Task:
    """Return the task of ``made_by`` for ``seed``. Raises as :func:`draft_of` does."""
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
    """Return a bash script that writes ``content``, which ends with a line break, to ``path``."""
    return f"cat > {path} <<'END_OF_FILE'\n{content}END_OF_FILE\n"


def python(program: str) -> str:
    """Return a bash script that runs a Python program, which ends with a line break."""
    return f"python3 - <<'END_OF_FILE'\n{program}END_OF_FILE\n"


def replaced(text: str, old: str, new: str) -> str:
    """Replace the only ``old`` in ``text``: makes a wrong solution that differs from the right one in one place.

    Raises :class:`ValueError` if ``old`` does not occur exactly once.
    """
    if text.count(old) != 1:
        raise ValueError(f"{old!r} occurs {text.count(old)} times, not once: choose a longer piece")
    return text.replace(old, new)


def case(argv: list[str], out: str, *, stdin: str = "", code: int = 0, files: Mapping[str, str] | None = None) -> dict:
    """Return one hidden case for :data:`PROGRAM_CHECK`: arguments and input, with the expected output and exit status.

    The text of a file may be ``hex:`` and hexadecimal bytes.
    """
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
    """Draft a task to write the file ``program``.

    Args:
        source: the right program, in Python.
        mistakes: name of a mistake -> the (old, new) replacement that makes it in ``source``.
        groups: name of a check -> its hidden cases (:func:`case`).
        inputs: see :class:`TerminalDraft`.
        may_change: see :class:`TerminalDraft`.

    Raises :class:`ValueError` if the old text of a mistake does not occur exactly once.
    """
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
