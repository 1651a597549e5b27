"""The page that shows what runs, and the few answers that it is made of.

Invariants: it listens on loopback alone, at a port of the system's choice, and answers nothing to who does not know the
secret in its address, or asks for another host (DNS rebinding). What a task or an agent says reaches it as text only.
"""

from __future__ import annotations

import functools
import hmac
import json
import os
import secrets
import socket
import socketserver
import threading
from http.server import BaseHTTPRequestHandler
from importlib import resources
from typing import Any, Protocol

from clawgym.visible import visible_value

__all__ = ["Page", "Source", "answer"]


class Source(Protocol):
    """Where a page has it from."""

    def all(self) -> list[dict[str, Any]]:
        """What runs now: :meth:`~clawgym.live.registry.Watched.about` of each, and its ``id``."""
        ...

    def picture(self, id: str) -> bytes | None:
        """The newest picture of one of them, as a PNG file; ``None`` if there is none."""
        ...


class _Answers(BaseHTTPRequestHandler):
    """``<prefix>/``: the page; ``<prefix>/all``: JSON; ``<prefix>/picture/<id>``: PNG."""

    timeout = 5

    def __init__(self, source: Source, prefix: str, *args: Any) -> None:
        self._source, self._prefix = source, prefix
        name, port = args[2].server_address if prefix else ("", 0)
        self._host = f"{name}:{port}"
        super().__init__(*args)

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if self._prefix and self.headers.get("Host") != self._host:  # a socket of this user's has no name
            return self._send(421, b"", "text/plain")
        prefix, rest = path[: len(self._prefix)], path[len(self._prefix) :]
        if not hmac.compare_digest(prefix.encode(), self._prefix.encode()):
            return self._send(404, b"", "text/plain")
        if rest == "/":
            return self._page()
        if rest == "/all":
            return self._send(200, json.dumps(visible_value(self._source.all())).encode(), "application/json")
        data = self._source.picture(rest[len("/picture/") :]) if rest.startswith("/picture/") else None
        return self._send(404, b"", "text/plain") if data is None else self._send(200, data, "image/png")

    def _page(self) -> None:
        nonce = secrets.token_urlsafe(12)
        text = resources.files("clawgym.live").joinpath("page.html").read_text("utf-8").replace("NONCE", nonce)
        inside = f"script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; img-src 'self'; connect-src 'self'"
        policy = f"default-src 'none'; {inside}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        self._send(200, text.encode(), "text/html; charset=utf-8", policy)

    def _send(self, status: int, data: bytes, kind: str, policy: str = "default-src 'none'") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Content-Security-Policy", policy)
        self.send_header("Cache-Control", "no-store")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def answer(connection: socket.socket, source: Source) -> None:
    """Answer one request that came by a socket which only this user can reach."""
    _Answers(source, "", connection, ("", 0), None)


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a browser that goes away is no news


class Page:
    """The page, until :meth:`close`. ``url`` has its secret: who knows it sees what runs."""

    def __init__(self, source: Source) -> None:
        self._pid = os.getpid()
        prefix = "/" + secrets.token_urlsafe(24)
        self._server = _Server(("127.0.0.1", 0), functools.partial(_Answers, source, prefix))
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}{prefix}/"
        threading.Thread(target=self._server.serve_forever, name="clawgym-page", daemon=True).start()

    def close(self) -> None:
        """Idempotent."""
        if self._pid == os.getpid():  # else it is the parent's, and its thread is not here
            self._server.shutdown()
        self._server.server_close()
