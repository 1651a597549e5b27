"""``clawgym demo``: rank three agents on a built-in pack, then train a small model; takes about nine minutes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from clawgym.cli._options import Out, SandboxName

if TYPE_CHECKING:
    from clawgym.console import Console

__all__ = ["demo"]

AGENTS = ("oracle", "sloppy", "noop")


def demo(
    out: Out = None,
    sandbox: SandboxName = "auto",
) -> None:
    """Run a tour of about nine minutes on this machine.

    Grades three agents on `terminal-basic` in real sandboxes: the reference solution, a careless agent and a no-op
    agent. Then trains a small new model, first on demonstrations (sft), then from nothing but rewards (rl). Shows the
    ranking, the learning curve, success on held-out tasks before and after the rewards, and the paths of the reports.
    Results go to runs/demo unless --out is given.
    """
    from clawgym.console import Console
    from clawgym.leaderboards import load_entry, rank, to_view

    out = out or Path("runs/demo")
    runs = [out / agent for agent in AGENTS]
    asyncio.run(_run(list(zip(AGENTS, runs, strict=True)), sandbox))
    console = Console()
    console.print(to_view(rank([load_entry(run) for run in runs], "strict")))
    for run in runs:
        console.say(f"report: {run / 'report.html'}")
    _train(out, sandbox, console)


def _train(out: Path, sandbox: str, console: Console) -> None:
    """Train on demonstrations, then from rewards. Print the curve on the validation tasks, and both ends on the
    held-out tasks."""
    from clawgym.cli.train import train
    from clawgym.errors import MissingDependency
    from clawgym.trainers.config import load_config

    try:
        imitated, trained = out / "imitated", out / "trained"
        backend = f"backend={sandbox}"
        status = train(load_config("demo", [backend]), imitated, "sft") or train(
            load_config("demo", [backend, f"model.path={imitated}"]), trained, "rl"
        )
        if status:
            raise typer.Exit(status)
    except MissingDependency as error:
        console.say(f"no training: {error}")
        return
    rows = []
    for title, run in (("imitation", imitated), ("reinforcement", trained)):
        rows = [json.loads(line) for line in (run / "evaluations.jsonl").read_text("utf-8").splitlines()]
        for row in rows:
            if row["split"] == "validation":
                line = f"{title:>13} {row['step']:4}  {row['score']:4.0%} {'█' * round(40 * row['score'])}"
                console.say(line)
        console.say(f"report: {run / 'report.html'}")
    for greedy, title in ((False, "sampled"), (True, "greedy")):
        scores = [row["score"] for row in rows if row["split"] == "heldout" and row["greedy"] == greedy]
        console.say(f"held-out tasks, {title}: {scores[0]:.0%} before the rewards, {scores[-1]:.0%} after")


async def _run(plan: list[tuple[str, Path]], sandbox: str) -> None:
    from clawgym.agents import make_agent
    from clawgym.cli.eval import baselines_with_progress
    from clawgym.console import Console
    from clawgym.evaluation.progress import RichProgress
    from clawgym.evaluation.runner import EvalConfig, evaluate
    from clawgym.sandbox import backend as make_backend
    from clawgym.tasks import sets

    console = Console(stderr=True)
    task_set = sets.load("terminal-basic")
    backend = make_backend(sandbox)
    try:
        await backend.probe()
        baselines = await baselines_with_progress(task_set, backend, console)
        for name, run in plan:
            agent = make_agent(name)
            config = EvalConfig(task_set, agent, backend, run, baselines=baselines)
            console.say(f"{name} on {task_set.name} ({len(task_set)} tasks)")
            await evaluate(config, progress=RichProgress(console))
            await agent.aclose()
    finally:
        await backend.aclose()
