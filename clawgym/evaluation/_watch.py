"""A backend that looks over the grader's shoulder: what did the verifier change in the workspace?

Invariant: a watched grading runs exactly what an unwatched one runs; nothing is put into the box.
"""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Iterable
from typing import Any, cast

from clawgym.errors import SandboxDied, SandboxError
from clawgym.sandbox.protocol import Archive, Backend, ExecResult, Isolation, Sandbox, SandboxSpec, Snapshot

__all__ = ["WatchedBackend", "changes"]


class WatchedBackend:
    """``backend``, but the workspace of each grading box is compared before and after the verifier ran."""

    def __init__(self, backend: Backend, mark: str | None = None) -> None:
        self.name = backend.name
        self._backend = backend
        self._mark = mark
        self.writes: set[str] = set()
        """``added path``, ``changed path`` or ``removed path``, over all gradings so far."""
        self.marks: set[str] = set()
        """The lines of the file ``mark`` (an absolute path) that gradings left in their boxes."""

    async def probe(self) -> Isolation:
        return await self._backend.probe()

    async def create(self, spec: SandboxSpec) -> Sandbox:
        return self._watched(await self._backend.create(spec), spec)

    async def fork(self, snapshot: Snapshot, spec: SandboxSpec | None = None) -> Sandbox:
        return self._watched(await self._backend.fork(snapshot, spec), spec)

    async def drop(self, snapshot: Snapshot) -> None:
        await self._backend.drop(snapshot)

    async def aclose(self) -> None:
        """Nothing: who made the backend closes it."""

    def _watched(self, box: Sandbox, spec: SandboxSpec | None) -> Sandbox:
        # Only a grading box has read-only files: the verifier's.
        return cast(Sandbox, _WatchedBox(self, box, spec.workdir)) if spec is not None and spec.readonly else box

    async def _look(self, box: Sandbox, workspace: str, before: Archive) -> None:
        try:
            self.writes.update(changes(before, await box.get_archive(workspace)))
        except SandboxDied:
            return  # the grading has said so
        except SandboxError as error:
            self.writes.add(f"added more than can be read back ({error})")
        if self._mark:
            try:
                self.marks.update((await box.get(self._mark)).decode("utf-8", "replace").splitlines())
            except SandboxError:
                pass  # nothing left it


class _WatchedBox:
    """A box whose workspace is taken before its first program starts and when it is closed."""

    def __init__(self, watch: WatchedBackend, box: Sandbox, workspace: str) -> None:
        self._watch = watch
        self._box = box
        self._workspace = workspace
        self._before: Archive | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._box, name)

    async def exec(self, argv: Iterable[str], **options: Any) -> ExecResult:
        if self._before is None:
            self._before = await self._box.get_archive(self._workspace)
        return await self._box.exec(argv, **options)

    async def close(self) -> None:
        try:
            if self._before is not None:
                await self._watch._look(self._box, self._workspace, self._before)
        finally:
            await self._box.close()


def changes(before: Archive, after: Archive) -> set[str]:
    """What differs between two takes of one tree: names, types, modes, contents, link targets; not times."""
    old, new = _entries(before), _entries(after)
    return {
        *(f"added {name}" for name in new.keys() - old.keys()),
        *(f"removed {name}" for name in old.keys() - new.keys()),
        *(f"changed {name}" for name in old.keys() & new.keys() if old[name] != new[name]),
    }


def _entries(archive: Archive) -> dict[str, tuple[Any, ...]]:
    found: dict[str, tuple[Any, ...]] = {}
    with tarfile.open(fileobj=io.BytesIO(archive.tar)) as tar:
        for member in tar:
            content = tar.extractfile(member) if member.isreg() else None
            digest = hashlib.sha256(content.read()).digest() if content is not None else b""
            found[member.name] = (member.type, member.mode, member.linkname, digest)
    # What could not be taken (a socket, a link out) is told by name.
    return found | {entry.partition(": ")[0]: ("dropped",) for entry in archive.dropped}
