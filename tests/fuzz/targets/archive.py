"""A tar that leaves a sandbox: what is kept of it stays inside, and can be put into another one."""

from __future__ import annotations

import asyncio
import io
import tarfile

from clawgym.errors import SandboxError
from clawgym.sandbox.extract import filter_tar, link_stays_inside
from clawgym.sandbox.link import GuestLink
from clawgym.sandbox.protocol import Archive, SandboxSpec

from ..source import Source, run
from .link import _Stream

READS = ("sandbox.extract", "sandbox.link")


def fuzz(data: bytes) -> None:
    source = Source(data)
    strip = source.pick(("", "a", "a/b"))
    archive = source.tar()
    try:
        kept = filter_tar(archive, strip, 1000, 50)
    except SandboxError:
        pass
    else:
        check_kept(kept, 1000)
        run(_put(kept))


def check_kept(kept: Archive, most: int) -> None:
    """Whether nothing of an archive is, or leads, out of its tree, and its files have at most so many bytes."""
    links: set[str] = set()
    size = 0
    with tarfile.open(fileobj=io.BytesIO(kept.tar)) as tar:
        for member in tar:
            parts = member.name.split("/")
            assert ".." not in parts
            assert not member.name.startswith("/")
            assert not any("/".join(parts[:i]) in links for i in range(1, len(parts)))
            assert member.isreg() or member.isdir() or member.issym()
            assert member.mode <= 0o777
            if member.issym():
                assert link_stays_inside(member.name, member.linkname)
                links.add(member.name)
            size += member.size
    assert size <= most


async def _put(archive: Archive) -> None:
    async def died() -> str:
        return "died"

    stream = _Stream()
    link = GuestLink(stream, SandboxSpec(), died)  # type: ignore[arg-type]
    link.start()
    putting = asyncio.ensure_future(link.put_archive(archive, "/workspace"))
    await asyncio.sleep(0)
    stream.ended()
    try:
        await asyncio.wait_for(putting, 5)
    except SandboxError:
        pass
    await link.end()
