"""Downloads published data sets from the Hugging Face Hub into the cache, by revision."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import platformdirs

from clawgym.errors import DownloadError, MissingDependency, TaskSetNotFound
from clawgym.records import TaskSet
from clawgym.snapshots import Remote, list_files
from clawgym.snapshots import download as fetch
from clawgym.tasks.formats import read
from clawgym.tasks.packed import DATA, unpack

__all__ = ["REFERENCE", "cache_folder", "cached", "download", "packed_set"]

REFERENCE = "hf://"
"""Beginning of the name of a task set that is read from the Hub."""
_MAX_BYTES = 4 * 2**30
_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


def cache_folder(name: str) -> Path:
    """The folder with the downloads of one set, which has one folder per revision."""
    return Path(platformdirs.user_cache_dir("clawgym", appauthor=False)) / "tasksets" / name


def cached(name: str, revision: str | None) -> Path | None:
    """The downloaded file of a set: of ``revision`` (or a prefix of it), or of the latest download. None if there is
    none."""
    found = [path for path in cache_folder(name).glob("*/*.jsonl") if path.parent.name.startswith(revision or "")]
    found = [path for path in found if not path.parent.name.startswith(".")]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def download(name: str, repo: str, filename: str | None, revision: str | None) -> Path:
    """Download a set's JSONL file into the cache and return its path. The name of its folder is the exact revision.

    With ``filename=None`` the repository must have exactly one JSONL file. Raises :class:`MissingDependency` without
    huggingface_hub, and :class:`TaskSetNotFound` if the Hub cannot be reached or does not have the file.
    """
    try:
        from huggingface_hub import HfApi, hf_hub_download
    except ImportError as error:
        raise MissingDependency(
            f"{name} comes from the Hugging Face Hub, which needs huggingface_hub: pip install 'clawgym[hub]'"
        ) from error
    folder = cache_folder(name)
    folder.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".", dir=folder))
    try:
        info = HfApi().dataset_info(repo, revision=revision)
        names = [item.rfilename for item in info.siblings or () if item.rfilename.endswith(".jsonl")]
        if filename is None and len(names) == 1:
            filename = names[0]
        if filename not in names or not info.sha:
            raise TaskSetNotFound(
                f"the Hub data set {repo} has the JSONL files {names}, not exactly one: load it by path"
            )
        hf_hub_download(repo, filename, repo_type="dataset", revision=info.sha, local_dir=scratch / info.sha)
        target = folder / info.sha
        if not target.exists():
            os.rename(scratch / info.sha, target)
        return target / filename
    except TaskSetNotFound:
        raise
    except Exception as error:  # the Hub client raises its own errors, those of its HTTP library, and OSError
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise TaskSetNotFound(
            f"the Hub data set {repo} could not be downloaded ({reason}): check the name and the network, and try again"
        ) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def packed_set(reference: str) -> TaskSet:
    """The set that ``clawgym push tasks`` put into the data set ``hf://OWNER/NAME`` or ``hf://OWNER/NAME@REVISION``.

    It is downloaded into the cache, unless the revision is a commit that is there. Its version is the commit. Raises
    :class:`TaskSetNotFound` if the Hub does not have it, and :class:`~clawgym.errors.TaskError` if it is damaged.
    """
    try:
        remote = Remote.parse(reference)
        root = cache_folder("hub") / remote.repo.replace("/", "--")
        commit = remote.revision or ""
        if not (_COMMIT.fullmatch(commit) and (root / commit).is_dir()):
            snapshot = list_files(remote, lambda path: path == DATA, max_bytes=_MAX_BYTES)
            if not snapshot.files:
                raise DownloadError(f"{remote.repo} has no {DATA}: name a data set that `clawgym push tasks` made")
            commit = snapshot.commit
            with fetch(snapshot, root / commit) as fresh:
                if fresh is not None:
                    shutil.rmtree(fresh / "tasks", ignore_errors=True)
                    unpack(fresh / DATA, fresh / "tasks")
    except DownloadError as error:
        raise TaskSetNotFound(f"{reference}: {error}") from error
    return replace(read(root / commit / "tasks", name=f"{REFERENCE}{remote.repo}", format="clawgym"), version=commit)
