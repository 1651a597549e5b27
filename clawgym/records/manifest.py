"""The run manifest: what a result pins.

Invariants: no secret and no host path goes into a run manifest; two runs whose :attr:`RunManifest.identity` is equal
measure the same thing.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from clawgym.errors import RunFolderError
from clawgym.records import TaskSet
from clawgym.records.atif import json_safe

__all__ = ["RunManifest", "differences", "library_version", "make_manifest", "now"]

_SECRET_KEY = re.compile(r"api_?key|secret|password|authorization|credential|(^|_)token$", re.IGNORECASE)
_SECRET_VALUE = re.compile(r"\b(sk|hf|ghp|xox[bp])[-_][\w-]{12,}|Bearer\s+\S+|(?<=://)[^/\s@]+@")
_FOLDERS = re.compile(r"(?<![\w.:/])/(?:[^\s/:'\"]+/)+")
"""The folders of an absolute path."""


def now() -> str:
    """The time as ISO 8601 in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _scrub(value: Any, key: str = "") -> Any:
    """Take out what looks like a secret, and this user's home and working folder."""
    if isinstance(value, Mapping):
        return {str(k): _scrub(v, str(k)) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_scrub(v, key) for v in value]
    if isinstance(value, Path):
        return value.name
    if isinstance(value, str):
        if value and _SECRET_KEY.search(key):
            return "[removed]"
        value = _SECRET_VALUE.sub("[removed]", value)
        for folder in {os.getcwd(), str(Path.home())} - {"/", "/root"}:
            value = value.replace(folder, "[path]")
    return value


@dataclass(frozen=True)
class RunManifest:
    """What a result pins. :attr:`identity` is what a resumed run must share."""

    kind: str
    """``eval``, ``train`` or ``serve``."""
    task_set: Mapping[str, Any] = field(default_factory=dict)
    """``name``, ``version``, ``hash``, ``size``, ``problems``."""
    tasks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By task id: ``hash``, ``verifier``, ``mode``, and where known ``category``, ``level``,
    ``executes_agent_code``, ``judged_by``, ``floor``, ``unsupported``."""
    agent: Mapping[str, Any] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    samples: int = 1
    config: Mapping[str, Any] = field(default_factory=dict)
    """Settings that change results (grading among them); part of the identity."""
    isolation: Mapping[str, Any] = field(default_factory=dict)
    """As probed; its ``backend`` and ``tier`` are part of the identity."""
    platform: Mapping[str, Any] = field(default_factory=dict)
    library: str = ""
    grader: Mapping[str, Any] = field(default_factory=dict)
    """What graded, for :func:`~clawgym.evaluation.verify`: ``code``, the digest of ClawGym's grading code, and
    ``images``, image -> fingerprint of its programs, and ``contents``, what these are made of. Not part of the
    identity."""
    created: str = ""
    resumed: tuple[Mapping[str, Any], ...] = ()
    """Later openings: ``created``, ``library``, ``grader``, ``platform`` of each."""

    @property
    def label(self) -> str:
        """Agent, and model if there is one."""
        model = str(self.engine.get("model") or self.agent.get("model") or "")
        agent = str(self.agent.get("name") or "unknown")
        return f"{agent} · {model}" if model else agent

    @property
    def identity(self) -> dict[str, Any]:
        """The fields that must not change within one run folder. An evaluation may get more samples later, so theirs
        is not among them."""
        return json_safe(
            {
                "kind": self.kind,
                "task_set": {"hash": self.task_set.get("hash")},
                "tasks": self.tasks,
                "agent": self.agent,
                "engine": self.engine,
                "sampling": self.sampling,
                "seed": self.seed,
                "samples": None if self.kind == "eval" else self.samples,
                "config": self.config,
                "isolation": {key: self.isolation.get(key) for key in ("backend", "tier")},
            }
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, scrubbed of secrets and host paths."""
        return json_safe(_scrub({f.name: getattr(self, f.name) for f in dataclasses.fields(self)}))

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Self:
        """Unknown fields (of a newer version) are ignored. Raises :class:`RunFolderError` if it is none."""
        if not isinstance(raw, Mapping) or "kind" not in raw:
            raise RunFolderError("this receipt.json is not a ClawGym run manifest: give a run folder")
        names = {f.name for f in dataclasses.fields(cls)}
        fields: dict[str, Any] = {key: value for key, value in raw.items() if key in names}
        fields["resumed"] = tuple(fields.get("resumed", ()))
        return cls(**fields)


def make_manifest(
    kind: str,
    task_set: TaskSet | None = None,
    *,
    agent: Mapping[str, Any] | None = None,
    seed: int = 0,
    samples: int = 1,
    config: Mapping[str, Any] | None = None,
    isolation: Mapping[str, Any] | None = None,
    baselines: Mapping[str, float] | None = None,
    grader: Mapping[str, Any] | None = None,
    judged: Mapping[str, str] | None = None,
) -> RunManifest:
    """A run manifest for a run that starts now. ``engine`` and ``sampling`` are taken out of the agent's run manifest.

    ``floors``: the cheap-policy score of each task (by id) that the corrected scores are measured from. ``judged``: by
    task id, the grader and its model where a model gives the scores.
    """
    agent = dict(agent or {})
    engine, sampling = agent.pop("engine", None) or {}, agent.pop("sampling", None) or {}
    if isinstance(engine, Mapping) and not sampling:
        engine = dict(engine)
        sampling = engine.pop("sampling", None) or {}
    tasks: dict[str, Mapping[str, Any]] = {}
    for task in task_set.tasks if task_set is not None else ():
        entry = {
            "hash": task.content_hash,
            "verifier": task.verifier.digest,
            "mode": str(task.verifier.mode),
            "category": task.metadata.get("category") or None,
            "level": task.metadata.get("level") or task.metadata.get("difficulty") or None,
            "executes_agent_code": task.verifier.executes_agent_code,
            "judged_by": (judged or {}).get(task.id) or None,
            "floor": (baselines or {}).get(task.id),
            "unsupported": task.unsupported and _FOLDERS.sub("", task.unsupported),
        }
        tasks[task.id] = {key: value for key, value in entry.items() if value is not None}
    about: dict[str, Any] = {}
    if task_set is not None:  # an empty set is falsy
        about = {
            "name": task_set.name,
            "version": task_set.version,
            "hash": task_set.content_hash,
            "size": len(task_set),
            "problems": {_FOLDERS.sub("", k): _FOLDERS.sub("", v) for k, v in task_set.problems.items()},
        }
    return RunManifest(
        kind=kind,
        task_set=about,
        tasks=tasks,
        agent=agent,
        engine=engine if isinstance(engine, Mapping) else {"name": engine},
        sampling=sampling,
        seed=seed,
        samples=samples,
        config=dict(config or {}),
        isolation=dict(isolation or {}),
        platform={
            "python": platform.python_version(),
            "system": platform.system(),
            "kernel": platform.release(),
            "arch": platform.machine(),
        },
        library=library_version(),
        grader=dict(grader or {}),
        created=now(),
    )


def library_version() -> str:
    """The installed version of ClawGym."""
    try:
        return importlib.metadata.version("clawgym")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def differences(old: Any, new: Any, where: str = "") -> list[str]:
    """``field: old != new`` for every leaf in which two JSON values differ."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        return [
            line
            for key in sorted({*old, *new})
            for line in differences(old.get(key), new.get(key), f"{where}.{key}" if where else str(key))
        ]
    return [] if old == new else [f"{where}: {_short(old)} there, {_short(new)} asked for"]


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else text[:16] + "..."
