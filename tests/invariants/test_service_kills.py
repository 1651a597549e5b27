"""A service whose processes are killed at any moment loses no reply and trains on nothing twice.

``CLAWGYM_SOAK=50 .venv/bin/pytest tests/invariants/test_service_kills.py --timeout=0`` is the long form.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("peft")

KILLS = min(50, int(os.environ.get("CLAWGYM_SOAK", "4")))
BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "survival.py"


@pytest.mark.timeout(900)
def test_nothing_is_lost_and_nothing_trained_on_twice() -> None:
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), "--kills", str(KILLS), "--clients", "3"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing lost, nothing trained on twice" in done.stdout
