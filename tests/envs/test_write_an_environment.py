"""Run docs/tutorials/write-an-environment.md: its first code blocks are one file, the others use it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs/tutorials/write-an-environment.md").read_text()
FILE, USES = (re.findall(r"^```python\n(.*?)^```", part, re.M | re.S) for part in PAGE.split("\n## Play it\n"))


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("number", range(len(USES)))
def test_page_code_runs(number: int, tmp_path: Path) -> None:
    (tmp_path / "sql_env.py").write_text("\n".join(FILE))
    argv = [sys.executable, "-W", "error::UserWarning", "-c", USES[number]]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    shown = re.findall(r"^print\(.*\)  # (.*)$", USES[number], re.M)
    assert [line for line in done.stdout.splitlines() if line in shown] == shown


def test_page_has_expected_code_blocks() -> None:
    assert (len(FILE), len(USES)) == (2, 2)
