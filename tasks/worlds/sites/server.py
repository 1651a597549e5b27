"""A web server for one of the apps, over one SQLite file: ``START_FILE SITE_FILE PORT``, on 127.0.0.1.

Invariants: only a form changes anything, in one transaction that is on the disk before its answer goes out, and one
that is refused changes nothing; text reaches SQL only as a parameter and HTML only escaped; whatever a client sends, it
gets an answer or a closed connection, and the next one is served.
"""

from __future__ import annotations

import json
import sqlite3
import sys
import threading
import traceback
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

from ._fields import Fields, Refused
from ._page import Again, App, e, page
from .board import Board
from .forms import Forms
from .mail import Mail
from .settings import Settings
from .shop import Shop
from .table import Table

__all__ = ["APPS", "Reply", "Site", "begin", "main"]

APPS: dict[str, type[App]] = {
    "board": Board,
    "forms": Forms,
    "mail": Mail,
    "settings": Settings,
    "shop": Shop,
    "table": Table,
}
"""Name -> app."""

_FILES = {
    "/style.css": "text/css",
    **dict.fromkeys(("/board.js", "/settings.js", "/shop.js"), "text/javascript"),
}
_MOST_BODY = 64 * 1024
_MOST_CONNECTIONS = 64
_SECONDS = 60
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'self'; form-action 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}


class Reply(NamedTuple):
    """An answer; with ``location``, the browser goes on there."""

    status: int
    body: bytes = b""
    kind: str = "text/html; charset=utf-8"
    location: str = ""


def begin(db: sqlite3.Connection, start: Mapping[str, Any]) -> None:
    """Make the tables of the app that ``start`` names, and fill them from it."""
    app = APPS[start["app"]]
    db.execute("BEGIN IMMEDIATE")
    for table, columns in app.TABLES.items():
        db.execute(f"CREATE TABLE {table} ({columns})")
    for table in app.TABLES:
        for row in start["tables"].get(table, ()):
            db.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(row))})", row)
    db.execute("COMMIT")


class Site:
    """An app with its file at ``path``, which begins as ``start`` where there is none yet."""

    def __init__(self, path: str, start: Mapping[str, Any]) -> None:
        self.db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self.db.row_factory = sqlite3.Row
        self.db.execute("PRAGMA journal_mode = DELETE")
        self.db.execute("PRAGMA synchronous = FULL")
        self.db.execute("PRAGMA foreign_keys = ON")
        if not self.db.execute("SELECT 1 FROM sqlite_master").fetchone():
            begin(self.db, start)
        self.app = APPS[start["app"]](self.db, start)
        self._lock = threading.Lock()
        folder = Path(__file__).parent
        self._files = {path: (folder / path[1:]).read_bytes() for path in _FILES}

    def get(self, path: str, query: str) -> Reply:
        """The answer to a page that is asked for."""
        if path in _FILES:
            return Reply(200, self._files[path], _FILES[path])
        if path == "/favicon.ico":
            return Reply(204)
        return self._answer(self.app.PAGES, path, query, False)

    def post(self, path: str, body: str) -> Reply:
        """The answer to a form."""
        return self._answer(self.app.ACTIONS, path, body, True)

    def _answer(self, methods: Mapping[str, str], path: str, text: str, changing: bool) -> Reply:
        with self._lock:
            try:
                self.db.execute("BEGIN IMMEDIATE" if changing else "BEGIN")
                if path not in methods:
                    raise Refused("There is no such page.", 404)
                fields = Fields(text)
                answer = getattr(self.app, methods[path])(fields)
                fields.done()
                self.db.execute("COMMIT" if changing else "ROLLBACK")
            except Again as again:
                return Reply(422, again.html.encode())
            except Refused as refused:
                return Reply(refused.status, _sorry(str(refused)))
            except Exception:
                traceback.print_exc()
                return Reply(500, _sorry("Something went wrong here."))
            finally:
                if self.db.in_transaction:
                    self.db.execute("ROLLBACK")
        return Reply(303, location=answer) if changing else Reply(200, answer.encode())


def _sorry(message: str) -> bytes:
    body = f'<h1>Sorry</h1><p id="sorry">{e(message)}</p><p><a id="home" href="/">To the start page</a></p>'
    return page("Sorry", body, brand="This page").encode()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "Site", ""
    timeout = _SECONDS
    site: Site

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        self._send(self.site.get(path, query))

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()) or self.headers.get("Transfer-Encoding"):
            self._send(Reply(411, _sorry("The length of the form is missing.")), close=True)
        elif len(length) > 9 or int(length) > _MOST_BODY:
            self._send(Reply(413, _sorry("The form is too large.")), close=True)
        else:
            body = self.rfile.read(int(length))
            kind = self.headers.get_content_type()
            if len(body) < int(length):
                self.close_connection = True
            elif kind != "application/x-www-form-urlencoded":
                self._send(Reply(415, _sorry("This is no form.")))
            else:
                self._send(self.site.post(self.path, body.decode("latin-1")))

    def _send(self, reply: Reply, *, close: bool = False) -> None:
        self.send_response(reply.status)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        if reply.location:
            self.send_header("Location", reply.location)
        if reply.status != 204:
            self.send_header("Content-Type", reply.kind)
            self.send_header("Content-Length", str(len(reply.body)))
        if close:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(reply.body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the log is for what goes wrong."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, port: int, site: Site) -> None:
        self._room = threading.BoundedSemaphore(_MOST_CONNECTIONS)
        super().__init__(("127.0.0.1", port), type("Handler", (_Handler,), {"site": site}))

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):  # a client that went away is nothing to tell of
            traceback.print_exc()


def main(arguments: list[str]) -> None:
    """``START_FILE SITE_FILE PORT``: serve until killed; the port (0: a free one) is printed once it listens."""
    start, path, port = arguments
    try:
        with open(start, encoding="utf-8") as file:
            site = Site(path, json.load(file))
        server = _Server(int(port), site)
    except (OSError, ValueError, KeyError, sqlite3.Error) as error:
        sys.exit(f"the site cannot begin: {error!r}")
    print(server.server_address[1], flush=True)
    server.serve_forever()
