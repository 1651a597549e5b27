"""Which tasks a training run used for what, read from its run manifest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from clawgym.records.manifest import RunManifest

__all__ = ["DataUse", "data_uses"]

_USES = {
    "train": ("training", "training"),
    "demonstrations": ("training (imitation)", "training"),
    "validation": ("choice of the best checkpoint", "validation"),
    "heldout": ("evaluation only", "held-out"),
}
"""Key of a split in a run manifest -> its use, and the name of the split."""


@dataclass(frozen=True, slots=True)
class DataUse:
    """Tasks, or a file, that a run used for one purpose."""

    use: str
    name: str
    """The name of the task set, or of the file."""
    split: str = ""
    tasks: int | None = None
    """The number of tasks."""
    sha256: str = ""
    """SHA-256 over the hashes of the tasks."""


def data_uses(manifest: RunManifest) -> list[DataUse]:
    """The data of a run: training data, then the validation split, then the held-out split.

    For a manifest without splits: its task set, without a use.
    """
    config = manifest.config
    parts, task_set = _mapping(config.get("parts")), str(_mapping(config.get("tasks")).get("set", ""))
    if not parts:
        about = manifest.task_set
        size = about.get("size", len(manifest.tasks))
        return [DataUse("", str(about.get("name", "")), "", size, str(about.get("hash", "")))] if about else []
    sft = config.get("method") == "sft"
    imitates = sft or bool(_mapping(config.get("algorithm")).get("imitation"))
    file = _mapping(config.get("sft")).get("data") if imitates else None
    used = {"train": not sft, "demonstrations": imitates and file is None, "validation": True, "heldout": True}
    found = [DataUse("training (imitation)", PurePath(str(file)).name)] if file else []
    for name, (use, split) in _USES.items():
        about = _mapping(parts.get(name))
        if used[name] and about:
            found.append(DataUse(use, task_set, split, about.get("tasks"), str(about.get("sha256", ""))))
    return found


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
