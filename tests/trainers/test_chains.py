"""Chains of steps: the solution is right, the wrong ones are not, and a wrong step spoils what follows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from clawgym.records import Task, TaskFile
from clawgym.trainers.recipes import chains


def checks(task: Task, script: TaskFile, folder: Path) -> dict[str, float]:
    """What the checker prints after ``script``, which is our own, has run in a temporary folder."""
    workspace, verifier = folder / "workspace", folder / "verifier"
    for files, root in ((task.inputs, workspace), (task.verifier.files, verifier)):
        root.mkdir(parents=True)
        for file in files:
            (root / file.path).write_bytes(file.read())
    subprocess.run(["bash", "-c", script.read().decode()], cwd=workspace, env={"PATH": "/usr/bin:/bin"}, check=True)
    program = (
        "import runpy, sys; sys.path.insert(0, sys.argv[3]); sys.argv = sys.argv[1:]; "
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    argv = [sys.executable, "-I", "-S", "-c", program, str(verifier / "check.py"), str(workspace), str(verifier)]
    return json.loads(subprocess.run(argv, capture_output=True, text=True, check=True).stdout)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("steps", chains.STEPS)
def test_only_the_solution_passes(tmp_path: Path, steps: int, seed: int) -> None:
    task = chains.pack().make(f"chain-{steps}", seed)
    right = checks(task, task.solution[0], tmp_path / "right")
    assert list(right.values()) == [1.0] * steps
    for script in task.wrong_solutions:
        wrong = checks(task, script, tmp_path / script.path)
        assert min(wrong.values()) == 0.0, script.path


def test_a_missing_step_leaves_the_ones_before(tmp_path: Path) -> None:
    task = chains.pack().make("chain-8", 3)
    early = next(script for script in task.wrong_solutions if script.path == "stops-early.sh")
    assert list(checks(task, early, tmp_path).values()) == [1.0] * 7 + [0.0]
