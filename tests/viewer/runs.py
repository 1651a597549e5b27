"""Run folders for the tests of the viewer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from clawgym.records import (
    Episode,
    Fault,
    Image,
    Observation,
    Outcome,
    Step,
    Task,
    TaskSet,
    ToolCall,
    Turn,
    Usage,
    VerifierResult,
    VerifierSpec,
)
from clawgym.records.run_folder import RunFolder, make_manifest

WHEN = "2026-01-01T00:00:00+00:00"
PNG = bytes.fromhex("89504e470d0a1a0a0000000d49484452")
PICTURE = Image("ab" * 32, PNG)
ATTACK = "</script><script>alert(1)</script>\x1b[2J\u202e{{7*7}}"


def task(id: str) -> Task:
    return Task(id, f"Do {id}.", VerifierSpec("reward_sh", ()), metadata={"category": "letters"})


def steps_about(text: str) -> tuple[Step, ...]:
    write = ToolCall("c1", "write", {"path": "a.txt", "content": "one\ntwo\n"})
    edit = ToolCall("c2", "edit", {"path": "a.txt", "old": "two", "new": "three"})
    return (
        Step("user", f"Please {text}.", WHEN),
        Step("agent", text, WHEN, (write,), (Observation("written", "c1"),), usage=Usage(10, 5)),
        Step("agent", "", WHEN, (edit,), (Observation("", "c2", PICTURE),), reasoning="as asked"),
    )


def episode(
    id: str,
    checks: Mapping[str, float] | None,
    *,
    text: str = "hello",
    sample: int = 0,
    steps: Sequence[Step] | None = None,
    turns: Sequence[Turn] = (),
) -> Episode:
    """An episode with these checks; an infrastructure error without."""
    if checks is None:
        return Episode(id, task(id).content_hash, sample, 1, "a", Outcome.INFRA, "no answer", Fault.ENDPOINT)
    solved = all(value >= 1 for value in checks.values())
    log = "".join(f"{name}: {value}\n" for name, value in checks.items())
    score = sum(checks.values()) / max(1, len(checks))
    return Episode(
        id,
        task(id).content_hash,
        sample,
        1,
        "a",
        Outcome.SOLVED if solved else Outcome.FAILED,
        result=VerifierResult(checks, score, float(solved), None, log=log),
        steps=steps_about(text) if steps is None else tuple(steps),
        turns=tuple(turns),
        usage=Usage(100, 20, cost_usd=0.5),
        seconds={"setup": 0.5, "agent": 2.0},
    )


def open_run(path: Path, ids: Sequence[str], samples: int = 1) -> RunFolder:
    """A run that is in progress, over tasks with these ids."""
    tasks = TaskSet("letters", tuple(map(task, ids)))
    return RunFolder.open(path, make_manifest("eval", tasks, agent={"name": "a", "version": "1"}, samples=samples))
