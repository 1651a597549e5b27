"""``clawgym openclaw``: install OpenClaw for sandboxes, or prepare an image that contains it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clawgym.console import Console, progress

if TYPE_CHECKING:
    from clawgym.cache import Progress

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="Install OpenClaw for sandboxes, or prepare an image that contains it.")

Version = Annotated[str | None, typer.Option(help="An exact version. Default: a tested version.")]


@app.command()
def install(
    version: Version = None,
    check: Annotated[bool, typer.Option("--check", help="Only compare every file of the installed copy.")] = False,
) -> None:
    """Install OpenClaw and its Node for all sandboxes. An existing copy is verified and repaired."""
    from clawgym.agents.openclaw import install as openclaw

    version = version or openclaw.DEFAULT_VERSION
    with _shown() as tell:
        if check:
            copy = openclaw.installed(version)
            openclaw.verify(copy, progress=tell)
        else:
            copy = openclaw.install(version, progress=tell)
    if version not in openclaw.TESTED:
        Console(stderr=True).say(f"not tested with ClawGym; tested versions: {', '.join(openclaw.TESTED)}")
    Console().say(f"OpenClaw {copy.version} on Node {copy.node_version}, every file verified: {copy.folder}")


@app.command()
def image(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE", help="A Docker image, an OCI layout, an archive (docker save), or a root file system."
        ),
    ],
    to: Annotated[
        str, typer.Argument(metavar="DEST", help="A new image name if SOURCE is a Docker image, else a new folder.")
    ],
) -> None:
    """Prepare an image that contains OpenClaw for use in sandboxes. The source is not changed."""
    from clawgym.agents.openclaw.image import add_to_docker_image, make_rootfs

    with _shown() as tell:
        if os.path.exists(source):
            layout = make_rootfs(Path(source), Path(to).resolve(), progress=tell)
            to = str(Path(to).resolve())
        else:
            layout = add_to_docker_image(source, to, progress=tell)
    Console().say(f"OpenClaw {layout.version} ({layout.node} {layout.entry}) in the image {to}")


@contextlib.contextmanager
def _shown() -> Iterator[Progress]:
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
