"""What grades, beside the verifier of a task: ClawGym's grading code and the programs of the images.

Invariant: two equal records mean that the same code ran the same interpreters; a difference is a possible reason, never
a proof, that a grading came out otherwise.
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

# Names and sizes of programs and of Python's library, in the image itself: works with busybox, takes 0.1 s. Compiled
# files come and go with use.
_LIST = (
    "for d in /bin /sbin /usr/bin /usr/sbin /usr/local/bin /usr/lib/python3* /usr/local/lib/python3*; do "
    "[ -d $d ] && [ ! -L $d ] && find $d -xdev -type f ! -name '*.pyc' -exec stat -c '%n %s' {} +; done "
    "2>/dev/null | LC_ALL=C sort"
)
# A package of Python's, or else the folder of the list that a file is in.
_PART = re.compile(r"/usr/(local/)?lib/python3[^/]*/(dist|site)-packages/[^/ ]+|/usr/(local/)?lib/[^/]+|(/[^/]+)+(?=/)")
_MOST = 16 * 2**20
_NAMED = 8
"""How many differences are named."""
_AT_ONCE = 8


async def describe_grader(tasks: Iterable[Task], backend: Backend) -> dict[str, Any]:
    """``code``, a digest of ClawGym's grading code; ``images``, image -> fingerprint of its programs; ``contents``,
    image -> folder -> fingerprint of what is below it, with a folder for each Python package.

    One sandbox is made for each image; an image that has none (or no ``find``) is left out.
    """
    turn = asyncio.Semaphore(_AT_ONCE)

    async def one(image: str) -> bytes | None:
        async with turn:
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
    """What is known to differ between the image that graded a task ``then`` and ``now``, two answers of
    :func:`describe_grader`; None if nothing is."""
    image = task.sandbox_image
    used = image if image in (then.get("images") or {}) else task.image
    digest = (then.get("images") or {}).get(used)
    if digest is None or digest == now["images"].get(image):
        return None
    said = f"image {image} changed"
    if used != image:
        said += f" (it was {used})"
    old, new = (then.get("contents") or {}).get(used), now["contents"].get(image)
    if new is None:
        return f"{said}: it is not here"
    if not isinstance(old, Mapping):
        return (
            f"{said}: the run was made when sandboxes showed all of the machine's /usr, with every Python package in "
            "it, and did not record which"
        )
    parts = [
        *(f"{folder} is gone" for folder in sorted(old.keys() - new.keys())),
        *(f"{folder} is new" for folder in sorted(new.keys() - old.keys())),
        *(f"{folder} differs" for folder in sorted(old.keys() & new.keys()) if old[folder] != new[folder]),
    ]
    more = f", and {len(parts) - _NAMED} more" if len(parts) > _NAMED else ""
    return f"{said}: {', '.join(parts[:_NAMED])}{more}"


async def _listing(image: str, backend: Backend) -> bytes | None:
    try:
        box = await backend.create(SandboxSpec(image, Limits()))
    except ClawGymError:
        return None
    try:
        done = await box.exec(["sh", "-c", _LIST], cwd="/", max_output=_MOST, stdout_only=True)
    except ClawGymError:
        return None
    finally:
        await box.close()
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
    """A digest of the Python files of ``verifiers``, subfolders included, with their paths below it."""
    folder = Path(verifiers.__file__).parent
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*.py")}
    digest = hashlib.sha256()
    for name in sorted(files):
        if "__pycache__" not in files[name].parts:
            digest.update(name.encode() + b"\0" + files[name].read_bytes() + b"\0")
    return digest.hexdigest()[:32]
