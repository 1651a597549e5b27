"""The HTTP server of ``clawgym view``.

Invariants:

- It listens on loopback only, at a port chosen by the system. Each start has a new secret. The first address carries
  it; then a cookie does, which other sites cannot send (``SameSite=Strict``) and scripts cannot read.
- A request with another Host (DNS rebinding) or without the secret gets nothing. Nothing is changed, unless ``write``
  is set: then two changes of an online service, and only for requests from the page itself.
- What is shown comes from agents and downloads: it is sent as JSON, or as pictures of a fixed type, never as markup.
  The page can load nothing else (Content-Security-Policy).
"""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from aiohttp import web

from clawgym.errors import ClawGymError
from clawgym.records import Image
from clawgym.reporting.page import asset, shell, to_json
from clawgym.viewer.answers import Answers, Export, Unanswered
from clawgym.viewer.catalog import Catalog

__all__ = ["Viewer", "open_viewer"]

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_THREADS = 8
_LARGEST_BODY = 4096
_PING_SECONDS = 15.0
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True)
class Viewer:
    """A server that runs."""

    origin: str
    url: str
    """Contains the secret: whoever knows it sees everything."""
    catalog: Catalog


@asynccontextmanager
async def open_viewer(paths: Iterable[str | Path], *, write: bool = False) -> AsyncIterator[Viewer]:
    """Show what is below ``paths``, until the context ends. ``write``: allow to promote and roll back versions."""
    catalog = Catalog([Path(path) for path in paths])
    server = _Server(Answers(catalog, write), catalog, write)
    runner = web.AppRunner(server.application(), access_log=None, handle_signals=False, shutdown_timeout=1.0)
    await runner.setup()
    sock = socket.create_server(("127.0.0.1", 0))
    try:
        port = sock.getsockname()[1]
        server.listen_at(f"127.0.0.1:{port}")
        async with catalog.running():
            await web.SockSite(runner, sock).start()
            try:
                yield Viewer(f"http://127.0.0.1:{port}", server.url, catalog)
            finally:
                server.stopping.set()
                await runner.cleanup()
    finally:
        sock.close()
        server.close()


