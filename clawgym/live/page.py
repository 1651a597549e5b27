"""The page of the live view, and its HTTP server.

Invariants: it listens on loopback only, at a port chosen by the system. It refuses requests without the secret in its
URL, or with another Host header (DNS rebinding). Texts from tasks and agents are shown as plain text only.
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

__all__ = ["Page", "PageSource", "answer"]


class PageSource(Protocol):
    """Provides the data of a page."""

    def all(self) -> list[dict[str, Any]]:
        """What runs now: the result of :meth:`~clawgym.live.registry.Watched.about` for each, plus its ``id``."""
        ...

    def picture(self, id: str) -> bytes | None:
        """The latest screenshot of the entry with this id, as a PNG file; None if there is none."""
        ...


class _Answers(BaseHTTPRequestHandler):
    """``<prefix>/``: the page; ``<prefix>/all``: JSON; ``<prefix>/picture/<id>``: PNG."""

    timeout = 5

    def __init__(self, source: PageSource, prefix: str, *args: Any) -> None:
        self._source, self._prefix = source, prefix
        name, port = args[2].server_address if prefix else ("", 0)
        self._host = f"{name}:{port}"
        super().__init__(*args)

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if self._prefix and self.headers.get("Host") != self._host:  # requests over the user's unix socket have no host
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


def answer(connection: socket.socket, source: PageSource) -> None:
    """Answer one request from the unix socket that only this user can reach."""
    _Answers(source, "", connection, ("", 0), None)


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a browser that disconnects is not an error


class Page:
    """Serves the page until :meth:`close`. ``url`` contains the secret: whoever knows it sees what runs."""

    def __init__(self, source: PageSource) -> None:
        self._pid = os.getpid()
        prefix = "/" + secrets.token_urlsafe(24)
        self._server = _Server(("127.0.0.1", 0), functools.partial(_Answers, source, prefix))
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}{prefix}/"
        threading.Thread(target=self._server.serve_forever, name="clawgym-page", daemon=True).start()

    def close(self) -> None:
        """Stop the server. Idempotent."""
        if self._pid == os.getpid():  # in a forked child the thread does not exist
            self._server.shutdown()
        self._server.server_close()
