"""Evaluate two agents on the same tasks, and compare them task by task.

python examples/evaluate.py
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import clawgym
from clawgym.evaluation.compare import compare


async def main() -> None:
    tasks = clawgym.load("terminal-basic:heldout", limit=12)
    backend = clawgym.backend()
    for name in ("sloppy", "oracle"):  # an agent that is right on about half of the tasks, and the reference solutions
        agent = clawgym.make_agent(name)
        summary = await clawgym.evaluate(clawgym.EvalConfig(tasks, agent, backend, out=Path("runs") / name))
        strict = summary.scores.strict
        assert strict is not None
        print(f"{name}: {strict.value:.0%} of {summary.planned} tasks solved [{strict.low:.0%}, {strict.high:.0%}]")
        await agent.aclose()
    await backend.aclose()
    found = compare("runs/sloppy", "runs/oracle")
    print(f"oracle is {found.verdict('strict')}: {found.scores['strict']}")


asyncio.run(main())
