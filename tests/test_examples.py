"""The examples run unchanged."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(example: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if example.stem.startswith("openclaw"):
        request.getfixturevalue("openclaw")
    done = subprocess.run([sys.executable, example], cwd=tmp_path, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr
    assert " row" in done.stdout or "reward 1.0" in done.stdout
