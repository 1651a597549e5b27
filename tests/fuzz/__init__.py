"""Coverage-guided fuzzing of everything that reads bytes of others. A target is a module here with a function
``fuzz(data)``, which calls a public door and lets nothing through but what that door is documented to raise, and a
tuple ``READS`` of the modules that read what it is given."""

from __future__ import annotations

import ast
import hashlib
import importlib
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

__all__ = ["CORPUS", "TARGETS", "fuzz_of", "inputs_of", "lines_reached", "run_target"]

HERE = Path(__file__).parent
CORPUS = HERE / "corpus"
TARGETS = sorted(path.stem for path in (HERE / "targets").glob("[a-z]*.py"))


def fuzz_of(target: str) -> Callable[[bytes], None]:
    return importlib.import_module(f".targets.{target}", __package__).fuzz


def inputs_of(target: str) -> dict[str, bytes]:
    """The inputs that are kept, by name; the empty one too."""
    return {"empty": b""} | {path.name: path.read_bytes() for path in sorted((CORPUS / target).glob("*"))}


def lines_reached(target: str, found: Path, *, keep: bool) -> str:
    """How much of the modules in ``READS`` the inputs of the corpus and of the folder ``found`` reach: percent of
    lines, and the modules. ``keep``: those of ``found`` that reach a new line or branch go into the corpus, the
    smallest first. Findings are left out."""
    import coverage

    logging.disable()
    code = (HERE / "targets" / f"{target}.py").read_text()
    reads = ast.literal_eval(next(line for line in code.split("READS = ", 1)[1].split("\n\n") if line))
    files = [str(_file_of(name)) for name in reads]
    total = coverage.Coverage(data_file=None, branch=True, include=files)
    total.start()  # what an import executes is reached too
    fuzz = fuzz_of(target)
    total.stop()
    seen: set[tuple[str, tuple[int, int]]] = set()
    kept = [(False, data) for data in inputs_of(target).values()]
    new = sorted((path.read_bytes() for path in found.iterdir()), key=lambda data: (len(data), data))
    for is_new, data in (*kept, *((True, data) for data in new)):
        one = coverage.Coverage(data_file=None, branch=True, include=files)
        one.start()
        try:
            fuzz(data)
        except Exception:
            continue
        finally:
            one.stop()
        arcs = {(file, arc) for file in one.get_data().measured_files() for arc in one.get_data().arcs(file) or ()}
        if not arcs <= seen:
            total.get_data().update(one.get_data())
            if keep and is_new:
                (CORPUS / target / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)
        seen |= arcs
    lines = [total.analysis2(file) for file in files]
    whole, missing = (sum(len(found[at]) for found in lines) for at in (1, 3))
    return f"{100 * (whole - missing) / whole:>5.0f}%  {', '.join(reads)}"


def _file_of(name: str) -> Path:
    """Where ``clawgym.name`` is, without importing it."""
    path = Path(*name.split(".")).with_suffix(".py")
    return HERE.parents[1] / (path if path.parts[0] in ("tasks", "verifiers") else Path("clawgym", path))


def run_target(target: str, flags: Sequence[str]) -> None:
    """Fuzz in this process, which ends with it. ``flags`` are libFuzzer's."""
    import atheris

    logging.disable()
    with atheris.instrument_imports(include=["clawgym"]):
        fuzz = fuzz_of(target)
        fuzz(b"")  # what it imports late takes longer than an input may
    atheris.Setup([sys.argv[0], *flags], fuzz)
    atheris.Fuzz()
