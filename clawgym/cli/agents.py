"""``clawgym agents``: install agent programs for sandboxes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from clawgym.console import Console, progress

if TYPE_CHECKING:
    from clawgym.cache import Progress

__all__ = ["app", "shown"]

app = typer.Typer(no_args_is_help=True, help="Install agent programs for sandboxes.")


@app.callback()
def _group() -> None:
    pass


@app.command()
def install(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Such as openclaw or codex; an unknown name lists all.")],
    version: Annotated[str | None, typer.Option(help="An exact version. Default: a tested version.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Only compare every file of the installed copy.")] = False,
) -> None:
    """Install a program and what runs it for all sandboxes. An existing copy is verified and repaired."""
    from clawgym.agents.programs import install as programs
    from clawgym.agents.programs.releases import release_of

    release = release_of(name, version)
    with shown() as tell:
        if check:
            copy = programs.installed(release)
            programs.verify(copy, progress=tell)
        else:
            copy = programs.install(release, progress=tell)
    runtime = f" on {(release.runtime or '').capitalize()} {copy.runtime}" if copy.runtime else ""
    Console().say(f"{release.title} {copy.version}{runtime}, every file verified: {copy.folder}")


@contextlib.contextmanager
def shown() -> Iterator[Progress]:
    """A progress bar on a terminal; elsewhere a line for each new step."""
    console = Console(stderr=True)
    with progress(console) as bar:
        task, now = bar.add_task("", total=None), ""

        def tell(what: str, done: int, total: int) -> None:
            nonlocal now
            if what != now and not console.is_terminal:
                console.say(what)
            if what != now:
                bar.reset(task, description=what)
            now = what
            bar.update(task, completed=done, total=total or None)

        yield tell
