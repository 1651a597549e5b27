"""The run manifest: versions, hashes and settings that a run's results depend on. Stored as ``receipt.json``.

Invariants: a run manifest contains no secret and no path of the host. Two runs with equal
:attr:`RunManifest.identity` measure the same thing.
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

from clawgym.credentials import without_secrets
from clawgym.errors import RunFolderError
from clawgym.records import TaskSet
from clawgym.records.atif import json_safe

__all__ = ["MOST_EPISODES", "RunManifest", "differences", "library_version", "make_manifest", "now"]

MOST_EPISODES = 5_000_000
"""Tasks of a stored run, times samples."""
_FOLDERS = re.compile(r"(?<![\w.:/])/(?:[^\s/:'\"]+/)+")
"""The folders of an absolute path."""


def now() -> str:
    """The current time as ISO 8601 in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _scrub(value: Any, key: str = "") -> Any:
    """Replace values that look like secrets, and the paths of the home and the working folder."""
    if isinstance(value, Mapping):
        return {str(k): _scrub(v, str(k)) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_scrub(v, key) for v in value]
    if isinstance(value, Path):
        return value.name
    if isinstance(value, str):
        value = without_secrets(value, key)
        for folder in {os.getcwd(), str(Path.home())} - {"/", "/root"}:
            value = value.replace(folder, "[path]")
    return value


@dataclass(frozen=True)
class RunManifest:
    """What a run's results depend on. A run can be resumed only with the same :attr:`identity`."""

    kind: str
    """Kind of run: ``eval``, ``train``, ``serve``, ``audit``, ``attack`` or ``bench``."""
    task_set: Mapping[str, Any] = field(default_factory=dict)
    """``name``, ``version``, ``hash``, ``size``, ``problems``; ``license`` of a published set that states one."""
    tasks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By task id: ``hash``, ``verifier``, ``mode``, and where known ``category``, ``level``,
    ``executes_agent_code``, ``judged_by``, ``user`` (of a dialogue), ``floor`` (the no-model baseline),
    ``unsupported``."""
    agent: Mapping[str, Any] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    samples: int = 1
    config: Mapping[str, Any] = field(default_factory=dict)
    """Settings that change results, including those of grading; part of the identity."""
    isolation: Mapping[str, Any] = field(default_factory=dict)
    """Isolation as probed; its ``backend`` and ``tier`` are part of the identity."""
    platform: Mapping[str, Any] = field(default_factory=dict)
    library: str = ""
    """Version of ClawGym."""
    grader: Mapping[str, Any] = field(default_factory=dict)
    """Fingerprint of the grading code and the images (:func:`~clawgym.evaluation.grader.describe_grader`). Not part of
    the identity."""
    created: str = ""
    """ISO 8601, UTC."""
    resumed: tuple[Mapping[str, Any], ...] = ()
    """``created``, ``library``, ``grader`` and ``platform`` of each time the run was resumed."""

    @property
    def label(self) -> str:
        """Agent, and the model if the agent uses one."""
        model = str(self.engine.get("model") or self.agent.get("model") or "")
        agent = str(self.agent.get("name") or "unknown")
        return f"{agent} · {model}" if model else agent

    @property
    def identity(self) -> dict[str, Any]:
        """The fields that must not change within one run folder. Without the samples of an evaluation, which may be
        raised later."""
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
        """JSON-ready data, without secrets and host paths."""
        return json_safe(_scrub({f.name: getattr(self, f.name) for f in dataclasses.fields(self)}))

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Self:
        """Read a stored manifest; fields of newer versions are ignored. Raises :class:`RunFolderError` if ``raw`` is
        not a run manifest, or plans more episodes than :data:`MOST_EPISODES`."""
        if not isinstance(raw, Mapping) or "kind" not in raw:
            raise RunFolderError("this receipt.json is not a ClawGym run manifest: give a run folder")
        names = {f.name for f in dataclasses.fields(cls)}
        fields: dict[str, Any] = {key: value for key, value in raw.items() if key in names}
        fields["resumed"] = tuple(fields.get("resumed", ()))
        samples, tasks = fields.get("samples", 1), fields.get("tasks", {})
        if not isinstance(tasks, Mapping):
            raise RunFolderError("receipt.json: field tasks: is no object: restore the file")
        if type(samples) is not int or not 0 < samples * max(1, len(tasks)) <= MOST_EPISODES:
            raise RunFolderError(
                f"receipt.json: field samples: {samples!r:.40} of {len(tasks)} tasks are not 1 to {MOST_EPISODES:,} "
                "episodes: restore the file"
            )
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
    users: Mapping[str, str] | None = None,
) -> RunManifest:
    """Make the manifest of a run that starts now. ``engine`` and ``sampling`` are taken from ``agent``.

    ``baselines``: no-model baseline by task id. ``judged``: by task id, the grader and its model if a model gives the
    scores. ``users``: by task id, the user of a dialogue and its model.
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
            "user": (users or {}).get(task.id) or None,
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
        if task_set.license:
            about["license"] = task_set.license
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
    """List the leaves in which two JSON values differ: ``field: 1 there, 2 asked for``."""
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
