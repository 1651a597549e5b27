"""Read tar archives that somebody else made.

Invariants: nothing is unpacked, and no member reads as more bytes than the archive has. Extended headers, which
``tarfile`` reads at once, are bounded.
"""

from __future__ import annotations

import io
import tarfile
from tarfile import HeaderError
from typing import Any, Self

__all__ = ["BoundedTarInfo", "open_tar"]

_MOST_HEADER = 1 << 20
"""Bytes."""
_EXTENDED = (
    *(tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE),
    *(tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK),
)


class BoundedTarInfo(tarfile.TarInfo):
    """A member whose extended headers are bounded."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Any:
        found = super().frombuf(buf, encoding, errors)
        if found.type in _EXTENDED and found.size > _MOST_HEADER:
            raise HeaderError(f"an extended header of {found.size} bytes")
        return found


class _WholeTarInfo(BoundedTarInfo):
    """A member without holes: a few bytes of the archive may say that terabytes of zeros are in a file."""

    @classmethod
    def fromtarfile(cls, tarfile: tarfile.TarFile) -> Self:
        found = super().fromtarfile(tarfile)
        if found.issparse():
            raise HeaderError(f"{found.name[:200]!r} is a sparse file")
        return found


def open_tar(tar: bytes) -> tarfile.TarFile:
    """Open an uncompressed archive.

    Raises :class:`tarfile.TarError`, here or when its members are read, if it is damaged, compressed, or has a sparse
    file or an extended header of more than 1 MiB.
    """
    return tarfile.open(fileobj=io.BytesIO(tar), mode="r:", tarinfo=_WholeTarInfo)
