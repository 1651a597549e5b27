"""The control API of a running service, for its loops: sessions that are answered by one version.

Invariants: nothing that a loop asks is trained on, and it is deleted from the pool afterwards.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

from clawgym.engines.openai import OpenAIEngine, RateLimits
from clawgym.errors import ServiceError
from clawgym.online.config import ServiceFolder
from clawgym.online.serving import pinned
from clawgym.pool import Pool

__all__ = ["INTERNAL", "VersionSession", "open_version"]

INTERNAL = "internal"
"""The channel of sessions of loops."""


class VersionSession:
    """A session that one version answers."""

    def __init__(self, id: str, secret: str, base_url: str, version: int) -> None:
        self.id, self.secret, self.base_url, self.version = id, secret, base_url, version

    def engine(self, *, concurrency: int = 4) -> OpenAIEngine:
        """An engine of this session. The caller closes it."""
        limits = RateLimits(concurrent=concurrency)
        return OpenAIEngine(f"version-{self.version}", base_url=self.base_url, api_key=self.secret, limits=limits)


@contextlib.asynccontextmanager
async def open_version(folder: ServiceFolder, pool: Pool, version: int) -> AsyncIterator[VersionSession]:
    """Open a session that is answered by ``version``. Its turns are deleted from ``pool`` at the end.

    Raises :class:`~clawgym.errors.ServiceError` if the service does not run."""
    opened = await _ask(folder, "/sessions", {"channel": INTERNAL, "adapter": pinned(version)})
    try:
        yield VersionSession(opened["id"], opened["secret"], opened["base_url"], version)
    finally:
        with contextlib.suppress(ServiceError):
            await _ask(folder, f"/sessions/{opened['id']}/close", {})
        pool.erase(opened["id"])


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
