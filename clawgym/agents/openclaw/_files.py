"""Files of a task's box, for the tools of its agent. Paths are the box's, followed as its programs follow them."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from clawgym.errors import SandboxError
from clawgym.sandbox.protocol import Sandbox

__all__ = ["FILES", "LARGEST", "Answer"]

Answer = tuple[dict[str, Any], bytes]
"""What is said of a request, and the bytes asked for."""
Operation = Callable[[Sandbox, dict[str, Any], bytes], Awaitable[Answer]]
"""Does what a request's head says, with the bytes after it."""
LARGEST = 16 * 2**20
"""Bytes of one file, read or written."""
_WRITE = 'mkdir -p -- "$(dirname -- "$1")" && cat > "$1"'
_SEED = '[ -e "$1" ] || [ -L "$1" ] || { ' + _WRITE + "; }"


async def _read(box: Sandbox, head: dict[str, Any], body: bytes) -> Answer:
    path = head["path"]
    with contextlib.suppress(SandboxError):
        return {}, await box.get(path, max_bytes=LARGEST)
    done = await box.exec(["cat", "--", path], max_output=LARGEST, stdout_only=True)  # a link, or nothing
    if done.exit_code or done.omitted_bytes:
        return {"error": done.stderr.decode("utf-8", "replace").strip() or f"{path} is too large"}, b""
    return {}, done.output


async def _stat(box: Sandbox, head: dict[str, Any], body: bytes) -> Answer:
    done = await box.exec(["stat", "-L", "-c", "%F|%s|%Y", "--", head["path"]], stdout_only=True)
    kind, _, rest = done.text.strip().partition("|")
    size, _, modified = rest.partition("|")
    if done.exit_code or not size.isdigit() or not modified.isdigit():
        return {"stat": None}, b""
    sort = "directory" if kind == "directory" else "file" if kind.startswith("regular") else "other"
    return {"stat": {"type": sort, "size": int(size), "mtimeMs": 1000 * int(modified)}}, b""


def _doing(
    argv: Callable[[dict[str, Any]], list[str]],
) -> Operation:
    """An operation that is one command, with the request's bytes as its input."""

    async def operate(box: Sandbox, head: dict[str, Any], body: bytes) -> Answer:
        done = await box.exec(argv(head), stdin=body)
        return ({"error": done.text.strip() or f"exit code {done.exit_code}"} if done.exit_code else {}), b""

    return operate


FILES: Mapping[str, Operation] = {
    "read": _read,
    "stat": _stat,
    "write": _doing(lambda head: ["sh", "-c", _WRITE, "write", head["path"]]),
    "seed": _doing(lambda head: ["sh", "-c", _SEED, "seed", head["path"]]),
    "mkdir": _doing(lambda head: ["mkdir", "-p", "--", head["path"]]),
    "remove": _doing(lambda head: ["rm", "-rf" if head.get("recursive") else "-f", "--", head["path"]]),
    "rename": _doing(lambda head: ["mv", "-T", "--", head["path"], head["to"]]),
}
