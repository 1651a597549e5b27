"""``clawgym openclaw``: prepare an image that contains OpenClaw."""

from __future__ import annotations

import os
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
            metavar="SOURCE",
            help="The name of an image on the Docker engine; or an OCI layout, an archive, or what skopeo copies: "
            "docker://...",
        ),
    ],
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Of the new image: on the Docker engine, or in `clawgym images list`.")
    ],
) -> None:
    """Prepare an image that contains OpenClaw for use in sandboxes. The source is not changed."""
    from clawgym.agents.openclaw.image import add_image, add_to_docker_image

    stored = "://" in source or os.path.exists(os.path.expanduser(source))
    with shown() as tell:
        layout = (add_image if stored else add_to_docker_image)(source, name, progress=tell)
    Console().say(f"OpenClaw {layout.version} ({layout.node} {layout.entry}) in the image {name}")
