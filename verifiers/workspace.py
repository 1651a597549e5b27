"""Compare and rewrite a frozen workspace: functions on tar bytes."""

from __future__ import annotations

import hashlib
import io
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase, translate
from functools import cache

from clawgym.records import TaskFile, VerifierSpec
from clawgym.tars import open_tar
from clawgym.verifiers._links import links_into

__all__ = ["OVERLAY", "changed_inputs", "compose", "packed", "submitted", "unprotected", "with_protected"]

_MTIME = 1577836800
OVERLAY = "overlay/"
"""Files of a verifier below this folder are added to the graded workspace, such as tests that the agent must not
see."""
_NEVER = (
    *("__pycache__", "*.pyc", "*.pyo", ".pytest_cache", ".hypothesis", ".mypy_cache", ".ruff_cache", ".cache"),
    *("*.egg-info", "*.dist-info", ".git", ".venv", ".tox", ".nox"),
)
"""Never part of a submission (case-insensitive): caches and metadata that programs write and that other programs
trust."""


def changed_inputs(tar: bytes, inputs: Sequence[TaskFile], mutable: Sequence[str]) -> tuple[str, ...]:
    """Paths of ``inputs`` that are missing or changed in the workspace, without those that match ``mutable``."""
    held: dict[str, str] = {}
    with open_tar(tar) as source:
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
    """The workspace without the trees in ``drop`` and links into them, and with the files in ``put``."""
    gone = {*drop, *(f.path for f in put)}
    links: set[str] = set()
    if drop:
        with open_tar(tar) as source:
            links = links_into({member.name: member.linkname for member in source if member.issym()}, drop)
    # A file can only be added below a folder.
    parents = {"/".join(f.path.split("/")[:i]) for f in put for i in range(1, f.path.count("/") + 1)}
    buffer = io.BytesIO()
    with (
        open_tar(tar) as source,
        tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as out,
    ):
        for member in source:
            if member.name in links or not gone.isdisjoint(_and_above(member.name)):
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


def _and_above(path: str) -> Iterator[str]:
    """``path`` and all folders above it."""
    while path:
        yield path
        path = path.rpartition("/")[0]


def submitted(tar: bytes, spec: VerifierSpec) -> dict[str, TaskFile]:
    """The agent's files by path: regular files outside ``spec.protected``, without caches and links."""
    guarded = _guard(spec)
    files: dict[str, TaskFile] = {}
    with open_tar(tar) as source:
        for member in source:
            if member.isreg() and not guarded(member.name):
                content = source.extractfile(member)
                assert content is not None
                files[member.name] = TaskFile(member.name, content.read(), bool(member.mode & 0o100))
    return files


def unprotected(inputs: Sequence[TaskFile], spec: VerifierSpec) -> dict[str, TaskFile]:
    """The inputs that the agent may change, by path."""
    guarded = _guard(spec)
    return {file.path: file for file in inputs if not guarded(file.path)}


def with_protected(files: Mapping[str, TaskFile], inputs: Sequence[TaskFile], spec: VerifierSpec) -> list[TaskFile]:
    """The graded files: ``files``, the original protected files of ``inputs``, and the verifier's overlay."""
    guarded = _guard(spec)
    put = {file.path: file for file in inputs if guarded(file.path)}
    for file in spec.files:
        if file.path.startswith(OVERLAY):
            path = file.path.removeprefix(OVERLAY)
            put[path] = replace(file, path=path)
    above = {path[:at] for path in put for at, letter in enumerate(path) if letter == "/"}
    return [*(file for path, file in files.items() if path not in above and path not in put), *put.values()]


def _guard(spec: VerifierSpec) -> Callable[[str], bool]:
    """A function that tells whether a path, or a folder above it, is protected, a cache, or in the overlay."""
    overlay = {f.path.removeprefix(OVERLAY) for f in spec.files if f.path.startswith(OVERLAY)}
    protected = re.compile("|".join(map(translate, spec.protected)) or r"(?!)").match
    # Python finds packaging metadata by name, ignoring case.
    never = re.compile("|".join(map(translate, (*_NEVER, *(f"*/{glob}" for glob in _NEVER)))), re.IGNORECASE).match

    @cache
    def folder(path: str) -> bool:
        found = path in overlay or protected(path) is not None or never(path) is not None
        return found or ("/" in path and folder(path.rpartition("/")[0]))

    return folder


def packed(files: Iterable[TaskFile]) -> bytes:
    """A tar of ``files``."""
    empty = io.BytesIO()
    tarfile.open(fileobj=empty, mode="w").close()
    return compose(empty.getvalue(), put=list(files))
