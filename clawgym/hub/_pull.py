"""Pull what was pushed: a checkpoint, results, a task set or traces. The repository is untrusted.

Invariants: only the files that the kind needs are downloaded, never a pickle, a page or a card. A pulled folder was
checked: a checkpoint is whole, results are consistent with their files, tasks have the hashes that they name.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from clawgym import snapshots
from clawgym.errors import DownloadError, TaskError
from clawgym.hub import _model, _results, _tasks, _traces
from clawgym.hub._checkpoint import HubError
from clawgym.hub._upload import Upload
from clawgym.snapshots import Remote, RemoteFiles
from clawgym.tasks.packed import unpack

__all__ = ["PULLABLE", "Pulled", "plan_pull", "pull"]

PullKind = Literal["checkpoint", "results", "tasks", "traces"]
_CUSTOM_CODE = re.compile(rb'"auto_map"\s*:')


@dataclass(frozen=True)
class _Kind:
    repo: Literal["model", "dataset"]
    wanted: re.Pattern[str]
    finish: Callable[[Path], list[str]]
    """Checks the downloaded files, makes the folder usable and returns notes."""


@dataclass(frozen=True)
class Pulled:
    """The result of a pull."""

    folder: Path
    commit: str
    files: int
    size: int
    """Bytes that the files have."""
    notes: tuple[str, ...]
    """Notes for the user."""


def _finish_model(folder: Path) -> list[str]:
    uploads = [Upload(path.name, path) for path in sorted(folder.iterdir()) if path.is_file()]
    _model.check_weights(uploads, folder)
    notes = []
    for upload in uploads:
        if upload.path.endswith("config.json") and _CUSTOM_CODE.search(upload.read()):
            notes.append(f"{upload.path} names code of the repository, which is not here and is not run")
    adapter = "adapter_config.json" in {upload.path for upload in uploads}
    if adapter:
        notes.append("it is an adapter: its base model is loaded by the name in adapter_config.json")
    elif "config.json" not in {upload.path for upload in uploads}:
        raise HubError(f"{folder}: no config.json in it: choose another checkpoint")
    return [*notes, "`--model FOLDER` evaluates it"]


def _finish_tasks(folder: Path) -> list[str]:
    shutil.rmtree(folder / "tasks", ignore_errors=True)  # of an interrupted call
    tasks = unpack(folder / _tasks.DATA, folder / "tasks")
    return [f"{len(tasks)} tasks with the content hash {tasks.content_hash}; evaluate FOLDER/tasks"]


PULLABLE: dict[PullKind, _Kind] = {
    "checkpoint": _Kind("model", _model.PULLED, _finish_model),
    "results": _Kind("dataset", _results.PULLED, _results.finish_results),
    "tasks": _Kind("dataset", _tasks.PULLED, _finish_tasks),
    "traces": _Kind("dataset", _traces.PULLED, _traces.finish_traces),
}
"""What can be pulled, by the word of the command."""


def plan_pull(kind: PullKind, repo: str, revision: str | None = None, *, max_bytes: int) -> RemoteFiles:
    """The files that would be pulled.

    Args:
        kind: what the repository holds.
        repo: ``OWNER/NAME``, ``OWNER/NAME@REVISION`` or ``hf://...``.
        revision: a branch, a tag or a commit; by default the one in ``repo``, or the main branch.
        max_bytes: most bytes of all files together.

    Raises:
        DownloadError: the Hub does not have it, or its files are too many, too large or of names that are not allowed.
    """
    about = PULLABLE[kind]
    remote = Remote.parse(repo, about.repo)
    if revision is not None:
        remote = Remote.parse(f"{remote.repo}@{revision}", about.repo)
    found = snapshots.list_files(remote, lambda path: bool(about.wanted.fullmatch(path)), max_bytes=max_bytes)
    if not found.files:
        raise DownloadError(f"{remote.repo} has no {kind} of `clawgym push {kind}`: check the name")
    return found


def pull(kind: PullKind, files: RemoteFiles, folder: Path) -> Pulled:
    """Download ``files`` into the new folder ``folder`` and check them. The same call resumes.

    Raises:
        DownloadError: a file is not the listed one, or ``folder`` is something else.
        HubError: what was pulled is damaged. It stays in a hidden folder beside ``folder``.
    """
    notes: list[str] = ["it was here already"]
    with snapshots.download(files, folder) as fresh:
        if fresh is not None:
            try:
                notes = PULLABLE[kind].finish(fresh)
            except TaskError as error:
                raise HubError(f"{files.remote.repo}: {error}") from error
    return Pulled(folder, files.commit, len(files.files), files.size, tuple(notes))
