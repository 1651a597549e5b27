"""``clawgym serve-env``: serve an environment to clients of OpenEnv."""

from __future__ import annotations

import secrets
from typing import Annotated, Any

import typer

from clawgym.cli._options import SandboxName, named_values

__all__ = ["serve_env_command"]


def serve_env_command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="One of `clawgym list envs`, or package.module:Class.")],
    taskset: Annotated[
        str | None,
        typer.Argument(metavar="TASKSET", help="A task set (`clawgym tasks list`). Default: that of the environment."),
    ] = None,
    env_option: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="An option of the environment: `clawgym list envs NAME`. Repeatable."),
    ] = None,
    sessions: Annotated[int, typer.Option(min=1, metavar="N", help="Most sessions at a time.")] = 32,
    sandbox: SandboxName = "auto",
    port: Annotated[int, typer.Option(help="Port for agents; 0: any free port.")] = 0,
) -> None:
    """Serve an environment by OpenEnv's protocol, on this machine.

    Prints the address and the token that clients send (`headers={"Authorization": "Bearer TOKEN"}`), and an address
    that has the token in it, for clients without headers. Needs the package openenv.
    """
    from clawgym.console import Console
    from clawgym.envs import make
    from clawgym.interop.openenv import serve

    options: dict[str, Any] = named_values(env_option, "--env-option")
    secret, out = secrets.token_urlsafe(32), Console()

    def say(address: str) -> None:
        for what, value in (("url", address), ("token", secret), ("with both", f"{address}/s/{secret}")):
            out.say(f"{what + ':':<11}{value}")
        out.file.flush()

    serve(
        lambda: make(env=name, tasks=taskset, backend=sandbox, **options),
        port=port,
        sessions=sessions,
        secret=secret,
        say=say,
    )
