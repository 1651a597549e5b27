"""Start a sandbox through the supervisor, for the backends whose sandboxes are its child processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from typing import Any

from clawgym.errors import InfraError
from clawgym.sandbox.linux.supervised import Supervised

__all__ = ["launch"]


async def launch(
    supervised: Supervised, lease: str, plan: dict[str, Any], blob: int | None = None, gifts: int = 0
) -> tuple[socket.socket, list[int]]:
    """Start a sandbox as ``plan`` describes, and wait for its hello.

    Args:
        supervised: the supervisor.
        lease: id of the new sandbox.
        plan: what process 1 does; JSON.
        blob: a descriptor to pass on, closed here.
        gifts: how many descriptors process 1 sends back.

    Returns:
        The control socket, and the descriptors from process 1.

    Raises:
        InfraError: the sandbox did not start; nothing of it is left.
    """
    ours, theirs = socket.socketpair()
    errors_r, errors_w = os.pipe()
    handed = [theirs.fileno(), errors_w, *([] if blob is None else [blob])]
    fds: list[int] = []
    try:
        ours.setblocking(False)
        try:
            answer = await supervised.post("spawn", lease, handed, plan=plan)
        finally:
            theirs.close()
            for fd in handed[1:]:
                os.close(fd)
        hello, fds = await _hello(ours)
        await answer
        if plan["guest"]["nonce"].encode() not in hello or len(fds) != gifts:
            os.set_blocking(errors_r, False)
            why = b""
            with contextlib.suppress(BlockingIOError):
                why = os.read(errors_r, 4096)
            text = why.decode(errors="replace").strip() or "no message"
            raise InfraError(f"a sandbox could not be started ({text}): run `clawgym doctor`")
    except BaseException:
        ours.close()
        for fd in fds:
            os.close(fd)
        with contextlib.suppress(InfraError):
            await asyncio.shield(asyncio.ensure_future(supervised.ask("kill", lease)))
        raise
    finally:
        os.close(errors_r)
    return ours, fds


async def _hello(sock: socket.socket) -> tuple[bytes, list[int]]:
    """The guest's first frame, with its descriptors; b'' if it died before."""
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    loop.add_reader(sock.fileno(), lambda: ready.done() or ready.set_result(None))
    try:
        async with asyncio.timeout(30):
            await ready
    except TimeoutError:
        raise InfraError("a sandbox did not start within 30 s: the host is overloaded; lower --concurrency") from None
    finally:
        loop.remove_reader(sock.fileno())
    try:
        data, fds, _, _ = socket.recv_fds(sock, 4096, 4)
    except OSError:
        return b"", []
    return data, list(fds)
