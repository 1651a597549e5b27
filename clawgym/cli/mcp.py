"""``clawgym mcp``: serve ClawGym to assistants by MCP."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated

import typer

from clawgym.cli._options import BaseUrl, SandboxName

__all__ = ["mcp_command"]


def mcp_command(
    runs: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of runs. Nothing else is read or written.")],
    base_url: BaseUrl = None,
    api_key_env: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Environment variable that holds the API key. Default: OPENAI_API_KEY."),
    ] = None,
    sandbox: SandboxName = "auto",
    episodes: Annotated[int, typer.Option(min=1, metavar="N", help="Most episodes of one evaluation.")] = 100,
    trusted: Annotated[
        bool,
        typer.Option(
            "--trusted",
            help="Let the assistant also give options of agents, paths and modules: it can then run code as you.",
        ),
    ] = False,
) -> None:
    """Serve evaluations to an assistant by MCP, on standard input and output.

    An assistant starts this command itself. It can list task sets and agents, run an evaluation, and read and compare
    the runs of the folder.
    """
    from clawgym.interop.mcp import make_mcp_server

    server = make_mcp_server(
        runs,
        base_url=base_url,
        api_key_env=api_key_env,
        sandbox=sandbox,
        most_episodes=episodes,
        trusted=trusted,
    )
    with contextlib.redirect_stdout(sys.__stdout__):  # the server writes bytes
        server.run("stdio")
