"""``clawgym gateway``: serve an engine to agents and record every token in a pool."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import ssl
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from clawgym.cli._options import BaseUrl, TokenizerPath, named_values, tls_of
from clawgym.errors import GatewayError

__all__ = ["fast_loop", "freeze_objects", "gateway_command"]


def gateway_command(
    engine: Annotated[
        str, typer.Option(help="vllm, sglang, transformers, openai, replay, ... (`clawgym list engines`).")
    ],
    model: Annotated[
        str | None, typer.Option(help="Name at the endpoint; a folder for transformers, a file for replay.")
    ] = None,
    pool: Annotated[str, typer.Option(help="Where turns are recorded: a file, or postgresql://...")] = "pool.db",
    base_url: BaseUrl = None,
    tokenizer: TokenizerPath = None,
    engine_option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE", help="An option of the engine: see `clawgym list engines NAME`. Repeatable."
        ),
    ] = None,
    dialect: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Serve only this dialect (`clawgym list dialects`). Repeatable."),
    ] = None,
    parser: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="How the model writes tool calls (`clawgym list parsers`). Default: detected."
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address for agents. Any but loopback needs TLS.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port for agents; 0: any free port.")] = 0,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate chain (PEM).")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Private key of the certificate (PEM).")] = None,
    control: Annotated[Path | None, typer.Option(help="Unix socket of the control API. Default: a new one.")] = None,
) -> None:
    """Serve an engine to agents, and record every token in a pool.

    Prints the URL and key of one open session, and the name of the model for clients. Use the control API to open more
    sessions, to close them and to set their outcomes; its token is in a file next to its socket. The key of an openai
    endpoint is read from OPENAI_API_KEY.
    """
    options: dict[str, Any] = {
        "model": model,
        "base_url": base_url,
        "tokenizer": None if tokenizer is None else str(tokenizer),
    }
    options = {name: value for name, value in options.items() if value is not None} | named_values(
        engine_option, "--engine-option"
    )
    serve = _serve(engine, options, dialect, parser, pool, host, port, tls_of(tls_cert, tls_key), control)
    with asyncio.Runner(loop_factory=fast_loop()) as runner:
        runner.run(serve)


def fast_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """The event loop of uvloop, if it is installed."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def freeze_objects() -> None:
    """Exclude all objects that exist now from garbage collection, whose pauses would delay every stream by tens of
    milliseconds."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


async def _serve(
    engine_name: str,
    options: dict[str, Any],
    dialects: Sequence[str] | None,
    parser: str | None,
    pool_path: str,
    host: str,
    port: int,
    tls: ssl.SSLContext | None,
    control_path: Path | None,
) -> None:
    from clawgym.cli._running import stop_on_signals
    from clawgym.console import Console
    from clawgym.engines import TokenEngine
    from clawgym.gateway.control import Control
    from clawgym.gateway.render import Renderer
    from clawgym.gateway.request import SessionRequest
    from clawgym.gateway.server import Gateway
    from clawgym.pool import Pool
    from clawgym.registry import engines

    stop = asyncio.Event()
    stop_on_signals(stop, lambda _: Console(stderr=True).say("Stopping: running turns are recorded as aborted."))
    async with contextlib.AsyncExitStack() as stack:
        engine = engines.make(engine_name, **options)
        stack.push_async_callback(engine.aclose)
        pool = stack.enter_context(contextlib.closing(Pool(pool_path)))
        renderer = Renderer(engine.tokenizer, call_parser=parser) if isinstance(engine, TokenEngine) else None
        gateway = await stack.enter_async_context(
            Gateway(
                engine, pool, renderer=renderer, model=Path(options.get("model", engine_name)).name, dialects=dialects
            )
        )
        control = await stack.enter_async_context(Control(gateway))
        socket = await stack.enter_async_context(_private_socket(control_path, control.token))
        await gateway.listen(host=host, port=port, tls=tls)
        await control.listen(path=socket)
        opened = await gateway.open_session(SessionRequest(channel="online"))
        freeze_objects()
        out = Console()
        for name, value in (
            ("base_url", gateway.base_url(opened)),
            ("api_key", opened.secret),
            ("model", gateway.model),
            ("control", socket),
            ("token", f"{socket}.token"),
            ("pool", pool_path),
        ):
            out.say(f"{name + ':':<11}{value}")
        await stop.wait()


@contextlib.asynccontextmanager
async def _private_socket(chosen: Path | None, token: str) -> AsyncIterator[Path]:
    """A path for the control socket, with a file that holds the token; both are removed at the end."""
    with contextlib.ExitStack() as stack:
        folder = chosen.parent if chosen else Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="clawgym-")))
        path = chosen or folder / "control.sock"
        token_file = Path(f"{path}.token")
        try:
            with open(os.open(token_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(token + "\n")
        except OSError as error:
            raise GatewayError(
                f"{token_file}: cannot be created ({error.strerror}): another gateway may use it; choose another "
                "--control"
            ) from error
        try:
            yield path
        finally:
            token_file.unlink(missing_ok=True)
            path.unlink(missing_ok=True)
