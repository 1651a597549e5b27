"""``clawgym leaderboard``: rank runs, submit entries to a board, check them, and build the board's site."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from clawgym.cli._options import JsonFlag, Out, RunPath, SandboxName
from clawgym.console import Console

if TYPE_CHECKING:
    from clawgym.leaderboards.boards import BoardFolder
    from clawgym.leaderboards.check import EntryCheck

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="Rank runs, submit entries to a board, check them, and build its site.")

BoardName = Annotated[str, typer.Argument(metavar="BOARD", help="The folder of a board, or hf://OWNER/NAME.")]


@app.callback()
def _leaderboard() -> None:
    """Rank runs, submit entries to a board, check them, and build its site."""


@app.command()
def show(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...|BOARD", help="Run folders, or a board.")],
    by: Annotated[
        Literal["strict", "corrected", "official"],
        typer.Option(help="Rank by this score; corrected is the baseline-adjusted score."),
    ] = "strict",
    as_json: JsonFlag = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
) -> None:
    """Rank run folders, or the entries of a board. Runs over different tasks are ranked separately."""
    from clawgym.leaderboards import load_entry, rank, to_json, to_markdown, to_view
    from clawgym.leaderboards.boards import RULES, BoardFolder
    from clawgym.leaderboards.site import entries_of

    if len(runs) == 1 and (runs[0].startswith("hf://") or (Path(runs[0]) / RULES).is_file()):
        shown, left_out = entries_of(BoardFolder.read(runs[0]))
        for name, why in left_out.items():
            Console(stderr=True).say(f"{name}: not ranked: {why}")
        for one in shown:
            if one.status != "checked":
                Console(stderr=True).say(f"{one.name}: {one.status}")
        entries = [one.entry for one in shown if one.status != "refused"]
    else:
        entries = [load_entry(run) for run in runs]
    boards = rank(entries, by)
    out = Console()
    if as_json:
        out.json(to_json(boards))
    elif as_markdown:
        for line in to_markdown(boards).removesuffix("\n").split("\n"):
            out.say(line)
    else:
        out.print(to_view(boards))


@app.command()
def submit(
    run: RunPath,
    board: Annotated[Path, typer.Argument(metavar="BOARD", help="The folder of a board, such as a clone of it.")],
    entry: Annotated[str | None, typer.Option(help="Name of the entry. Default: the name of the run folder.")] = None,
) -> None:
    """Make an entry of a board from an evaluation: its results, transcripts and workspaces.

    Fails if a file looks like it contains a secret. Commit the new folder, and open a pull request.
    """
    from clawgym.leaderboards.boards import BoardFolder
    from clawgym.leaderboards.boards import submit as make

    Console().say(str(make(run, BoardFolder.read(board), entry or run.resolve().name.lower())))


@app.command()
def check(
    where: Annotated[
        str, typer.Argument(metavar="ENTRY|BOARD", help="An entry's folder, a board's, or hf://OWNER/NAME.")
    ],
    since: Annotated[
        str | None,
        typer.Option(metavar="COMMIT", help="Of a board: only entries added since; other changes are refused."),
    ] = None,
    nonce: Annotated[str, typer.Option(help="Repeat the draw of an earlier check. Default: a new one.")] = "",
    record: Annotated[bool, typer.Option("--record", help="Store the result in the board.")] = False,
    reviewed: Annotated[
        str, typer.Option(metavar="WHY", help="Accept the findings of the scan, for this reason.")
    ] = "",
    sandbox: SandboxName = "auto",
    as_json: JsonFlag = False,
) -> None:
    """Check entries of a board: schema, tasks, counts, infrastructure errors and transcripts, and grade a random share
    of the stored workspaces again.

    The share is drawn from the entry's content and a nonce made now. The result says what cannot be proven. Exit status
    0 if every entry is accepted, else 1.
    """
    from clawgym.leaderboards.boards import ENTRIES, RULES, BoardFolder, LeaderboardError, changed_entries

    folder = Path(where)
    if where.startswith("hf://"):
        if record or since is not None:
            raise LeaderboardError(f"{where}: --since and --record need the folder of a board: check a clone of it")
        board = BoardFolder.read(where)
        names = board.names
    elif (folder / RULES).is_file():
        board = BoardFolder.read(folder)
        names = board.names if since is None else changed_entries(board, since)
    elif since is None and folder.resolve().parent.name == ENTRIES:
        board = BoardFolder.read(folder.resolve().parent.parent)
        names = [folder.resolve().name]
    else:
        raise LeaderboardError(f"{where}: give a board, or the folder of an entry below BOARD/{ENTRIES}")
    checks = asyncio.run(_check(board, names, nonce, reviewed, sandbox))
    out = Console()
    if as_json:
        out.json([one.to_dict() for one in checks])
    for one in checks:
        if record:
            board.write_record(one.entry, one.to_dict())
        if not as_json:
            _say(out, one)
    if not checks and not as_json:
        out.say("no entry to check")
    raise typer.Exit(int(not all(one.accepted for one in checks)))


async def _check(board: BoardFolder, names: list[str], nonce: str, reviewed: str, sandbox: str) -> list[EntryCheck]:
    from clawgym.cli._running import TaskProgress
    from clawgym.leaderboards.check import check_entry
    from clawgym.sandbox import backend as make_backend

    tasks = board.tasks()
    backend = make_backend(sandbox)
    view = TaskProgress(Console(stderr=True), "grading again", "episodes")
    try:
        return [
            await check_entry(board.entry(name), board, tasks, backend, nonce=nonce, reviewed=reviewed, progress=view)
            for name in names
        ]
    finally:
        await backend.aclose()


def _say(out: Console, one: EntryCheck) -> None:
    out.say(f"{one.entry}: {'accepted' if one.accepted else 'REFUSED'} (digest {one.digest[:12]}, nonce {one.nonce})")
    for rule in one.rules:
        out.say(f"  {'holds' if rule.passed else 'VIOLATED':<9} {rule.rule}: {rule.text}")
    out.say("  not proven:")
    for line in one.unproven:
        out.say(f"    {line}")


@app.command()
def build(
    board: BoardName,
    out: Out = None,
) -> None:
    """Build the static site of a board: ranking, models and agents, costs, history, and a page for each entry."""
    from clawgym.leaderboards.boards import BoardFolder
    from clawgym.leaderboards.site import build as make

    folder = out or Path("site")
    names = make(BoardFolder.read(board), folder)
    Console().say(f"{folder / 'index.html'}: {len(names)} files")
