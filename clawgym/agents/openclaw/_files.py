"""File operations in a task's sandbox, for the tools of its agent. Paths are resolved inside the sandbox."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from clawgym.errors import SandboxError
from clawgym.sandbox.protocol import Sandbox

__all__ = ["FILES", "LARGEST", "Answer"]

Answer = tuple[dict[str, Any], bytes]
"""The JSON header of a response, and the bytes after it."""
Operation = Callable[[Sandbox, dict[str, Any], bytes], Awaitable[Answer]]
"""Carries out a request with this JSON header and body."""
LARGEST = 16 * 2**20
"""Largest file that is read or written, in bytes."""
_WRITE = 'mkdir -p -- "$(dirname -- "$1")" && cat > "$1"'
_SEED = '[ -e "$1" ] || [ -L "$1" ] || { ' + _WRITE + "; }"


async def _read(sandbox: Sandbox, head: dict[str, Any], body: bytes) -> Answer:
    path = head["path"]
    with contextlib.suppress(SandboxError):
        return {}, await sandbox.get(path, max_bytes=LARGEST)
    done = await sandbox.exec(["cat", "--", path], max_output=LARGEST, stdout_only=True)  # a link, or missing
    if done.exit_code or done.omitted_bytes:
        return {"error": done.stderr.decode("utf-8", "replace").strip() or f"{path} is too large"}, b""
    return {}, done.output


async def _stat(sandbox: Sandbox, head: dict[str, Any], body: bytes) -> Answer:
    done = await sandbox.exec(["stat", "-L", "-c", "%F|%s|%Y", "--", head["path"]], stdout_only=True)
    kind, _, rest = done.text.strip().partition("|")
    size, _, modified = rest.partition("|")
    if done.exit_code or not size.isdigit() or not modified.isdigit():
        return {"stat": None}, b""
    sort = "directory" if kind == "directory" else "file" if kind.startswith("regular") else "other"
    return {"stat": {"type": sort, "size": int(size), "mtimeMs": 1000 * int(modified)}}, b""


def _command(
    argv: Callable[[dict[str, Any]], list[str]],
) -> Operation:
    """Make an operation that runs one command with the body of the request as stdin."""

    async def operate(sandbox: Sandbox, head: dict[str, Any], body: bytes) -> Answer:
        done = await sandbox.exec(argv(head), stdin=body)
        return ({"error": done.text.strip() or f"exit code {done.exit_code}"} if done.exit_code else {}), b""

    return operate


FILES: Mapping[str, Operation] = {
    "read": _read,
    "stat": _stat,
    "write": _command(lambda head: ["sh", "-c", _WRITE, "write", head["path"]]),
    "seed": _command(lambda head: ["sh", "-c", _SEED, "seed", head["path"]]),
    "mkdir": _command(lambda head: ["mkdir", "-p", "--", head["path"]]),
    "remove": _command(lambda head: ["rm", "-rf" if head.get("recursive") else "-f", "--", head["path"]]),
    "rename": _command(lambda head: ["mv", "-T", "--", head["path"], head["to"]]),
}
