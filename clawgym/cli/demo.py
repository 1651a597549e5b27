"""``clawgym demo``: three agents on our own pack, ranked, and a model that learns; the tour of a few minutes."""

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
    """Run a tour of a few minutes on this machine.

    Grades three agents on `terminal-basic` in real sandbackend: one that knows the answers, one that is careless, one
    that does nothing. Then trains a small new model, first by imitation of demonstrations, then from rewards. Shows the
    ranking, the curve and the paths of the reports. Results go to runs/demo if --out is left out.
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
    _learn(out, sandbox, console)


def _learn(out: Path, sandbox: str, console: Console) -> None:
    """Imitation until it solves some, then reinforcement; the curve is of tasks that it does not learn from."""
    from clawgym.cli.train import learn
    from clawgym.errors import MissingDependency
    from clawgym.trainers.config import load_config

    try:
        begun, learnt = out / "imitated", out / "trained"
        asked = f"backend={sandbox}"
        status = learn(load_config("demo", [asked]), begun, "sft") or learn(
            load_config("demo", [asked, f"model.path={begun}"]), learnt, "rl"
        )
        if status:
            raise typer.Exit(status)
    except MissingDependency as error:
        console.say(f"no training: {error}")
        return
    for title, run in (("imitation", begun), ("reinforcement", learnt)):
        rows = [json.loads(line) for line in (run / "evaluations.jsonl").read_text("utf-8").splitlines()]
        for row in rows:
            if row["split"] == "validation":
                line = f"{title:>13} {row['step']:4}  {row['score']:4.0%} {'█' * round(40 * row['score'])}"
                console.say(line)
        console.say(f"report: {run / 'report.html'}")


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
