"""Fingerprint what grading depends on besides a task's verifier: ClawGym's grading code and the images' programs.

Invariant: two equal fingerprints mean that the same code ran with the same interpreters. A difference is a possible
reason for another grade, not a proof.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from clawgym import verifiers
from clawgym.errors import ClawGymError
from clawgym.records import Limits, Task
from clawgym.sandbox.protocol import Backend, SandboxSpec

__all__ = ["changes_of_image", "describe_grader"]

# Lists names and sizes of the programs and the Python libraries of an image. Works with busybox and takes 0.1 s.
# Skips byte code, which is written whenever a module is first imported.
_LIST = (
    "for d in /bin /sbin /usr/bin /usr/sbin /usr/local/bin /usr/lib/python3* /usr/local/lib/python3*; do "
    "[ -d $d ] && [ ! -L $d ] && find $d -xdev -type f ! -name '*.pyc' -exec stat -c '%n %s' {} +; done "
    "2>/dev/null | LC_ALL=C sort"
)
# Groups files by Python package, or else by folder.
_PART = re.compile(r"/usr/(local/)?lib/python3[^/]*/(dist|site)-packages/[^/ ]+|/usr/(local/)?lib/[^/]+|(/[^/]+)+(?=/)")
_MAX_LISTING = 16 * 2**20
_MAX_NAMED = 8
"""How many differences a message names."""
_CONCURRENCY = 8


async def describe_grader(tasks: Iterable[Task], backend: Backend) -> dict[str, Any]:
    """Fingerprint the grading code and the images of ``tasks``, JSON-ready.

    Returns ``code``, a digest of ClawGym's grading code; ``images``, image -> fingerprint of its programs; and
    ``contents``, image -> folder -> fingerprint of the files in it, where each Python package counts as a folder.

    Creates one sandbox per image. An image that cannot start, or has no ``find``, is left out.
    """
    slots = asyncio.Semaphore(_CONCURRENCY)

    async def one(image: str) -> bytes | None:
        async with slots:
            return await _listing(image, backend)

    images = sorted({task.sandbox_image for task in tasks if task.unsupported is None})
    listings = zip(images, await asyncio.gather(*map(one, images)), strict=True)
    found = {image: listing for image, listing in listings if listing}
    return {
        "code": _code(),
        "images": {image: _digest(listing) for image, listing in found.items()},
        "contents": {image: _by_folder(listing) for image, listing in found.items()},
    }


def changes_of_image(task: Task, then: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Describe how the image that grades ``task`` changed between ``then`` and ``now``, two results of
    :func:`describe_grader`; None if no change is known."""
    image = task.sandbox_image
    used = image if image in (then.get("images") or {}) else task.image
    digest = (then.get("images") or {}).get(used)
    if digest is None or digest == now["images"].get(image):
        return None
    change = f"image {image} changed"
    if used != image:
        change += f" (it was {used})"
    old, new = (then.get("contents") or {}).get(used), now["contents"].get(image)
    if new is None:
        return f"{change}: the image is missing here"
    if not isinstance(old, Mapping):
        return (
            f"{change}: the run is from a version whose sandboxes saw all of the machine's /usr, with its Python "
            "packages, and did not record them"
        )
    parts = [
        *(f"{folder} was removed" for folder in sorted(old.keys() - new.keys())),
        *(f"{folder} is new" for folder in sorted(new.keys() - old.keys())),
        *(f"{folder} differs" for folder in sorted(old.keys() & new.keys()) if old[folder] != new[folder]),
    ]
    more = f", and {len(parts) - _MAX_NAMED} more" if len(parts) > _MAX_NAMED else ""
    return f"{change}: {', '.join(parts[:_MAX_NAMED])}{more}"


async def _listing(image: str, backend: Backend) -> bytes | None:
    try:
        sandbox = await backend.create(SandboxSpec(image, Limits()))
    except ClawGymError:
        return None
    try:
        done = await sandbox.exec(["sh", "-c", _LIST], cwd="/", max_output=_MAX_LISTING, stdout_only=True)
    except ClawGymError:
        return None
    finally:
        await sandbox.close()
    return done.output if done.output and not done.omitted_bytes else None


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


def _by_folder(listing: bytes) -> dict[str, str]:
    parts: dict[str, list[bytes]] = {}
    for line in listing.splitlines():
        match = _PART.match(line.decode("utf-8", "replace"))
        if match is not None:
            parts.setdefault(match[0], []).append(line)
    return {folder: _digest(b"\n".join(lines))[:16] for folder, lines in parts.items()}


def _code() -> str:
    """A digest of the paths and contents of all Python files below ``verifiers``."""
    folder = Path(verifiers.__file__).parent
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*.py")}
    digest = hashlib.sha256()
    for name in sorted(files):
        if "__pycache__" not in files[name].parts:
            digest.update(name.encode() + b"\0" + files[name].read_bytes() + b"\0")
    return digest.hexdigest()[:32]
