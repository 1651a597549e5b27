"""What ``clawgym view`` and ``report.html`` show of a training run, with the types of ``web/src/api.ts``.

Invariant: a run folder is hostile. Its files are read without following links, up to a size; lines that are damaged or
have another form are left out, and counted in the notes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from clawgym.errors import RunFolderError
from clawgym.files import read_below
from clawgym.records.manifest import RunManifest
from clawgym.records.run_folder import MANIFEST
from clawgym.trainers.common.data_use import data_uses

__all__ = ["advantages_file", "trained_advantages", "training_answer", "training_figures", "training_tables"]

_LARGEST = 256 * 2**20
"""Most bytes of a file that is read."""
_VALUES = 20_000_000
"""Most values of a table of metrics."""
_STEPS, _SPANS = 2_000, 4_000
"""Most steps of the curves, and most spans of the timeline, that are shown."""
_CURVES: Sequence[tuple[str, Sequence[str]]] = (
    ("Reward of the episodes that were trained on", ("rollout/avg_reward_submitted",)),
    ("Groups: mixed, all zero, all one",
     ("rollout/group_mixed_frac", "rollout/group_all_zero_frac", "rollout/group_all_one_frac")),
    ("Process rewards: mean, scored, zero",
     ("reward/process_mean", "reward/process_scored_frac", "reward/process_zero_frac")),
    ("Process rewards of canaries: reference solution, listing files, attacks",
     ("canary/process_reference", "canary/process_look", "canary/process_attack")),
    ("Imitation loss: cross-entropy, nats per token", ("sft/loss",)),
    ("Policy loss, without the terms for KL, entropy and imitation", ("actor/pg_loss",)),
    ("Entropy, nats per token", ("actor/entropy",)),
    ("KL of a step, nats per token", ("actor/step_kl", "actor/approx_kl")),
    ("Fraction of clipped tokens: below, above", ("actor/clip_fraction_low", "actor/clip_fraction_high")),
    ("Gradient norm", ("actor/grad_norm", "sft/grad_norm")),
    ("Difference of token probabilities between trainer and engine", ("training/rollout_probs_diff",)),
    ("Staleness in policy versions: mean, maximum", ("staleness/mean", "staleness/max")),
    ("Mean steps per episode", ("rollout/avg_steps_per_trajectory",)),
    ("Seconds: step, update, waiting for a batch", ("timing/step", "timing/update", "timing/wait_for_batch")),
    ("Idle fraction of a step: trainer, rollouts", ("perf/trainer_idle_ratio", "perf/rollout_idle_ratio")),
)  # fmt: skip
_GUARDS = {"max_kl": ("actor/step_kl", 1), "min_entropy": ("actor/entropy", -1)}
"""Setting -> the metric that it limits, and 1 for a largest value, -1 for a least one."""


def training_figures(folder: Path) -> dict[str, Any]:
    """``TrainingFigures`` of the answers: one line in a table. Raises :class:`~clawgym.errors.RunFolderError`."""
    manifest = _manifest(folder)
    steps = [row["step"] for row in _lines(folder, "metrics.jsonl", []) if _is_number(row.get("step"))]
    scores = _scores(folder, [])
    heldout = [score for score in scores if score["split"] == "heldout"]
    return {
        "method": str(manifest.config.get("method") or "")[:80],
        "model": _model(manifest),
        "created": manifest.created,
        "steps": int(max(steps, default=0)),
        "score": (heldout or scores or [None])[-1],
    }


def training_answer(folder: Path) -> dict[str, Any]:
    """``Training`` of the answers, without ``id``, ``state``, ``changed`` and ``pool``.

    Raises :class:`~clawgym.errors.RunFolderError` if ``folder`` is not a run folder."""
    manifest = _manifest(folder)
    notes: list[str] = []
    rows = [row for row in _lines(folder, "metrics.jsonl", notes) if _is_number(row.get("step"))]
    rows = list({row["step"]: row for row in rows}.values())
    if len(rows) > _STEPS:
        notes.append(f"The curves show {_STEPS:,} of {len(rows):,} steps, at even distances.")
    names = sorted({name for row in rows for name, value in row.items() if _is_number(value)} - {"step", "time"})
    shown = [rows[(n + 1) * len(rows) // min(_STEPS, len(rows)) - 1] for n in range(min(_STEPS, len(rows)))]
    scores = _scores(folder, notes)
    return {
        "name": folder.name,
        "path": str(folder),
        "about": _about(manifest, rows),
        "manifest": {**dataclasses.replace(manifest, tasks={}).to_dict(), "tasks": f"{len(manifest.tasks)} tasks"},
        "config": _flat(manifest.config),
        "data": [
            {"use": one.use, "name": one.name, "split": one.split, "tasks": one.tasks, "sha256": one.sha256}
            for one in data_uses(manifest)
        ],
        "steps": [row["step"] for row in shown],
        "times": [_number(row.get("time")) for row in shown],
        "metrics": {name: [_number(row.get(name)) for row in shown] for name in names},
        "charts": _charts(names),
        "evaluations": scores,
        "timeline": _timeline(folder, notes),
        "guards": _guards(folder, rows),
        "checkpoints": _checkpoints(folder),
        "notes": notes,
    }


def training_tables(folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[str]]:
    """The metrics of all steps, the evaluations, and notes on what is left out of them.

    A metric that is no number is left out. Raises :class:`~clawgym.errors.RunFolderError` if the metrics have more
    values than a table can have."""
    notes: list[str] = []
    rows = [row for row in _lines(folder, "metrics.jsonl", notes) if _is_number(row.get("step"))]
    kept = list({row["step"]: {k: v for k, v in row.items() if _is_number(v)} for row in rows}.values())
    if len(kept) * len({name for row in kept for name in row}) > _VALUES:
        raise RunFolderError(f"{folder / 'metrics.jsonl'} has more than {_VALUES:,} values: read the file in parts")
    return kept, _scores(folder, notes), notes


def advantages_file(folder: Path, step: int) -> Path:
    """Where a training run keeps the advantages of a step."""
    return folder / "advantages" / f"{step:08d}.json"


def trained_advantages(folder: Path, step: int, episode: str) -> dict[int, tuple[float, float, float]]:
    """Turn -> mean, least and most of the advantages of its tokens, as a step trained on them; empty if not stored."""
    try:
        data = read_below(folder, str(advantages_file(folder, step).relative_to(folder)), _LARGEST)
        found = json.loads(data)[episode].items()
        return {int(turn): (float(mean), float(least), float(most)) for turn, (mean, least, most) in found}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return {}


def _manifest(folder: Path) -> RunManifest:
    try:
        manifest = RunManifest.from_dict(json.loads(read_below(folder, MANIFEST, _LARGEST)))
        if not isinstance(manifest.config, Mapping) or not isinstance(manifest.tasks, Mapping):
            raise ValueError("its settings are no object")
    except OSError as error:
        raise RunFolderError(f"{folder / MANIFEST} {error.strerror}: give a run folder") from error
    except (ValueError, TypeError, RecursionError) as error:
        raise RunFolderError(f"{folder / MANIFEST} is damaged ({str(error)[:200]}): restore it from a copy") from error
    return manifest


def _model(manifest: RunManifest) -> str:
    return str(manifest.engine.get("model") or "a model made from scratch")[:200]


def _about(manifest: RunManifest, rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    facts = (
        ("Method", str(manifest.config.get("method") or "")),
        ("Model", _model(manifest)),
        ("Seed", str(manifest.seed)),
        ("Steps", str(rows[-1]["step"] if rows else 0)),
        ("ClawGym", manifest.library),
        ("Started", manifest.created.replace("T", " ").replace("+00:00", " UTC")),
    )
    return [(name, str(value)[:200]) for name, value in facts if value]


def _lines(folder: Path, name: str, notes: list[str]) -> list[dict[str, Any]]:
    """The complete lines of a JSON Lines file that hold objects."""
    try:
        data = read_below(folder, name, _LARGEST)
    except FileNotFoundError:
        return []
    except OSError as error:
        notes.append(f"{name} {error.strerror}: it is not shown.")
        return []
    rows, damaged = [], 0
    for line in data.split(b"\n")[:-1]:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict):
            rows.append(row)
        else:
            damaged += 1
    if damaged:
        notes.append(f"{damaged} damaged lines of {name} are left out.")
    return rows


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**63


def _number(value: Any) -> float | None:
    return float(value) if _is_number(value) and math.isfinite(value) else None


def _flat(value: Mapping[str, Any], before: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for key, item in value.items():
        if isinstance(item, Mapping):
            rows += _flat(item, f"{before}{key}.")
        else:
            rows.append((f"{before}{key}"[:200], json.dumps(item)[:400]))
    return rows


def _scores(folder: Path, notes: list[str]) -> list[dict[str, Any]]:
    """``Score`` of the answers for each evaluation."""
    found = []
    for row in _lines(folder, "evaluations.jsonl", notes):
        if not all(_is_number(row.get(name)) for name in ("step", "score", "low", "high")):
            continue
        generators = row.get("by_generator")
        found.append(
            {
                "step": int(row["step"]),
                "task_set": str(row.get("task_set") or "")[:200],
                "split": str(row.get("split") or "")[:80],
                **{name: float(row[name]) for name in ("score", "low", "high")},
                **{name: int(_number(row.get(name)) or 0) for name in ("episodes", "samples", "infra")},
                "greedy": bool(row.get("greedy")),
                "by_generator": {
                    str(name)[:80]: float(value) for name, value in generators.items() if _is_number(value)
                }
                if isinstance(generators, Mapping)
                else {},
                "partial": _number(row.get("partial")),
            }
        )
    return found


def _charts(names: Sequence[str]) -> list[dict[str, Any]]:
    """``Chart`` of the answers: the known ones, then one for each other metric."""
    charts, used = [], set[str]()
    for title, metrics in _CURVES:
        there = [metric for metric in metrics if metric in names]
        if not there:
            continue
        head, _, tail = title.partition(": ")
        parts = tail.split(", ")
        if len(metrics) == 1 or len(parts) != len(metrics):
            head, parts = title, list(metrics)
        labels = [label for metric, label in zip(metrics, parts, strict=True) if metric in names]
        charts.append({"title": head, "metrics": there, "labels": labels, "main": True})
        used |= set(there)
    others = [name for name in names if name not in used]
    return charts + [{"title": name, "metrics": [name], "labels": [name], "main": False} for name in others]


def _timeline(folder: Path, notes: list[str]) -> list[dict[str, Any]]:
    rows = [
        row
        for row in _lines(folder, "timeline.jsonl", notes)
        if all(_is_number(row.get(name)) for name in ("step", "start", "end"))
    ]
    if len(rows) > _SPANS:
        notes.append(f"The timeline shows the last {_SPANS:,} of {len(rows):,} spans.")
        rows = rows[-_SPANS:]
    begin = min((row["start"] for row in rows), default=0.0)
    return [
        {
            "step": int(row["step"]),
            "loop": str(row.get("loop") or "")[:80],
            "start": float(row["start"] - begin),
            "end": float(row["end"] - begin),
        }
        for row in rows
    ]


def _guards(folder: Path, rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """``Guard`` of the answers, from ``config.yaml``."""
    limits = dict(_guard_settings(folder))
    return [
        {
            "name": name,
            "limit": limits[name],
            "metric": metric,
            "fired": [
                row["step"] for row in rows if _is_number(row.get(metric)) and sign * row[metric] > sign * limits[name]
            ],
        }
        for name, (metric, sign) in _GUARDS.items()
        if name in limits
    ]


def _guard_settings(folder: Path) -> Iterator[tuple[str, float]]:
    """The settings below ``guards``, in a file as :class:`~clawgym.trainers.common.run.Run` writes it."""
    with contextlib.suppress(OSError, ValueError):
        _, _, text = ("\n" + read_below(folder, "config.yaml", 2**20).decode()).partition("\nguards:\n")
        for line in text.splitlines():
            name, _, value = line.strip().partition(": ")
            if not line.startswith("  ") or name not in _GUARDS:
                return
            yield name, float(value)


def _checkpoints(folder: Path) -> list[dict[str, Any]]:
    def named(file: str) -> str:
        with contextlib.suppress(OSError, ValueError):
            return read_below(folder, f"checkpoints/{file}", 256).decode().strip()
        return ""

    if (folder / "checkpoints").is_symlink():
        return []
    best, last = named("best"), named("last")
    try:
        names = sorted(path.name for path in (folder / "checkpoints").iterdir() if path.name.isdecimal())
    except OSError:
        return []
    return [{"name": name, "step": int(name), "best": name == best, "last": name == last} for name in names[:1_000]]
