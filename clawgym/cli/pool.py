"""``clawgym pool``: inspect a pool, check its tokens, export and import episodes."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clawgym.cli._options import JsonFlag, PoolName, TaskIds, TokenizerPath
from clawgym.console import Console

if TYPE_CHECKING:
    from clawgym.pool import Pool
    from clawgym.pool.check import TraceVerdict
    from clawgym.pool.exchange import Format

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="Inspect a pool, check its tokens, export and import episodes.")

_SHOWN = 20
"""How many episodes ``check`` shows."""
_NO_OUTCOME = "closed without an outcome"


def _open(where: str, *, make: bool = False) -> Pool:
    from clawgym.errors import PoolError
    from clawgym.pool import Pool

    if not make and not where.startswith("postgresql://") and not Path(where).is_file():
        raise PoolError(f"{where}: no such pool: give its file, or postgresql://user@host/database")
    return Pool(where)


@app.command()
def stats(where: PoolName, as_json: JsonFlag = False) -> None:
    """Count the episodes, groups, turns and training sequences of a pool."""
    with _open(where) as pool:
        found = pool.stats()
        for channel, flaws in pool.flaws().items():
            found["channels"][channel] |= {"flaws": flaws, "flawed_turns": sum(flaws.values())}
    console = Console()
    if as_json:
        console.json(found)
        return
    for line in _lines(found):
        console.say(line)


def _lines(found: dict[str, Any]) -> list[str]:
    def counts(of: dict[str, int]) -> str:
        return ", ".join(f"{count:,} {name}" for name, count in sorted(of.items())) or "none"

    lines = [
        f"{found['name']}: {found['bytes'] / 2**20:,.1f} MiB, {found['images']:,} images, "
        f"{found['tools']:,} tool definitions"
    ]
    for channel, about in sorted(found["channels"].items()):
        per_episode = about["samples_per_episode"]
        lines += [
            f"{channel}",
            f"  episodes  {counts(about['episodes'])}",
            f"  groups    {counts(about['groups'])}",
            f"  turns     {about['turns']:,}, {about['flawed_turns']:,} of them flawed"
            + (f" ({counts(about['flaws'])})" if about.get("flaws") else ""),
            f"  sequences {about['samples']:,} with {about['trained_ids']:,} trained ids"
            + ("" if per_episode is None else f", {per_episode:.2f} per episode"),
        ]
        if about["fates"]:
            lines.append(f"  use       {counts(about['fates'])}")
        if about["dropped"]:
            lines.append(f"  dropped   {counts(about['dropped'])}")
    lines.append(f"batches: {counts(found['batches'])}")
    return lines


@app.command("export")
def export_command(
    where: PoolName,
    out: Annotated[Path, typer.Argument(metavar="FILE", help="The file to write.")],
    format: Annotated[
        str | None, typer.Option(help="parquet, atif, messages, or openai. Default: atif for .jsonl, else parquet.")
    ] = None,
    channel: Annotated[str | None, typer.Option(help="Only episodes of this channel.")] = None,
    task: TaskIds = None,
    outcome: Annotated[str | None, typer.Option(help="Only episodes with this outcome.")] = None,
    include_open: Annotated[
        bool, typer.Option("--open", help="Also export sessions that are still open, as they are now.")
    ] = False,
) -> None:
    """Write the closed episodes of a pool to a file. The file appears when it is complete.

    A session of the gateway is open until it is closed (`clawgym pool close`, or the control API). Open sessions are
    left out, with a note, unless --open is given.
    """
    from typing import cast

    from clawgym.pool.exchange import export

    with _open(where) as pool, _Counter("exported") as progress:
        done = export(
            pool,
            out,
            format=cast("Format | None", format),
            channel=channel,
            task_ids=task,
            outcome=outcome,
            include_open=include_open,
            progress=progress,
        )
    Console().say(f"{out}: {done.episodes:,} episodes")
    if done.left_open:
        Console(stderr=True).say(
            f"{done.left_open:,} open sessions were left out: export them as they are with --open, or close them: "
            f"clawgym pool close {shlex.quote(where)} --all",
            style="yellow",
        )


@app.command("close")
def close_command(
    where: PoolName,
    sessions: Annotated[list[str] | None, typer.Argument(metavar="SESSION...", help="Ids of open sessions.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Every open session.")] = False,
    outcome: Annotated[
        str | None,
        typer.Option(help="solved, failed, truncated or infra. Default: none; the session is never trained on."),
    ] = None,
    reward: Annotated[float | None, typer.Option(help="Reward of each session; needs --outcome.")] = None,
) -> None:
    """Close open sessions, so that they are exported and count for their groups. A session cannot be reopened.

    A running gateway refuses further calls of a closed session, and does not record a call that is in progress. The id
    of a session is in its base_url: http://.../s/ID/v1.
    """
    from clawgym.errors import PoolError
    from clawgym.pool import EpisodeEnd

    if bool(sessions) == every:
        raise typer.BadParameter("name the sessions, or give --all")
    if reward is not None and outcome is None:
        raise typer.BadParameter("--reward needs --outcome: give both")
    with _open(where) as pool:
        ids = list(dict.fromkeys(sessions or ())) or [episode.id for episode in pool.episodes(state="open")]
        if closed := [id for id in ids if pool.episode(id).state == "closed"]:
            raise PoolError(f"{closed[0]}: already closed: name open sessions only")
        for id in ids:
            if outcome is None:
                pool.curate(id, trainable=False)
                pool.close_episode(id, EpisodeEnd(outcome="failed", cause=_NO_OUTCOME))
            else:
                pool.close_episode(id, EpisodeEnd(outcome=outcome, reward=reward))
    Console().say(f"{pool.name}: {len(ids):,} sessions closed")


@app.command("import")
def import_command(
    where: PoolName, file: Annotated[Path, typer.Argument(help="Parquet of a pool, ATIF, or chat messages.")]
) -> None:
    """Import episodes into a pool, which is created if needed. The same command resumes."""
    from clawgym.pool.exchange import import_

    with _open(where, make=True) as pool, _Counter("imported") as progress:
        done = import_(pool, file, progress=progress)
    Console().say(
        f"{where if '://' not in where else pool.name}: {done.episodes:,} episodes with {done.turns:,} turns, "
        f"{done.flawed:,} of them flawed; {done.known:,} episodes were already in the pool"
    )


@app.command()
def check(
    source: Annotated[str, typer.Argument(metavar="POOL|FILE", help="A pool, postgresql://..., or a trace file.")],
    tokenizer: TokenizerPath = None,
    as_json: JsonFlag = False,
) -> None:
    """Check for each episode whether its token ids are exact, unproved or broken, and why; or that it has no turns.

    With --tokenizer, token ids are also compared with texts. Exit status 0 if every episode that
    has turns is exact, and one has; else 1.

    Reads pools, their parquet exports, ATIF, and JSON Lines and parquet files of verl, slime, Claw-R1, Agent Lightning,
    NeMo Gym and others.
    """
    from clawgym.pool.check import check as apply
    from clawgym.pool.tokenizer import load
    from clawgym.pool.traces import read_traces

    words = None if tokenizer is None else load(tokenizer)
    verdicts = []
    with Console(stderr=True).status("checked: 0") as status:
        for name, turns in read_traces(source):
            verdicts.append(apply(name, turns, words))
            if len(verdicts) % 50 == 0:
                status.update(f"checked: {len(verdicts):,}")
    exact = {verdict.status for verdict in verdicts} - {"empty"} == {"exact"}
    if as_json:
        rows = [{"status": verdict.status, **asdict(verdict)} for verdict in verdicts]
        Console().json({"exact": exact, "episodes": rows})
    else:
        _show_verdicts(verdicts, tokenizer is not None)
    raise typer.Exit(0 if exact else 1)


def _show_verdicts(verdicts: list[TraceVerdict], with_texts: bool) -> None:
    from rich.table import Table

    from clawgym.visible import visible

    console = Console()
    order = {"broken": 0, "unproved": 1, "empty": 2, "exact": 3}
    table = Table()
    for name in ("episode", "verdict"):
        table.add_column(name, overflow="fold")
    for name in ("turns", "sampled", "branches", "re-encoded"):
        table.add_column(name, justify="right")
    table.add_column("why", overflow="fold")
    for verdict in sorted(verdicts, key=lambda v: order[v.status])[:_SHOWN]:
        numbers = (verdict.turns, verdict.sampled, verdict.branches, verdict.reencoded)
        table.add_row(visible(verdict.episode), verdict.status, *(f"{n:,}" for n in numbers), visible(_why(verdict)))
    console.print(table)
    if len(verdicts) > _SHOWN:
        console.say(f"and {len(verdicts) - _SHOWN:,} more; --json shows them all")
    counts = Counter(verdict.status for verdict in verdicts)
    summary = ", ".join(f"{counts[status]:,} {status}" for status in order if counts[status]) or "no episodes"
    texts = "" if with_texts else "; ids were not compared with texts (--tokenizer)"
    console.say(f"{summary}{texts}")


def _why(verdict: TraceVerdict) -> str:
    """The findings of the worst level, one per kind."""
    level = verdict.status if verdict.status in ("broken", "unproved") else "note"
    kinds: dict[str, list[str]] = {}
    for finding in verdict.findings:
        if finding.level == level:
            where = "" if finding.turn is None else f"turn {finding.turn}: "
            kinds.setdefault(finding.code, []).append(f"{where}{finding.text}")
    more = (f"{texts[0]}{f' (and {len(texts) - 1} more)' if len(texts) > 1 else ''}" for texts in kinds.values())
    return "; ".join(more)


class _Counter:
    """A line with a counter; shown on a terminal only."""

    def __init__(self, what: str) -> None:
        self._status = Console(stderr=True).status(f"{what}: 0")
        self._what = what

    def __enter__(self) -> Callable[[int], None]:
        self._status.start()
        return lambda done: self._status.update(f"{self._what}: {done:,}") if done % 100 == 0 else None

    def __exit__(self, *_: object) -> None:
        self._status.stop()
