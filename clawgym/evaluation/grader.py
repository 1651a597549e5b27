"""What grades, beside the verifier of a task: ClawGym's grading code and the programs of the images.

Invariant: two equal records mean that the same code ran the same interpreters; a difference is a possible reason, never
a proof, that a grading came out otherwise.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from clawgym import verifiers
from clawgym.errors import ClawGymError
from clawgym.records import Limits, Task
from clawgym.sandbox.protocol import Backend, SandboxSpec

__all__ = ["describe_grader"]

# Names and sizes of programs and of Python's library, in the image itself: works with busybox, takes 0.1 s. Compiled
# files come and go with use.
_LIST = (
    "for d in /bin /sbin /usr/bin /usr/sbin /usr/local/bin /usr/lib/python3* /usr/local/lib/python3*; do "
    "[ -d $d ] && [ ! -L $d ] && find $d -xdev -type f ! -name '*.pyc' -exec stat -c '%n %s' {} +; done "
    "2>/dev/null | LC_ALL=C sort"
)
_MOST = 16 * 2**20
_AT_ONCE = 8


async def describe_grader(tasks: Iterable[Task], backend: Backend) -> dict[str, Any]:
    """``code``, a digest of ClawGym's grading code, and ``images``, image -> fingerprint of its programs.

    One box is made for each image; an image that has none (or no ``find``) is left out.
    """
    turn = asyncio.Semaphore(_AT_ONCE)

    async def one(image: str) -> tuple[str, str | None]:
        async with turn:
            return image, await _fingerprint(image, backend)

    images = sorted({task.image for task in tasks if task.unsupported is None})
    found = await asyncio.gather(*map(one, images))
    return {"code": _code(), "images": {image: digest for image, digest in found if digest}}


async def _fingerprint(image: str, backend: Backend) -> str | None:
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
    return hashlib.sha256(done.output).hexdigest()[:32] if done.output and not done.omitted_bytes else None


def _code() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(verifiers.__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:32]
