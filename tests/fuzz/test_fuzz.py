"""Every target stands every input that is kept, and a few seconds of new ones under coverage."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from . import CORPUS, HERE, TARGETS, fuzz_of, inputs_of

SECONDS = 4
"""Of new inputs for each target; ``make soak`` takes minutes."""


@pytest.mark.parametrize("target", TARGETS)
def test_kept_inputs_find_nothing(target: str) -> None:
    fuzz, inputs = fuzz_of(target), inputs_of(target)
    assert len(inputs) > 5, "the corpus is missing"
    for name, data in inputs.items():
        try:
            fuzz(data)
        except BaseException as error:
            error.add_note(f"the input is {CORPUS / target / name}")
            raise


@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="atheris has no wheel for this Python")
@pytest.mark.parametrize("target", TARGETS)
def test_new_inputs_find_nothing(target: str) -> None:
    # The same inputs each time, as far as time allows: `make soak` looks for others.
    argv = [sys.executable, "-m", "fuzz", target, "--seconds", str(SECONDS), "--seed", "1"]
    done = subprocess.run(argv, cwd=HERE.parent, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    edges = int(done.stdout.splitlines()[1].split()[2])
    assert edges > 10, f"nothing is covered:\n{done.stdout}"
