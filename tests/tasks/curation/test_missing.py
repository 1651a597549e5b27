"""Which instructions speak of inputs that are not there."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawgym.records import TaskFile
from clawgym.tasks.curation.missing import missing_inputs
from clawgym.tasks.scaffold import starter


def missing(instruction: str, *inputs: str) -> tuple[str, ...]:
    files = tuple(TaskFile(path, b"") for path in inputs)
    return missing_inputs(dataclasses.replace(starter("a"), instruction=instruction, inputs=files))


@pytest.mark.parametrize(
    "instruction",
    [
        "Parse logs/a.log and count its errors.",
        "Give the window (derived from logs/a.log) in out/a.md.",
        "Inputs:\n- input/b.csv\n- logs/a.log (of the last run)\n\nWrite out/a.md.",
        "Files to use: input/b.csv, logs/a.log.",
    ],
)
def test_missing_inputs_are_named(instruction: str):
    assert missing(instruction, "input/b.csv") == ("logs/a.log",)
    assert missing(instruction, "input/b.csv", "logs/a.log") == ()


@pytest.mark.parametrize(
    "instruction",
    [
        "Save the console output to logs/a.log.",
        "Write a log at logs/a.log, then analyze logs/a.log.",
        "Outputs:\n- logs/a.log\n- out/b.csv",
        "Inputs:\n- logs/a.log capturing what you ran",
        "Read input/notes_YYYY-MM-DD.md of each day.",
        "Read output/run.log again.",
        "Read data/other.csv.",
        "Check input/b.csv.sample.",
    ],
)
def test_outputs_are_not_missing_inputs(instruction: str):
    assert missing(instruction, "input/b.csv.sample") == ()


@given(st.text(max_size=200))
def test_any_instruction_is_accepted(instruction: str):
    assert all(path in instruction for path in missing(instruction))