class _Server:
    def __init__(self, answers: Answers, catalog: Catalog, write: bool) -> None:
        self._answers = answers
        self._catalog = catalog
        self._write = write
        self._secret = secrets.token_urlsafe(24)
        self._host = self._cookie = ""
        self._threads = ThreadPoolExecutor(_THREADS, "clawgym-viewer")
        self.stopping = asyncio.Event()

    @property
    def url(self) -> str:
        return f"http://{self._host}/{self._secret}/"

    def listen_at(self, host: str) -> None:
        """Set the only host that requests may name."""
        self._host = host
        self._cookie = f"clawgym_{host.rpartition(':')[2]}"  # cookies are shared by all ports

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def application(self) -> web.Application:
        application = web.Application(middlewares=[self._guard], client_max_size=_LARGEST_BODY)
        application.router.add_get("/api/events", self._events)
        application.router.add_get("/api/live/{stem}/{number}/{version}", self._live_picture)
        application.router.add_get("/api/{address:.*}", self._answer)
        application.router.add_post("/api/online/{id}/{change:promote|rollback}", self._change)
        application.router.add_get("/{path:.*}", self._page)
        return application

    @web.middleware
    async def _guard(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Check a request before its handler, and add the headers to every answer."""
        try:
            answer = self._refusal(request) or await handler(request)
        except web.HTTPException as error:
            answer = _failure(error.status, f"{error.reason}: see web/src/api.ts for the addresses")
        if not answer.prepared:
            answer.headers.update(_HEADERS)
        return answer

    def _refusal(self, request: web.Request) -> web.Response | None:
        if request.headers.get("Host") != self._host:
            return _failure(421, "this server is not the requested host: open the address that clawgym view printed")
        first, _, rest = request.path.removeprefix("/").partition("/")
        if request.method == "GET" and self._is_secret(first):
            where = quote(rest.lstrip("/\\"), safe="/") + (f"?{request.query_string}" if request.query_string else "")
            answer = web.Response(status=303, headers={"Location": f"/{where}"})
            answer.set_cookie(self._cookie, self._secret, httponly=True, samesite="Strict", path="/")
            return answer
        if not self._is_secret(request.cookies.get(self._cookie, "")):
            return _failure(403, "the secret is missing: open the address that clawgym view printed")
        if request.method not in ("GET", "HEAD") and request.headers.get("Origin") != f"http://{self._host}":
            return _failure(403, "only the page of this server may change something: use the page")
        return None

    def _is_secret(self, given: str) -> bool:
        return hmac.compare_digest(given.encode("utf-8", "replace"), self._secret.encode())

    # ----------------------------------------------------------------------------------------------------- handlers

    async def _page(self, request: web.Request) -> web.Response:
        files = {"/app.js": "text/javascript", "/app.css": "text/css"}
        if request.path not in files:
            return web.Response(text=shell(), content_type="text/html", charset="utf-8")
        try:
            text = await self._in_thread(lambda: asset(request.path[1:]))
        except FileNotFoundError:
            return _failure(404, f"{request.path[1:]} is not built: run make web")
        return web.Response(text=text, content_type=files[request.path], charset="utf-8")

    async def _answer(self, request: web.Request) -> web.Response:
        return await self._answered(lambda: self._answers.of(request.match_info["address"], request.query))

    async def _live_picture(self, request: web.Request) -> web.Response:
        named = request.match_info

        def picture() -> Image:
            data = self._answers.live_picture(named["stem"], named["number"])
            if data is None:
                raise Unanswered(404, "there is no picture: its sandbox has ended")
            return Image("", data)

        return await self._answered(picture)

    async def _change(self, request: web.Request) -> web.Response:
        if not self._write:
            return _failure(403, "this viewer only reads: start it with clawgym view --write")
        try:
            given = json.loads(await request.read())
            version = given["version"]
            if not (isinstance(version, int) and not isinstance(version, bool)) and version is not None:
                raise ValueError("version is no number")
        except (ValueError, KeyError, TypeError, RecursionError):
            return _failure(400, 'the body is not {"version": number}: use the page')
        id, change = request.match_info["id"], request.match_info["change"]

        def work() -> Any:
            from clawgym.viewer import services

            source = self._catalog.get(id, "online")
            if source is None:
                raise Unanswered(404, f"{id[:100]}: there is no such service: choose one of the list")
            if change == "rollback":
                services.roll_back(source.path, version)
            elif version is None:
                raise Unanswered(400, "promote needs a version: choose a candidate")
            else:
                services.promote(source.path, version)
            return self._answers.of(f"online/{id}", {})

        return await self._answered(work)

    async def _answered(self, work: Callable[[], Any]) -> web.Response:
        """The response for what ``work`` gives, which is run in a thread."""

        def made() -> web.Response:
            try:
                answer = work()
            except Unanswered as error:
                return _failure(error.status, str(error))
            except (ClawGymError, OSError) as error:
                return _failure(404, str(error))
            if isinstance(answer, Image):
                return web.Response(body=answer.data, content_type=answer.media_type)
            if isinstance(answer, Export):
                download = {"Content-Disposition": f'attachment; filename="{answer.name}"'}
                return web.Response(text=answer.text, content_type=answer.type, charset="utf-8", headers=download)
            return web.Response(text=to_json(answer), content_type="application/json")

        return await self._in_thread(made)

    async def _in_thread(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def _events(self, request: web.Request) -> web.StreamResponse:
        """Server-sent events, until the client or the server ends."""
        answer = web.StreamResponse(headers=_HEADERS | {"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        stopped = asyncio.ensure_future(self.stopping.wait())
        with self._catalog.subscribed() as queue, suppress(ConnectionError):
            await answer.write(b": connected\n\n")
            while not stopped.done():
                got = asyncio.ensure_future(queue.get())
                await asyncio.wait([got, stopped], timeout=_PING_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                if got.done():
                    await answer.write(f"data: {to_json(got.result())}\n\n".encode())
                else:
                    got.cancel()
                    await answer.write(b": still there\n\n")
        stopped.cancel()
        return answer


def _failure(status: int, message: str) -> web.Response:
    return web.Response(status=status, text=to_json({"error": message[:2_000]}), content_type="application/json")
