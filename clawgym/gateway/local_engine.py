"""A model in this process as a chat engine, with exact tokens: no server and no key.

Invariant: the turns of an episode are those that the gateway would record; nothing listens on the network.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import json
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from clawgym.engines.folders import local_name, model_folder
from clawgym.engines.protocol import Completion, Sampling
from clawgym.gateway.render import Renderer
from clawgym.gateway.request import SessionRequest
from clawgym.gateway.server import Gateway
from clawgym.gateway.session_engine import SessionEngine

__all__ = ["LocalEngine"]


class LocalEngine:
    """An :class:`~clawgym.engines.protocol.Engine` on a model of transformers in this process.

    The weights are loaded at the first call. Conversations that begin alike share a session of the gateway, so that a
    later turn continues the ids that were sampled before it.

    Args:
        model: a packaged model (:data:`~clawgym.engines.packaged.PACKAGED`), a folder, or a name on the Hub.

    Raises:
        EngineError: there is no such model, or it cannot be downloaded.
        GatewayError: its chat template cannot be used.
        MissingDependency: without the extra ``local``.
    """

    name = "transformers"

    def __init__(self, model: str) -> None:
        self.model = model
        self._folder = model_folder(model)
        self._renderer = Renderer(self._folder)
        self._stack = contextlib.AsyncExitStack()
        self._loading = asyncio.Lock()
        self._gateway: Gateway | None = None
        self._sessions: dict[str, asyncio.Task[SessionEngine]] = {}

    @property
    def takes_tools(self) -> bool:
        """Whether the model's chat template shows tools and calls."""
        return self._renderer.call_parser is not None

    async def check(self) -> None:
        """Load the weights. Raises :class:`~clawgym.errors.EngineError` if that fails."""
        await self._started()

    async def complete(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] = (), sampling: Sampling
    ) -> Completion:
        """See :class:`~clawgym.engines.protocol.Engine`."""
        gateway = await self._started()
        task = next((number for number, message in enumerate(messages) if message["role"] == "user"), 0)
        begin = json.dumps([*messages[: task + 1], sampling.seed], sort_keys=True, default=str)
        if begin not in self._sessions:
            self._sessions[begin] = asyncio.create_task(self._session(gateway))
        return await (await self._sessions[begin]).complete(messages, tools=tools, sampling=sampling)

    def identity(self) -> dict[str, Any]:
        """The model, the SHA-256 of its weights, and the versions of the libraries."""
        return self._identity

    @functools.cached_property
    def _identity(self) -> dict[str, Any]:
        digest = hashlib.sha256()
        for file in sorted(self._folder.glob("*.safetensors")):
            with file.open("rb") as weights:
                digest.update(hashlib.file_digest(weights, "sha256").digest())
        return {
            "name": self.name,
            "model": local_name(self.model),
            "weights_sha256": digest.hexdigest(),
            **{name: version(name) for name in ("torch", "transformers")},
        }

    async def aclose(self) -> None:
        for session in self._sessions.values():
            session.cancel()
        await self._stack.aclose()

    async def _session(self, gateway: Gateway) -> SessionEngine:
        return SessionEngine(gateway, await gateway.open_session(SessionRequest(channel="local")))

    async def _started(self) -> Gateway:
        async with self._loading:
            if self._gateway is None:
                self._gateway = await self._start()
        return self._gateway

    async def _start(self) -> Gateway:
        from clawgym.engines.transformers import transformers_engine
        from clawgym.pool import Pool

        engine = await asyncio.to_thread(transformers_engine, str(self._folder))
        self._stack.push_async_callback(engine.aclose)
        folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="clawgym-"))
        pool = self._stack.enter_context(Pool(Path(folder, "pool.db")))
        return await self._stack.enter_async_context(Gateway(engine, pool, renderer=self._renderer, model=self.model))
