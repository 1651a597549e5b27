"""``clawgym openclaw``: fetch the OpenClaw that works in boxes, or make an image of one's own fit for them."""

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
    with _shown() as tell:
        if check:
            copy = openclaw.installed(version)
            openclaw.verify(copy, progress=tell)
        else:
            copy = openclaw.install(version, progress=tell)
    if version not in openclaw.TESTED:
        Console(stderr=True).say(f"not tried with ClawGym; tried are {', '.join(openclaw.TESTED)}")
    Console().say(f"OpenClaw {copy.version} on Node {copy.node_version}, every file as it was installed: {copy.folder}")


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

    with _shown() as tell:
        if os.path.exists(source):
            layout = make_rootfs(Path(source), Path(to).resolve(), progress=tell)
            to = str(Path(to).resolve())
        else:
            layout = add_to_docker_image(source, to, progress=tell)
    Console().say(f"OpenClaw {layout.version} ({layout.node} {layout.entry}) in the image {to}")


@contextlib.contextmanager
def _shown() -> Iterator[Progress]:
    """A bar on a terminal; elsewhere a line where something new begins."""
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
