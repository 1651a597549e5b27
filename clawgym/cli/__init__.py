"""The command line; one file a command."""

from __future__ import annotations

import sys

import typer

from clawgym.cli import bench, leaderboard, ledger, openclaw, pool, push, tasks
from clawgym.cli.attack import attack
from clawgym.cli.audit import audit_command
from clawgym.cli.compare import compare_command
from clawgym.cli.demo import demo
from clawgym.cli.doctor import doctor
from clawgym.cli.eval import eval_command
from clawgym.cli.gateway import gateway_command
from clawgym.cli.listing import list_command
from clawgym.cli.train import train_command
from clawgym.cli.verify import verify_command
from clawgym.cli.watch import watch_command
from clawgym.console import Console, guard_streams
from clawgym.errors import ClawGymError

__all__ = ["app", "main"]

app = typer.Typer(
    name="clawgym",
    help="Claw-style agent tasks in real sandboxes, graded in a clean box.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command("eval")(eval_command)
app.command("compare")(compare_command)
app.command("verify")(verify_command)
app.command("watch")(watch_command)
app.command("train")(train_command)
app.command("demo")(demo)
app.command("attack")(attack)
app.command("audit")(audit_command)
app.command("doctor")(doctor)
app.command("gateway")(gateway_command)
app.command("list")(list_command)
app.add_typer(tasks.app, name="tasks")
app.add_typer(bench.app, name="bench")
app.add_typer(leaderboard.app, name="leaderboard")
app.add_typer(pool.app, name="pool")
app.add_typer(ledger.app, name="ledger")
app.add_typer(openclaw.app, name="openclaw")
app.add_typer(push.app, name="push")


@app.callback(invoke_without_command=True)
def _top(version: bool = typer.Option(False, "--version", help="Print the version.")) -> None:
    if version:
        from clawgym import __version__

        Console().say(__version__)
        raise typer.Exit


def main() -> None:
    """Entry point: our own errors are one line, not a traceback."""
    guard_streams()
    try:
        app()
    except ClawGymError as error:
        Console(stderr=True).say(f"clawgym: {error}")
        sys.exit(2)
