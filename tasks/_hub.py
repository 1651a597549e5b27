"""Published data sets from the Hugging Face Hub, into the cache: whole files, by revision."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import platformdirs

from clawgym.errors import MissingDependency, TaskSetNotFound

__all__ = ["cache_folder", "cached", "download"]


def cache_folder(name: str) -> Path:
    """Where the downloads of one set are kept, one folder per revision."""
    return Path(platformdirs.user_cache_dir("clawgym", appauthor=False)) / "tasksets" / name


def cached(name: str, revision: str | None) -> Path | None:
    """The downloaded file of a set: of ``revision`` (or a prefix of it), else of the latest download."""
    found = [path for path in cache_folder(name).glob("*/*.jsonl") if path.parent.name.startswith(revision or "")]
    found = [path for path in found if not path.parent.name.startswith(".")]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def download(name: str, repo: str, filename: str | None, revision: str | None) -> Path:
    """Download a set's JSONL file into the cache and return its path; its folder's name is the exact revision.

    ``filename`` ``None`` takes the repository's only JSONL file. Raises :class:`MissingDependency` without
    huggingface_hub, :class:`TaskSetNotFound` if the Hub cannot be reached or does not have it.
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
            raise TaskSetNotFound(f"the Hub data set {repo} has not one JSONL file but {names}: load it by hand")
        hf_hub_download(repo, filename, repo_type="dataset", revision=info.sha, local_dir=scratch / info.sha)
        target = folder / info.sha
        if not target.exists():
            os.rename(scratch / info.sha, target)
        return target / filename
    except TaskSetNotFound:
        raise
    except Exception as error:  # the Hub client raises its own, its HTTP library's and OSError alike
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise TaskSetNotFound(f"the Hub data set {repo} could not be had ({reason})") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
