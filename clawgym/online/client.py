"""The control API of a running service, for its loops: sessions that are answered by one version.

Invariants: nothing that a loop asks is trained on, and it is deleted from the pool afterwards.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import aiohttp

from clawgym.engines.openai import OpenAIEngine, RateLimits
from clawgym.engines.protocol import Completion
from clawgym.errors import EngineError, ServiceError
from clawgym.online.config import ServiceFolder
from clawgym.online.serving import pinned
from clawgym.pool import Pool
from clawgym.records.judge import Message

__all__ = ["INTERNAL", "open_version", "reply_of"]

INTERNAL = "internal"
"""The channel of sessions of loops."""


@contextlib.asynccontextmanager
async def open_version(
    folder: ServiceFolder, pool: Pool, version: int, *, concurrency: int = 16
) -> AsyncIterator[OpenAIEngine]:
    """An engine that is answered by ``version``. What was asked is deleted from ``pool`` at the end.

    Raises :class:`~clawgym.errors.ServiceError` if the service does not run."""
    opened = await _ask(folder, "/sessions", {"channel": INTERNAL, "adapter": pinned(version)})
    engine = OpenAIEngine(
        f"version-{version}",
        base_url=opened["base_url"],
        api_key=opened["secret"],
        limits=RateLimits(concurrent=concurrency),
    )
    try:
        yield engine
    finally:
        await engine.aclose()
        with contextlib.suppress(ServiceError):
            await _ask(folder, f"/sessions/{opened['id']}/close", {})
        pool.erase(opened["id"])


async def reply_of(engine: OpenAIEngine, messages: Sequence[Message], **about: Any) -> Completion | None:
    """The reply of a version; None if it refuses the request, such as one that is too long for its window.

    Raises :class:`~clawgym.errors.EngineError` for what another try may not have."""
    try:
        return await engine.complete(list(messages), **about)
    except EngineError as error:
        if error.status is None or error.status >= 500 or error.status in (408, 429):
            raise
        return None


async def _ask(folder: ServiceFolder, path: str, body: dict[str, Any]) -> dict[str, Any]:
    try:
        headers = {"Authorization": f"Bearer {folder.token.read_text('utf-8').strip()}"}
        async with (
            aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(folder.socket))) as client,
            client.post(f"http://localhost{path}", json=body, headers=headers) as answer,
        ):
            found = await answer.json()
            if answer.status != 200:
                raise ServiceError(f"{folder.socket}: {path}: {found['error']['message']}")
            return found
    except (OSError, aiohttp.ClientError, ValueError, KeyError) as error:
        raise ServiceError(f"{folder.path}: the service does not answer ({error}): start it") from error
