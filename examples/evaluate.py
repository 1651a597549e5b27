"""Evaluate two agents on the same tasks and compare them.

python examples/evaluate.py
"""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import clawgym
from clawgym.evaluation.compare import compare


async def main() -> None:
    tasks = clawgym.load("terminal-basic:heldout")
    tasks = dataclasses.replace(tasks, tasks=tasks.tasks[:12])
    backend = clawgym.backend()
    for name in ("oracle", "sloppy"):  # the reference solutions, and an agent that is right on about half of the tasks
        agent = clawgym.make_agent(name)
        summary = await clawgym.evaluate(clawgym.EvalConfig(tasks, agent, backend, out=Path("runs") / name))
        print(f"{name}: {summary.strict.mean:.0%} of {len(tasks.tasks)} tasks solved")
        await agent.aclose()
    await backend.aclose()
    print(compare(Path("runs/oracle"), Path("runs/sloppy")))


asyncio.run(main())
