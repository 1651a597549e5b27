"""The examples run unchanged."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
PRINTS = {
    "black_box_offline": " row",
    "black_box_online": " row",
    "evaluate": "oracle is better",
    "new_environment": "reward 1.0",
    "openclaw_env": "reward 1.0",
    "torch_policy_gradient": "update 30: mean reward",
    "trl_grpo": "update 25: mean reward",
    "vector_envs": "solve: .* mean reward 1.0",
    "white_box": " row",
}
"""Example -> a pattern that its output has."""


def test_every_example_is_run() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(PRINTS)


@pytest.mark.timeout(620)  # trl_grpo takes two minutes of CPU time
@pytest.mark.parametrize("name", PRINTS)
def test_example_runs(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if name.startswith("openclaw"):
        request.getfixturevalue("openclaw")
    argv = [sys.executable, str(EXAMPLES / f"{name}.py")]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert re.search(PRINTS[name], done.stdout)
