"""``clawgym openclaw``: prepare an image that contains OpenClaw."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from clawgym.cli.agents import shown
from clawgym.console import Console

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="Prepare an image that contains OpenClaw.")


@app.callback()
def _group() -> None:
    pass


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

    with shown() as tell:
        if os.path.exists(source):
            layout = make_rootfs(Path(source), Path(to).resolve(), progress=tell)
            to = str(Path(to).resolve())
        else:
            layout = add_to_docker_image(source, to, progress=tell)
    Console().say(f"OpenClaw {layout.version} ({layout.node} {layout.entry}) in the image {to}")
