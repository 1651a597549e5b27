"""``clawgym gateway``: stand between agents and an engine, and keep every token."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import ssl
import tempfile
from collections.abc import AsyncIterator, Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clawgym.errors import GatewayError

if TYPE_CHECKING:
    from clawgym.engines import TextEngine, TokenEngine

__all__ = ["gateway_command"]


class Upstream(StrEnum):
    """What samples."""

    VLLM = "vllm"
    SGLANG = "sglang"
    TRANSFORMERS = "transformers"
    OPENAI = "openai"
    REPLAY = "replay"


def gateway_command(
    upstream: Annotated[Upstream, typer.Option(help="What samples; openai and replay give text, never training.")],
    model: Annotated[str, typer.Option(help="Model name at the upstream; a folder for transformers and replay.")],
    pool: Annotated[str, typer.Option(help="Where turns are kept: a file, or postgresql://...")] = "pool.db",
    upstream_url: Annotated[str | None, typer.Option(help="http://... of the upstream.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Folder of the tokenizer (vllm, sglang).")] = None,
    host: Annotated[str, typer.Option(help="Address for agents; others than loopback need TLS.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port for agents; 0 takes a free one.")] = 0,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate chain (PEM).")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its private key (PEM).")] = None,
    control: Annotated[Path | None, typer.Option(help="Unix socket of the control API [default: a new one].")] = None,
) -> None:
    """Serve an engine to agents, and keep every token in a pool.

    Prints one session that is ready to use. More are opened, closed and given outcomes over the control API; its
    token lies beside its socket. The key of an openai upstream is read from OPENAI_API_KEY.
    """
    if (tls_cert is None) != (tls_key is None):
        raise GatewayError("a certificate and its key go together: give --tls-cert and --tls-key")
    serve = _serve(upstream, model, pool, upstream_url, tokenizer, host, port, tls_cert, tls_key, control)
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
    upstream: Upstream,
    model: str,
    pool_at: str,
    url: str | None,
    tokenizer: str | None,
    host: str,
    port: int,
    tls_cert: Path | None,
    tls_key: Path | None,
    control_at: Path | None,
) -> None:
    from clawgym.cli.eval import stop_on_signals
    from clawgym.console import Console
    from clawgym.gateway.control import Control
    from clawgym.gateway.server import Gateway
    from clawgym.pool import Pool

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
        engine = _engine(upstream, model, url, tokenizer)
        stack.push_async_callback(engine.aclose)
        pool = stack.enter_context(contextlib.closing(Pool(pool_at)))
        gateway = await stack.enter_async_context(Gateway(engine, pool, model=Path(model).name))
        control = await stack.enter_async_context(Control(gateway))
        socket = await stack.enter_async_context(_private_socket(control_at, control.token))
        await gateway.listen(host=host, port=port, tls=tls)
        await control.listen(path=socket)
        opened = await gateway.open_session(channel="online")
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


def _engine(upstream: Upstream, model: str, url: str | None, tokenizer: str | None) -> TokenEngine | TextEngine:
    if upstream in (Upstream.VLLM, Upstream.SGLANG):
        if url is None or tokenizer is None:
            raise GatewayError(f"upstream {upstream} needs --upstream-url and --tokenizer")
    elif tokenizer is not None:
        raise GatewayError(f"upstream {upstream} takes no --tokenizer: leave it out")
    match upstream:
        case Upstream.VLLM:
            from clawgym.engines.vllm import VLLMEngine

            return VLLMEngine(url or "", model, tokenizer=tokenizer or "")
        case Upstream.SGLANG:
            from clawgym.engines.sglang import SGLangEngine

            return SGLangEngine(url or "", model, tokenizer=tokenizer or "")
        case Upstream.TRANSFORMERS:
            from clawgym.engines.transformers import TransformersEngine
            from clawgym.engines.vision import VisionEngine, sees

            return VisionEngine(model) if sees(model) else TransformersEngine(model)
        case Upstream.OPENAI:
            from clawgym.engines import OpenAIEngine

            return OpenAIEngine(model, base_url=url)
        case Upstream.REPLAY:
            from clawgym.engines import ReplayEngine

            return ReplayEngine.from_file(model)
