"""Which tasks a training run used for what, read from its run manifest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from clawgym.records.manifest import RunManifest

__all__ = ["DataUse", "data_of"]

_USES = {
    "train": ("training", "training"),
    "demonstrations": ("training (imitation)", "training"),
    "validation": ("choice of the best checkpoint", "validation"),
    "heldout": ("evaluation only", "held-out"),
}
"""Part of a run -> what it is for, and the name of its split."""


@dataclass(frozen=True, slots=True)
class DataUse:
    """Tasks, or a file, that a run used for one thing."""

    use: str
    name: str
    """Of the task set, or of the file."""
    split: str = ""
    tasks: int | None = None
    sha256: str = ""
    """Of the hashes of the tasks."""


def data_of(manifest: RunManifest) -> list[DataUse]:
    """What the run trained on, then what chose its checkpoint, then what it was only evaluated on.

    A manifest without parts gives its task set, without a use.
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
