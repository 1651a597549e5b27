"""``clawgym gateway``: stand between agents and an engine, and keep every token."""

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

from clawgym.cli._options import BaseUrl, TokenizerPath, named_values
from clawgym.errors import GatewayError

__all__ = ["gateway_command"]


def gateway_command(
    engine: Annotated[
        str, typer.Option(help="vllm, sglang, transformers, openai, replay, ... (`clawgym list engines`).")
    ],
    model: Annotated[
        str | None, typer.Option(help="Its name at the endpoint; a folder for transformers, a file for replay.")
    ] = None,
    pool: Annotated[str, typer.Option(help="Where turns are kept: a file, or postgresql://...")] = "pool.db",
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
    host: Annotated[str, typer.Option(help="Address for agents; others than loopback need TLS.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port for agents; 0 takes a free one.")] = 0,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate chain (PEM).")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its private key (PEM).")] = None,
    control: Annotated[Path | None, typer.Option(help="Unix socket of the control API. Default: a new one.")] = None,
) -> None:
    """Serve an engine to agents, and keep every token in a pool.

    Prints one session that is ready to use. More are opened, closed and given outcomes over the control API; its
    token lies beside its socket. The key of an openai endpoint is read from OPENAI_API_KEY.
    """
    if (tls_cert is None) != (tls_key is None):
        raise GatewayError("a certificate and its key go together: give --tls-cert and --tls-key")
    options: dict[str, Any] = {
        "model": model,
        "base_url": base_url,
        "tokenizer": None if tokenizer is None else str(tokenizer),
    }
    options = {name: value for name, value in options.items() if value is not None} | named_values(
        engine_option, "--engine-option"
    )
    serve = _serve(engine, options, dialect, parser, pool, host, port, tls_cert, tls_key, control)
    with asyncio.Runner(loop_factory=_fast_loop()) as runner:
        runner.run(serve)


def _fast_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's, where it is installed (the extra has it wherever it can be had)."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def _settle_garbage() -> None:
    """What is loaded now stays: looking through it again and again would stop every stream for tens of milliseconds."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


async def _serve(
    engine_name: str,
    options: dict[str, Any],
    dialects: Sequence[str] | None,
    parser: str | None,
    pool_at: str,
    host: str,
    port: int,
    tls_cert: Path | None,
    tls_key: Path | None,
    control_at: Path | None,
) -> None:
    from clawgym.cli._running import stop_on_signals
    from clawgym.console import Console
    from clawgym.engines import TokenEngine
    from clawgym.gateway.control import Control
    from clawgym.gateway.render import Renderer
    from clawgym.gateway.server import Gateway
    from clawgym.gateway.sessions import SessionRequest
    from clawgym.pool import Pool
    from clawgym.registry import engines

    tls = None
    if tls_cert is not None and tls_key is not None:
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            tls.load_cert_chain(tls_cert, tls_key)
        except (OSError, ssl.SSLError) as error:
            raise GatewayError(f"{tls_cert}, {tls_key}: no certificate and key ({error}): give PEM files") from error
    stop = asyncio.Event()
    stop_on_signals(stop, lambda _: Console(stderr=True).say("Stopping: turns under way are recorded as aborted."))
    async with contextlib.AsyncExitStack() as stack:
        engine = engines.make(engine_name, **options)
        stack.push_async_callback(engine.aclose)
        pool = stack.enter_context(contextlib.closing(Pool(pool_at)))
        renderer = Renderer(engine.tokenizer, call_parser=parser) if isinstance(engine, TokenEngine) else None
        gateway = await stack.enter_async_context(
            Gateway(
                engine, pool, renderer=renderer, model=Path(options.get("model", engine_name)).name, dialects=dialects
            )
        )
        control = await stack.enter_async_context(Control(gateway))
        socket = await stack.enter_async_context(_private_socket(control_at, control.token))
        await gateway.listen(host=host, port=port, tls=tls)
        await control.listen(path=socket)
        opened = await gateway.open_session(SessionRequest(channel="online"))
        _settle_garbage()
        out = Console()
        for name, value in (
            ("base_url", gateway.base_url(opened)),
            ("api_key", opened.secret),
            ("control", socket),
            ("token", f"{socket}.token"),
            ("pool", pool_at),
        ):
            out.say(f"{name + ':':<11}{value}")
        await stop.wait()


@contextlib.asynccontextmanager
async def _private_socket(asked: Path | None, token: str) -> AsyncIterator[Path]:
    """A path for the control socket, with the token beside it; both are gone afterwards."""
    with contextlib.ExitStack() as stack:
        folder = asked.parent if asked else Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="clawgym-")))
        path = asked or folder / "control.sock"
        beside = Path(f"{path}.token")
        try:
            with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(token + "\n")
        except OSError as error:
            raise GatewayError(
                f"{beside}: cannot be made ({error.strerror}): another gateway may use it; choose another --control"
            ) from error
        try:
            yield path
        finally:
            beside.unlink(missing_ok=True)
            path.unlink(missing_ok=True)
