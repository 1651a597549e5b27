"""``clawgym images``: container images on this machine, for sandboxes without a container engine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clawgym.cli._options import JsonFlag, named_values
from clawgym.console import Console

if TYPE_CHECKING:
    from clawgym.cache import Progress

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="Container images for sandboxes, without a container engine.")

Named = Annotated[str | None, typer.Option("--name", metavar="NAME", help="What tasks call it.")]


@app.command()
def add(
    source: Annotated[
        str,
        typer.Argument(metavar="SOURCE", help="An image archive or OCI layout, or what skopeo copies: docker://..."),
    ],
    name: Named = None,
) -> None:
    """Unpack an image. Layers that are here already are shared."""
    from clawgym.sandbox.images import ImageStore

    console = Console()
    store = ImageStore()
    image = store.add(source, name, progress=_shown(console))
    names = [n for n, one in store.names().items() if one.digest == image.digest]
    console.say(f"{', '.join(names)}: {len(image.layers)} layers, sha256:{image.digest}")


@app.command()
def build(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder of the Dockerfile.", file_okay=False)],
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="What tasks call it.")],
    file: Annotated[str, typer.Option("--file", metavar="FILE", help="The Dockerfile, in FOLDER.")] = "Dockerfile",
    arguments: Annotated[
        list[str] | None, typer.Option("--build-arg", metavar="NAME=VALUE", help="A value of ARG. Repeatable.")
    ] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            "--allow", metavar="HOST", help="RUN may reach this host, as HOST, HOST:PORT or *.HOST. Repeatable."
        ),
    ] = None,
) -> None:
    """Build an image from a Dockerfile. RUN runs in a sandbox, without a network but for --allow."""
    from clawgym.sandbox import backend
    from clawgym.sandbox.images import ImageStore, StoredImage
    from clawgym.sandbox.images.build import build_image

    console = Console()

    async def work() -> StoredImage:
        made = backend("namespace")
        try:
            return await build_image(
                folder,
                name,
                store=ImageStore(),
                backend=made,
                dockerfile=file,
                args=named_values(arguments, "--build-arg"),
                allow=allow or (),
                progress=_shown(console),
            )
        finally:
            await made.aclose()

    image = asyncio.run(work())
    console.say(f"{name}: {len(image.layers)} layers, sha256:{image.digest}")


@app.command("list")
def list_images(as_json: JsonFlag = False) -> None:
    """Show the images by name."""
    from clawgym.sandbox.images import ImageStore

    console = Console()
    found = ImageStore().names()
    if as_json:
        console.json({name: {"digest": image.digest, "layers": len(image.layers)} for name, image in found.items()})
        return
    for name, image in found.items():
        console.say(f"{name}: {len(image.layers)} layers, sha256:{image.digest}")
    if not found:
        console.say("no images: add one (clawgym images add SOURCE), or build one (clawgym images build FOLDER)")


@app.command()
def remove(name: Annotated[str, typer.Argument(metavar="NAME", help="A name of `clawgym images list`.")]) -> None:
    """Remove an image, and the layers that no other image has."""
    from clawgym.sandbox.images import ImageStore

    ImageStore().remove(name)
    Console().say(f"{name}: removed")


def _shown(console: Console) -> Progress:
    """Prints each step once."""
    said: set[str] = set()

    def show(what: str, done: int, total: int) -> None:
        line = f"{done + 1}/{total} {what}" if total else what
        if line not in said:
            said.add(line)
            console.say(line)

    return show
