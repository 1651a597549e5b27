"""A backend that records what a verifier changes in the workspace.

Invariant: recording does not change the grading. The same programs run, and nothing is added to the sandbox.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any, cast

from clawgym.errors import SandboxDied, SandboxError
from clawgym.sandbox.protocol import Archive, Backend, ExecResult, Isolation, Sandbox, SandboxSpec, Snapshot
from clawgym.tars import open_tar

__all__ = ["RecordingBackend", "changes"]


class RecordingBackend:
    """Wraps ``backend``; compares the workspace of each grading sandbox before and after the verifier runs."""

    def __init__(self, backend: Backend, mark: str | None = None) -> None:
        self.name = backend.name
        self._backend = backend
        self._mark = mark
        self.writes: set[str] = set()
        """``added path``, ``changed path`` or ``removed path``, over all gradings so far."""
        self.marks: set[str] = set()
        """Lines of the file ``mark`` (an absolute path in the sandbox), over all gradings so far."""

    async def probe(self) -> Isolation:
        return await self._backend.probe()

    async def create(self, spec: SandboxSpec) -> Sandbox:
        return self._recorded(await self._backend.create(spec), spec)

    async def fork(self, snapshot: Snapshot, spec: SandboxSpec | None = None) -> Sandbox:
        return self._recorded(await self._backend.fork(snapshot, spec), spec)

    async def drop(self, snapshot: Snapshot) -> None:
        await self._backend.drop(snapshot)

    async def aclose(self) -> None:
        """Does nothing: the caller closes the wrapped backend."""

    def _recorded(self, sandbox: Sandbox, spec: SandboxSpec | None) -> Sandbox:
        # Only grading sandboxes have read-only files: those of the verifier.
        if spec is None or not spec.readonly:
            return sandbox
        return cast(Sandbox, _RecordedSandbox(self, sandbox, spec.workdir))

    async def _record(self, sandbox: Sandbox, workspace: str, before: Archive) -> None:
        try:
            self.writes.update(changes(before, await sandbox.get_archive(workspace)))
        except SandboxDied:
            return  # the grading reports it
        except SandboxError as error:
            self.writes.add(f"added more than can be copied out ({error})")
        if self._mark:
            try:
                self.marks.update((await sandbox.get(self._mark)).decode("utf-8", "replace").splitlines())
            except SandboxError:
                pass  # no program wrote to it


class _RecordedSandbox:
    """A sandbox whose workspace is copied before its first program starts, and again when it is closed."""

    def __init__(self, recorder: RecordingBackend, sandbox: Sandbox, workspace: str) -> None:
        self._recorder = recorder
        self._sandbox = sandbox
        self._workspace = workspace
        self._before: Archive | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sandbox, name)

    async def exec(self, argv: Iterable[str], **options: Any) -> ExecResult:
        if self._before is None:
            self._before = await self._sandbox.get_archive(self._workspace)
        return await self._sandbox.exec(argv, **options)

    async def close(self) -> None:
        try:
            if self._before is not None:
                await self._recorder._record(self._sandbox, self._workspace, self._before)
        finally:
            await self._sandbox.close()


def changes(before: Archive, after: Archive) -> set[str]:
    """What differs between two archives of one folder: ``added path``, ``removed path`` or ``changed path``.

    Compares names, types, modes, contents and link targets; not times.
    """
    old, new = _entries(before), _entries(after)
    return {
        *(f"added {name}" for name in new.keys() - old.keys()),
        *(f"removed {name}" for name in old.keys() - new.keys()),
        *(f"changed {name}" for name in old.keys() & new.keys() if old[name] != new[name]),
    }


def _entries(archive: Archive) -> dict[str, tuple[Any, ...]]:
    found: dict[str, tuple[Any, ...]] = {}
    with open_tar(archive.tar) as tar:
        for member in tar:
            content = tar.extractfile(member) if member.isreg() else None
            digest = hashlib.sha256(content.read()).digest() if content is not None else b""
            found[member.name] = (member.type, member.mode, member.linkname, digest)
    # Entries that could not be archived (sockets, links out of the workspace) are compared by name only.
    return found | {entry.partition(": ")[0]: ("dropped",) for entry in archive.dropped}
