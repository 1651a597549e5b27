"""Checks of every request before its handler: the right host, no foreign web page, no compressed body.

Invariant: a web page in a browser on this machine cannot use a listener, neither by DNS rebinding nor by posting forms.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Awaitable, Callable
from functools import lru_cache
from urllib.parse import urlsplit

from aiohttp import web

__all__ = ["check_request", "is_loopback"]

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def check_request(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Refuse a request with a foreign ``Host`` (421) or ``Origin`` (403), or with a compressed body (415).

    Hosts and origins are checked on TCP listeners without TLS, which are on loopback. Browsers do not open unix
    sockets, and compare the host with the certificate if there is one.
    """
    refused = _refusal(request)
    if refused is None:
        return await handler(request)
    status, message = refused
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
    return web.json_response(
        {"error": error}, status=status, headers={"x-should-retry": "false", "connection": "close"}
    )


def _refusal(request: web.Request) -> tuple[int, str] | None:
    if request.headers.get("Content-Encoding", "identity").strip().lower() not in ("", "identity"):
        return 415, "compressed bodies are not supported: send the request without Content-Encoding"
    sock: socket.socket | None = request.transport and request.transport.get_extra_info("socket")
    if sock is None or sock.family == socket.AF_UNIX or request.secure:
        return None
    own = sock.getsockname()[0]
    if not _is_own_name(request.headers.get("Host", ""), own):
        return 421, "this server is not the requested host: use the base_url that it printed"
    origin = request.headers.get("Origin")
    if origin is not None and not _is_own_name(urlsplit(origin).netloc, own):
        return 403, "web pages of other servers cannot send requests here: use a program"
    return None


@lru_cache(maxsize=256)
def _is_own_name(netloc: str, own: str) -> bool:
    try:
        name = urlsplit(f"//{netloc}").hostname or ""
    except ValueError:
        return False
    return is_loopback(name) or name == own


def is_loopback(host: str) -> bool:
    """Whether ``host`` is a name or an address of loopback."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
