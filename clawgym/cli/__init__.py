"""The command line; one module per command."""

from __future__ import annotations

import sys

import typer

from clawgym.cli import agents, images, interop, leaderboard, openclaw, pool, push, redteam, runs, serve, tasks
from clawgym.cli.demo import demo
from clawgym.cli.doctor import doctor
from clawgym.cli.eval import eval_command
from clawgym.cli.gateway import gateway_command
from clawgym.cli.listing import list_command
from clawgym.cli.mcp import mcp_command
from clawgym.cli.serve_env import serve_env_command
from clawgym.cli.train import train_command
from clawgym.cli.view import view_command
from clawgym.console import Console, guard_streams
from clawgym.errors import ClawGymError

__all__ = ["app", "main"]

app = typer.Typer(
    name="clawgym",
    help="Claw-style agent tasks in real sandboxes, graded in a clean sandbox.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command("eval")(eval_command)
app.add_typer(runs.app, name="runs")
app.command("view")(view_command)
app.command("train")(train_command)
app.add_typer(tasks.app, name="tasks")
app.add_typer(redteam.app, name="redteam")
app.command("gateway")(gateway_command)
app.add_typer(serve.app, name="serve")
app.command("serve-env")(serve_env_command)
app.command("mcp")(mcp_command)
app.add_typer(pool.app, name="pool")
app.command("list")(list_command)
app.add_typer(leaderboard.app, name="leaderboard")
app.add_typer(push.app, name="push")
app.add_typer(push.pull_app, name="pull")
app.add_typer(agents.app, name="agents")
app.add_typer(openclaw.app, name="openclaw")
app.add_typer(images.app, name="images")
app.add_typer(interop.app, name="interop")
app.command("doctor")(doctor)
app.command("demo")(demo)


@app.callback(invoke_without_command=True)
def _top(version: bool = typer.Option(False, "--version", help="Print the version.")) -> None:
    if version:
        from clawgym import __version__

        Console().say(__version__)
        raise typer.Exit


def main() -> None:
    """Entry point of ``clawgym``. Errors of ClawGym are printed on one line, without a traceback (exit status 2)."""
    guard_streams()
    try:
        app()
    except ClawGymError as error:
        Console(stderr=True).say(f"clawgym: {error}")
        sys.exit(2)
