"""Runs targets under coverage: ``python -m fuzz [TARGET ...] --seconds 60``, from the folder ``tests``.

Prints a line for each: executions, edges and features that were covered, and how many inputs tell them apart. An input
that a target does not stand is a finding: it is written beside the corpus, and the exit status is 1. ``--keep`` puts
the inputs that reach something new into the corpus, as few as do, and small ones.
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

from . import CORPUS, HERE, TARGETS, run_target

LONGEST_INPUT = 4096
HANG_SECONDS = 10
RSS_MB = 2048
_KEPT = 40_000
"""Bytes of one target's corpus."""
_COUNTS = re.compile(r"^#(\d+)\s+\w+\s+cov: (\d+) ft: (\d+) corp: (\d+)", re.MULTILINE)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("python -m fuzz", description="Fuzz targets under coverage.")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help="all, where none is named")
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("--keep", action="store_true", help="put what reaches something new into the corpus")
    asked = parser.parse_args(argv)
    failed = 0
    print(f"{'target':<16} {'executions':>10} {'edges':>6} {'features':>8} {'inputs':>6}", flush=True)
    for name in asked.targets or TARGETS:
        failed += not fuzzed(name, asked.seconds, keep=asked.keep)
    return min(failed, 1)


def fuzzed(name: str, seconds: int, *, keep: bool) -> bool:
    """Whether ``name`` stood it."""
    with tempfile.TemporaryDirectory() as scratch:
        found = Path(scratch, "found")
        found.mkdir()
        (CORPUS / name).mkdir(parents=True, exist_ok=True)
        done = _libfuzzer(name, [found, CORPUS / name], f"-max_total_time={seconds}", f"-artifact_prefix={scratch}/")
        counts = _COUNTS.findall(done.stdout)
        print(f"{name:<16} " + "{:>10} {:>6} {:>8} {:>6}".format(*(counts[-1] if counts else "????")), flush=True)
        if done.returncode:
            print(re.sub("^(INFO|WARNING|#).*\n", "", done.stdout, flags=re.MULTILINE)[-4000:])
            for path in Path(scratch).glob("*-*"):
                shutil.copy(path, CORPUS / name / path.name)
                print(f"found: {CORPUS / name / path.name}")
            return False
        if keep:
            _keep(name, found, Path(scratch, "merged"))
    return True


def _keep(name: str, found: Path, merged: Path) -> None:
    merged.mkdir()
    _libfuzzer(name, [merged, CORPUS / name, found], "-merge=1")
    size = sum(path.stat().st_size for path in (CORPUS / name).iterdir())
    there = {path.read_bytes() for path in (CORPUS / name).iterdir()}
    for path in sorted(merged.iterdir(), key=lambda path: (path.stat().st_size, path.name)):
        size += path.stat().st_size
        if size > _KEPT:
            break
        if path.read_bytes() not in there:
            shutil.copy(path, CORPUS / name / path.name[:16])


def _libfuzzer(name: str, folders: Sequence[Path], *flags: str) -> subprocess.CompletedProcess[str]:
    bounds = (f"-max_len={LONGEST_INPUT}", f"-timeout={HANG_SECONDS}", f"-rss_limit_mb={RSS_MB}", "-len_control=20")
    argv = [sys.executable, "-m", "fuzz", "--target", name, *bounds, *flags, *map(str, folders)]
    return subprocess.run(
        argv, cwd=HERE.parent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--target"]:
        run_target(sys.argv[2], sys.argv[3:])
    sys.exit(main(sys.argv[1:]))
