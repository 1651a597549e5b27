"""``clawgym openclaw``: fetch the OpenClaw that works in boxes, or make an image of one's own fit for them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from clawgym.cache import Progress

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="Fetch the OpenClaw that works in boxes, or make an image fit for them.")

Version = Annotated[str | None, typer.Option(help="An exact version; the one that is known to work if left out.")]


@app.command()
def install(
    version: Version = None,
    check: Annotated[bool, typer.Option("--check", help="Only compare every file of what is installed.")] = False,
) -> None:
    """Install OpenClaw and its Node for all boxes; what is there is verified, and mended if a file differs."""
    from clawgym.agents.openclaw import install as openclaw

    version = version or openclaw.DEFAULT_VERSION
    with _shown() as progress:
        if check:
            copy = openclaw.installed(version)
            openclaw.verify(copy, progress=progress)
        else:
            copy = openclaw.install(version, progress=progress)
    if version not in openclaw.TESTED:
        typer.echo(f"not tried with ClawGym; tried are {', '.join(openclaw.TESTED)}", err=True)
    typer.echo(f"OpenClaw {copy.version} on Node {copy.node_version}, every file as it was installed: {copy.folder}")


@app.command()
def image(
    source: Annotated[
        str,
        typer.Option(
            "--from", help="A Docker image, an OCI layout, an archive of an image (docker save), or a root file system."
        ),
    ],
    to: Annotated[str, typer.Option(help="What to make: a name if --from is a Docker image, else a folder.")],
) -> None:
    """Make an image that has an OpenClaw of its own fit for boxes; the one it is made from stays as it is."""
    from clawgym.agents.openclaw.image import add_to_docker_image, make_rootfs

    with _shown() as progress:
        if os.path.exists(source):
            layout = make_rootfs(Path(source), Path(to).resolve(), progress=progress)
            to = str(Path(to).resolve())
        else:
            layout = add_to_docker_image(source, to, progress=progress)
    typer.echo(f"OpenClaw {layout.version} ({layout.node} {layout.entry}) in the image {to}")


@contextlib.contextmanager
def _shown() -> Iterator[Progress]:
    """A bar on a terminal; elsewhere a line where something new begins."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task, now = bar.add_task("", total=None), ""

        def tell(what: str, done: int, total: int) -> None:
            nonlocal now
            if what != now and not console.is_terminal:
                console.print(what, markup=False, highlight=False)
            if what != now:
                bar.reset(task, description=what)
            now = what
            bar.update(task, completed=done, total=total or None)

        yield tell
