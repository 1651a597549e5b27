"""Comparing and rewriting a frozen workspace: plain functions on tar bytes. Standard library only."""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Sequence
from fnmatch import fnmatchcase

from clawgym.records import TaskFile

__all__ = ["changed_inputs", "compose"]

_MTIME = 1577836800


def changed_inputs(tar: bytes, inputs: Sequence[TaskFile], mutable: Sequence[str]) -> tuple[str, ...]:
    """Paths of ``inputs`` that are missing from the workspace or changed in it, less those matching ``mutable``."""
    held: dict[str, str] = {}
    with tarfile.open(fileobj=io.BytesIO(tar)) as source:
        wanted = {f.path for f in inputs}
        for member in source:
            if member.isreg() and member.name in wanted:
                content = source.extractfile(member)
                assert content is not None
                held[member.name] = hashlib.sha256(content.read()).hexdigest()
    return tuple(
        f.path
        for f in inputs
        if held.get(f.path) != f.sha256 and not any(fnmatchcase(f.path, pattern) for pattern in mutable)
    )


def compose(tar: bytes, *, drop: Sequence[str] = (), put: Sequence[TaskFile] = ()) -> bytes:
    """The workspace without the trees in ``drop`` and with the files in ``put`` in place."""
    gone = {*drop, *(f.path for f in put)}
    # A file cannot be put below something that is not a folder.
    parents = {"/".join(f.path.split("/")[:i]) for f in put for i in range(1, f.path.count("/") + 1)}
    buffer = io.BytesIO()
    with (
        tarfile.open(fileobj=io.BytesIO(tar)) as source,
        tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as out,
    ):
        for member in source:
            if any(member.name == g or member.name.startswith(g + "/") for g in gone):
                continue
            if member.name in parents and not member.isdir():
                continue
            out.addfile(member, source.extractfile(member) if member.isreg() else None)
        for file in put:
            data = file.read()
            entry = tarfile.TarInfo(file.path)
            entry.size, entry.mode, entry.mtime = len(data), 0o755 if file.executable else 0o644, _MTIME
            out.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()
