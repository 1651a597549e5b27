"""Templates of a first task: a Python file with a task set, or one task as a folder. Both pass ``clawgym tasks
validate``."""

from __future__ import annotations

from pathlib import Path

from clawgym.errors import TaskError
from clawgym.records import DEFAULT_WORKSPACE, Task, TaskFile, VerifierSpec
from clawgym.tasks.formats import clawgym
from clawgym.tasks.formats._files import atomic_target, check_task_id
from clawgym.tasks.python import PythonTasks, load_file
from clawgym.verifiers.protocols.reward_sh import standard_reward_sh

__all__ = ["PYTHON", "new_python", "new_task", "starter"]

PYTHON = '''\
"""Add up numbers: one task for each seed."""

import random

from clawgym import TaskDraft, task


@task(seeds=range(50))
def add_up(seed):
    rng = random.Random(seed)
    file = rng.choice(["sales.txt", "trips.txt", "hours.txt"])
    numbers = [rng.randint(-99, 99) for _ in range(20)]
    return TaskDraft(
        instruction=f"Write the sum of the numbers in {file} to sum.txt.",
        files={file: "\\n".join(map(str, numbers)) + "\\n"},
        check=check,
        expected={"total": sum(numbers)},
        solution=f"awk '{{s += $1}} END {{print s}}' {file} > sum.txt",
        wrong={
            "ignores signs": f"tr -d - < {file} | awk '{{s += $1}} END {{print s}}' > sum.txt",
            "counts the lines": f"wc -l < {file} > sum.txt",
        },
    )


def check(workspace, total):
    words = (workspace / "sum.txt").read_text().split()
    return {"sum": words[:1] == [str(total)], "nothing_else": words == [str(total)]}
'''
"""The Python file that ``clawgym tasks new`` writes."""

_INSTRUCTION = """\
input/sales.csv lists sales as region,product,amount. Refunds are negative amounts.

Write output/totals.json: an object that has for every region the sum of its amounts, as a number.
Leave input/sales.csv as it is. All paths are relative to the workspace.
"""

_SALES = "region,product,amount\nnorth,tea,12\nsouth,tea,7\nnorth,coffee,30\nsouth,coffee,-2\nwest,tea,5\n"

_CHECK = '''\
"""Grades one workspace: prints one JSON object, check name -> score from 0 to 1. Needs the standard library only."""

import csv
import json
import sys
from pathlib import Path


def expected(workspace: Path) -> dict:
    totals = {}
    with open(workspace / "input/sales.csv", newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            totals[row["region"]] = totals.get(row["region"], 0) + int(row["amount"])
    return totals


def written(workspace: Path):
    try:
        return json.loads((workspace / "output/totals.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def main() -> None:
    workspace = Path(sys.argv[1])
    right, found = expected(workspace), written(workspace)
    is_object = isinstance(found, dict)
    print(
        json.dumps(
            {
                "is_object": float(is_object),
                "regions": float(is_object and sorted(found) == sorted(right)),
                "totals": float(is_object and found == right),
            }
        )
    )


main()
'''

_SOLVE = """\
# The reference solution; runs in the workspace.
mkdir -p output
python3 - <<'END'
import csv, json
totals = {}
for row in csv.DictReader(open("input/sales.csv", newline="")):
    totals[row["region"]] = totals.get(row["region"], 0) + int(row["amount"])
json.dump(totals, open("output/totals.json", "w"))
END
"""

_WRONG = {
    "no-refunds.sh": """\
# Believes that amounts are never negative.
mkdir -p output
echo '{"north": 42, "south": 9, "west": 5}' > output/totals.json
""",
    "text-numbers.sh": """\
# Writes the right digits as text.
mkdir -p output
echo '{"north": "42", "south": "5", "west": "5"}' > output/totals.json
""",
    "tampers.sh": """\
# Makes the task easy instead of solving it.
mkdir -p output
echo 'region,product,amount' > input/sales.csv
echo '{}' > output/totals.json
""",
}


def starter(name: str) -> Task:
    """The example task, with the id ``name``."""
    return Task(
        id=name,
        instruction=_INSTRUCTION,
        inputs=(TaskFile("input/sales.csv", _SALES.encode()),),
        verifier=VerifierSpec(
            "reward_sh",
            (
                TaskFile("check.py", _CHECK.encode()),
                TaskFile("reward.sh", standard_reward_sh(), executable=True),
            ),
        ),
        workspace=DEFAULT_WORKSPACE,
        metadata={"category": "Analysis & Reasoning", "grading_type": "automated", "level": "easy"},
        solution=(TaskFile("solve.sh", _SOLVE.encode(), executable=True),),
        wrong_solutions=tuple(TaskFile(path, text.encode(), executable=True) for path, text in _WRONG.items()),
    )


def new_task(folder: Path) -> Task:
    """Write the example task as the new folder ``folder``; the folder's name becomes its id. Returns the task as read
    back.

    Raises :class:`TaskError` if the folder exists or its name cannot be a task id.
    """
    task = starter(check_task_id(folder.name, str(folder)))
    with atomic_target(folder) as target:
        clawgym.write_task(task, target)
    return clawgym.read_task(folder)


def new_python(path: Path) -> PythonTasks:
    """Write :data:`PYTHON` as the new file ``path``, and return its tasks.

    Raises :class:`TaskError` if the file exists or cannot be written.
    """
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(PYTHON)
    except OSError as error:
        raise TaskError(f"{path}: cannot be written ({error.strerror}): choose another name") from error
    return load_file(path)
