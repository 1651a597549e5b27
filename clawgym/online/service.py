"""A service: a model behind one address, whose conversations are recorded, judged and trained on.

Four loops: serving and collecting are in this process, judging and training in processes of their own
(:mod:`clawgym.online.loops`).

Invariant: what users wait for is in this process only. A loop that fails, is slow or is killed changes no reply.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from clawgym.engines.folders import local_name, model_folder
from clawgym.errors import ClawGymError, ServiceError
from clawgym.gateway.control import Control
from clawgym.gateway.render import Renderer
from clawgym.gateway.server import Gateway, check_encrypted
from clawgym.online.client import INTERNAL
from clawgym.online.config import ServiceConfig, ServiceFolder, secret_in
from clawgym.online.conversations import Conversations, source_of
from clawgym.online.door import Door, Keys
from clawgym.online.elsewhere import TrainingDoor
from clawgym.online.loops import LOOPS, keep_running
from clawgym.online.serving import AdapterEngine, VersionedEngine
from clawgym.online.versions import Versions
from clawgym.pool import Pool
from clawgym.trainers.common.advantages import forget_advantages

__all__ = ["Service", "forget", "open_service"]

_log = logging.getLogger("clawgym.online")
_TICK_SECONDS = 1.0
_SWEEP_SECONDS = 3600.0
"""Seconds between two deletions of old conversations."""


@dataclass(frozen=True)
class Service:
    """A running service."""

    base_url: str
    """For clients of OpenAI and Anthropic."""
    gateway: Gateway
    conversations: Conversations
    keys: Keys
    versions: Versions


@contextlib.asynccontextmanager
async def open_service(
    folder: ServiceFolder,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    tls: ssl.SSLContext | None = None,
    say: Callable[[str], None] = print,
    loops: tuple[str, ...] = LOOPS,
    train_elsewhere: bool = False,
) -> AsyncIterator[Service]:
    """Run the service of ``folder``, which has a configuration (:meth:`ServiceFolder.create`).

    Args:
        folder: its folder.
        host: address for clients; any but loopback needs ``tls``.
        port: port for clients; 0: any free one.
        tls: certificate and key.
        say: told of loops that end.
        loops: the loops to run in processes of their own.
        train_elsewhere: train on another machine instead (:mod:`clawgym.online.elsewhere`).

    Raises:
        ServiceError: a service runs in the folder already.
        EngineError: the model cannot be loaded, or its server does not answer.
        GatewayError: the address cannot be used.
    """
    check_encrypted(host, tls)  # before the model is loaded
    config = folder.config
    async with AsyncExitStack() as stack:
        stack.enter_context(folder.running())
        model = model_folder(config.training.model.path or "")
        versions = Versions.create(folder.versions, model, {"model": config.training.model.path})
        engine = VersionedEngine(await _engine(config, model, folder), versions)
        stack.push_async_callback(engine.aclose)
        pool = stack.enter_context(Pool(folder.pool))
        for left in [episode.id for episode in pool.episodes(channel=INTERNAL)]:  # by loops that were killed
            pool.erase(left)
        stored = None
        if config.redact:
            from clawgym.online.redaction import Redactor

            stored = Redactor().turn
        name = local_name(config.training.model.path or "")
        gateway = await stack.enter_async_context(
            Gateway(engine, pool, renderer=Renderer(model), model=Path(name).name, stored=stored)
        )
        conversations = Conversations(gateway, idle=config.idle, held_out=config.held_out)
        await conversations.restore()
        keys = Keys(folder.keys)
        trainer = None
        if train_elsewhere:
            loops = tuple(loop for loop in loops if loop != "train")
            trainer = TrainingDoor(gateway, versions, config, secret_in(folder.training_key))
        door = await stack.enter_async_context(Door(gateway, conversations, keys, trainer=trainer))
        control = await stack.enter_async_context(Control(gateway))
        await gateway.listen()
        _write_private(folder.token, control.token)
        await control.listen(path=folder.socket)
        address = await door.listen(host=host, port=port, tls=tls)
        tasks = [asyncio.create_task(_collect(gateway, conversations, config))]
        running = [loop for loop in loops if loop != "gate" or config.gate.on]
        tasks += [asyncio.create_task(keep_running(loop, folder, say)) for loop in running]
        stack.push_async_callback(_end, tasks)
        folder.announce(f"{address.url}/v1")
        yield Service(f"{address.url}/v1", gateway, conversations, keys, versions)


def forget(folder: ServiceFolder, session: str) -> tuple[int, ...]:
    """Delete a conversation, and erase the versions that were trained on it. Returns their numbers.

    Raises :class:`~clawgym.errors.ServiceError` if the version that answers is one of them, and if the conversation is
    unknown."""
    versions = Versions(folder.versions)
    with Pool(folder.pool) as pool:
        there = any(episode.id == session for episode in pool.episodes() if source_of(episode.channel) is not None)
        if not there and not versions.exposed(session):
            raise ServiceError(f"there is no conversation {session}: see `clawgym serve status`")
        erased = versions.forget(session)
        forget_advantages(folder.path, session)
        if there:
            pool.erase(session)
    return tuple(version.number for version in erased)


async def _engine(config: ServiceConfig, model: Path, folder: ServiceFolder) -> AdapterEngine:
    about = config.training
    if about.compute.vllm:
        from clawgym.engines.vllm import VLLMEngine

        key = os.environ.get("VLLM_API_KEY")
        shared = folder.path.absolute() / "adapters"
        engine = VLLMEngine(about.compute.vllm, str(model), tokenizer=str(model), api_key=key, shared=shared)
        try:
            await engine.check()
        except BaseException:
            await engine.aclose()
            raise
        return engine
    from clawgym.engines.transformers import TransformersEngine

    return await asyncio.to_thread(
        TransformersEngine,
        model,
        device=about.compute.device,
        context_window=about.model.context_window,
        dtype=about.model.dtype,
        kernels=about.compute.kernels,
        quantize=about.model.quantize,
    )


async def _collect(gateway: Gateway, conversations: Conversations, config: ServiceConfig) -> None:
    """End idle conversations, and delete old ones. What fails is tried again."""
    swept = -math.inf
    while True:
        try:
            await conversations.end_idle()
            if time.monotonic() - swept > _SWEEP_SECONDS:
                await gateway.in_pool(partial(_sweep, oldest=time.time() - 86400 * config.keep_days))
                swept = time.monotonic()
        except ClawGymError as error:
            _log.warning("conversations could not be ended or deleted: %s", error)
        await asyncio.sleep(_TICK_SECONDS)


def _sweep(pool: Pool, oldest: float) -> None:
    old = [e.id for e in pool.episodes() if source_of(e.channel) is not None and (e.closed_at or oldest) < oldest]
    for id in old:
        pool.erase(id)


async def _end(tasks: list[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _write_private(file: Path, text: str) -> None:
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
        out.write(text + "\n")
