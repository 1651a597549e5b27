"""What every request has to be before anything else is looked at: for this server, from no web page, not compressed.

Invariant: a web page in its user's browser reaches no listener here, whatever name it makes resolve to loopback (DNS
rebinding) and whatever form it posts.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

from aiohttp import web

__all__ = ["door", "is_loopback"]

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def door(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Refuse a request with a foreign ``Host`` (421) or ``Origin`` (403), or with a compressed body (415).

    Names are checked on plain TCP listeners, which are loopback. A browser opens no unix socket, and where there is a
    certificate it compares the name with that itself.
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
        return 415, "compressed bodies are not taken: send the request without Content-Encoding"
    sock: socket.socket | None = request.transport and request.transport.get_extra_info("socket")
    if sock is None or sock.family == socket.AF_UNIX or request.secure:
        return None
    own = sock.getsockname()[0]
    if not _is_ours(request.headers.get("Host", ""), own):
        return 421, "this server is not the host that was asked for: use the base_url that it printed"
    origin = request.headers.get("Origin")
    if origin is not None and not _is_ours(urlsplit(origin).netloc, own):
        return 403, "web pages of other servers may not ask here: use a program"
    return None


def _is_ours(netloc: str, own: str) -> bool:
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
