"""What the fault tests share: a small task folder, and the command line that a person would type again."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clawgym.records import Limits, TaskFile
from clawgym.records.run_folder import RunFolder
from clawgym.tasks.formats import write

from ..verifiers.tasks_for_tests import task

LIMITS = Limits(memory_mb=256, disk_mb=64, pids=64, verify_seconds=20, agent_seconds=60, command_seconds=20)
SOLVE = "mkdir -p output; echo 6 > output/sum.txt"


@dataclass
class Eval:
    """One ``clawgym eval`` of one task, ``samples`` times, in a folder of its own."""

    folder: Path
    script: str = SOLVE
    samples: int = 6
    backend: str = "namespace"
    concurrency: int = 2
    env: dict[str, str] = field(default_factory=dict)
    out: Path = field(init=False)
    bench: Path = field(init=False)

    def __post_init__(self) -> None:
        self.out, self.bench = self.folder / "run", self.folder / "bench"
        solution = TaskFile("solve.sh", SOLVE.encode())
        write([task(limits=LIMITS, solution=(solution,))], self.bench)
        (self.folder / "agent.sh").write_text(self.script)

    def argv(self) -> list[str]:
        words = ["eval", self.bench, "--agent", "script", "--agent-option", f"source={self.folder / 'agent.sh'}"]
        words += ["-k", self.samples, "--sandbox", self.backend, "--concurrency", self.concurrency, "--out", self.out]
        return [sys.executable, "-c", "from clawgym.cli import main; main()", *map(str, words)]

    def environment(self) -> dict[str, str]:
        return {**os.environ, "XDG_CACHE_HOME": str(self.folder / "cache"), "COLUMNS": "200", **self.env}

    def start(self) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        return subprocess.Popen(self.argv(), env=self.environment(), stdout=pipe, stderr=pipe, text=True)

    def run(self, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        return subprocess.run(self.argv(), env=self.environment(), capture_output=True, text=True, timeout=timeout)

    def rows(self) -> list[dict[str, Any]]:
        return RunFolder.read(self.out).rows

    def wait_for_rows(self, count: int, process: subprocess.Popen[str], timeout: float = 90) -> None:
        """Until so many lines are there, while ``process`` runs."""
        results, deadline = self.out / "results.jsonl", time.monotonic() + timeout
        while not results.exists() or results.read_bytes().count(b"\n") < count:
            assert time.monotonic() < deadline, "nothing comes"
            assert process.poll() is None, process.communicate()
            time.sleep(0.02)


def check_whole(run: RunFolder, samples: int, before: list[dict[str, Any]]) -> None:
    """Every episode has one result, and what was there before the fault is there as it was."""
    assert run.rows[: len(before)] == before
    results = [row["key"] for row in run.rows if row["outcome"] != "infra"]
    assert sorted(results) == sorted(f"sum#{i}" for i in range(samples)), "lost or doubled"
    assert {row["outcome"] for row in run.latest.values()} == {"solved"}
    for row in run.latest.values():
        folder = run.episode_folder(row["task_id"], row["sample"])
        assert {"transcript.json", "workspace.tar.gz", "verifier.log"} <= {p.name for p in folder.iterdir()}
    assert not list(run.path.rglob("*.tmp"))
