"""Runs targets under coverage: ``python -m fuzz [TARGET ...] --seconds 60``, from the folder ``tests``.

Prints a line for each target: executions, the edges that libFuzzer saw in all of the library, and the lines that the
inputs reach in the modules that the target names (``TARGET.reads``), in percent. An input that a target does not stand
is a finding: it is written beside the corpus, and the exit status is 1. ``--keep`` puts the inputs that reach new
lines or branches of these modules into the corpus, as few as do, and small ones.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from . import CORPUS, HERE, TARGETS, lines_reached, run_target

LONGEST_INPUT = 4096
HANG_SECONDS = 10
RSS_MB = 2048
_COUNTS = re.compile(r"^#(\d+)\s+\w+\s+cov: (\d+) ", re.MULTILINE)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("python -m fuzz", description="Fuzz targets under coverage.")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help="all, where none is named")
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("--seed", type=int, default=0, help="of the new inputs; 0: another one each time")
    parser.add_argument("--keep", action="store_true", help="put what reaches something new into the corpus")
    asked = parser.parse_args(argv)
    failed = 0
    print(f"{'target':<16} {'executions':>10} {'edges':>6} {'lines':>6}  modules", flush=True)
    for name in asked.targets or TARGETS:
        failed += not fuzzed(name, asked.seconds, seed=asked.seed, keep=asked.keep)
    return min(failed, 1)


def fuzzed(name: str, seconds: int, *, seed: int, keep: bool) -> bool:
    """Whether ``name`` stood it."""
    with tempfile.TemporaryDirectory() as scratch:
        found = Path(scratch, "found")
        found.mkdir()
        (CORPUS / name).mkdir(parents=True, exist_ok=True)
        flags = (f"-max_total_time={seconds}", f"-seed={seed}", f"-artifact_prefix={scratch}/")
        done = _libfuzzer(name, [found, CORPUS / name], *flags)
        counts = _COUNTS.findall(done.stdout)
        executions, edges = counts[-1] if counts else ("?", "?")
        print(f"{name:<16} {executions:>10} {edges:>6} {reached(name, found, keep=keep)}", flush=True)
        if done.returncode:
            print(re.sub("^(INFO|WARNING|#).*\n", "", done.stdout, flags=re.MULTILINE)[-4000:])
            for path in Path(scratch).glob("*-*"):
                shutil.copy(path, CORPUS / name / path.name)
                print(f"found: {CORPUS / name / path.name}")
            return False
    return True


def reached(name: str, found: Path, *, keep: bool) -> str:
    """What the inputs of the corpus and of ``found`` reach, in a process of its own."""
    argv = [sys.executable, "-m", "fuzz", "--reached", name, str(found), *(["--keep"] if keep else [])]
    done = subprocess.run(argv, cwd=HERE.parent, capture_output=True, text=True)
    return done.stdout.rstrip() if done.returncode == 0 else done.stderr[-500:]


def _libfuzzer(name: str, folders: Sequence[Path], *flags: str) -> subprocess.CompletedProcess[str]:
    bounds = (f"-max_len={LONGEST_INPUT}", f"-timeout={HANG_SECONDS}", f"-rss_limit_mb={RSS_MB}", "-len_control=20")
    argv = [sys.executable, "-m", "fuzz", "--target", name, *bounds, *flags, *map(str, folders)]
    return subprocess.run(
        argv, cwd=HERE.parent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--target"]:
        run_target(sys.argv[2], sys.argv[3:])
    if sys.argv[1:2] == ["--reached"]:
        print(lines_reached(sys.argv[2], Path(sys.argv[3]), keep="--keep" in sys.argv))
        sys.exit()
    sys.exit(main(sys.argv[1:]))
