"""Coverage-guided fuzzing of everything that reads bytes of others. A target is a module here with a function
``fuzz(data)``, which calls a public door and lets nothing through but what that door is documented to raise."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

__all__ = ["CORPUS", "TARGETS", "fuzz_of", "inputs_of", "run_target"]

HERE = Path(__file__).parent
CORPUS = HERE / "corpus"
TARGETS = sorted(path.stem for path in (HERE / "targets").glob("[a-z]*.py"))


def fuzz_of(target: str) -> Callable[[bytes], None]:
    return importlib.import_module(f".targets.{target}", __package__).fuzz


def inputs_of(target: str) -> dict[str, bytes]:
    """The inputs that are kept, by name; the empty one too."""
    return {"empty": b""} | {path.name: path.read_bytes() for path in sorted((CORPUS / target).glob("*"))}


def run_target(target: str, flags: Sequence[str]) -> None:
    """Fuzz in this process, which ends with it. ``flags`` are libFuzzer's."""
    import atheris

    logging.disable()
    with atheris.instrument_imports(include=["clawgym"]):
        fuzz = fuzz_of(target)
        fuzz(b"")  # what it imports late takes longer than an input may
    atheris.Setup([sys.argv[0], *flags], fuzz)
    atheris.Fuzz()
