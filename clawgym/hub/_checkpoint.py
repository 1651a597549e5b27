"""Read a checkpoint of a training run, with its metrics and evaluations."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clawgym.errors import ClawGymError
from clawgym.records.manifest import RunManifest
from clawgym.records.run_folder import RunFolder

__all__ = ["Checkpoint", "HubError", "read_checkpoint"]

_POINTERS = ("best", "last")


class HubError(ClawGymError):
    """A checkpoint cannot be pushed; the message says why. Files already uploaded are kept on the Hub."""


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint of a run folder."""

    run: Path
    manifest: RunManifest
    step: int
    folder: Path
    """A complete Hugging Face folder of a model or a LoRA adapter."""
    adapter: bool
    metrics: tuple[dict[str, Any], ...]
    """Rows of ``metrics.jsonl`` up to :attr:`step`."""
    evaluations: tuple[dict[str, Any], ...]
    """Rows of ``evaluations.jsonl`` up to :attr:`step`."""

    @property
    def name(self) -> str:
        """The run's name."""
        return self.run.resolve().name

    @property
    def scores(self) -> list[dict[str, Any]]:
        """The last evaluations of this step, one for each task set, split and ``decoding``.

        ``decoding`` is ``sampled``, ``greedy``, or empty if the row does not say.
        """
        rows = [row for row in self.evaluations if row["step"] == self.step]
        words = {True: "greedy", False: "sampled"}
        rows = [{**row, "decoding": words.get(row.get("greedy"), "")} for row in rows]
        return list({(row["task_set"], row["split"], row["decoding"]): row for row in rows}.values())


def read_checkpoint(run: str | Path, checkpoint: str = "best") -> Checkpoint:
    """Read the checkpoint ``best``, ``last`` or of a step (``000040``, ``40``) of the run folder ``run``.

    Raises :class:`HubError` if it is missing or damaged, :class:`~clawgym.errors.RunFolderError` if ``run`` is not a
    run folder.
    """
    run = Path(run)
    manifest = RunFolder.read(run).manifest
    if manifest.kind != "train":
        raise HubError(f"{run}: the folder of a run of kind {manifest.kind!r}: give the folder of a training run")
    root = run / "checkpoints"
    there = sorted(path.name for path in root.glob("*") if path.is_dir() and path.name.isdecimal())
    name = checkpoint
    if checkpoint in _POINTERS:
        try:
            name = (root / checkpoint).read_text("utf-8").strip()
        except (OSError, ValueError):
            raise HubError(
                f"{root / checkpoint}: cannot be read: name a checkpoint with --checkpoint ({_names(there)})"
            ) from None
    elif checkpoint.isdecimal():
        name = f"{int(checkpoint):06d}"
    if name not in there:
        raise HubError(f"{root}: no checkpoint {name!r}: choose another with --checkpoint ({_names(there)})")
    folder, adapter = root / name / "model", False
    if not folder.is_dir():
        folder, adapter = root / name / "adapter", True
    if not folder.is_dir():
        raise HubError(f"{root / name}: neither model/ nor adapter/ is in it: choose another with --checkpoint")
    step = int(name)
    return Checkpoint(
        run,
        manifest,
        step,
        folder,
        adapter,
        _rows(run / "metrics.jsonl", step, {}),
        _rows(run / "evaluations.jsonl", step, {"task_set": str, "split": str, "score": float}),
    )


def _names(there: list[str]) -> str:
    return ", ".join([*_POINTERS, *there[-8:]]) if there else "there is none: let the run go on until it has saved one"


def _rows(path: Path, until: int, fields: dict[str, type]) -> tuple[dict[str, Any], ...]:
    """The rows of a JSON Lines file up to a step; an unfinished last line is skipped."""
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return ()
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            step = row["step"]
            for name, kind in fields.items():
                row[name] = kind(row[name])
                if isinstance(row[name], float) and not math.isfinite(row[name]):
                    raise ValueError(f"{name} is {row[name]}")
            if not isinstance(step, int):
                raise TypeError("step is no whole number")
        except (ValueError, TypeError, KeyError) as error:
            raise HubError(f"{path}: line {number}: {error!r}: delete that line") from error
        if step <= until:
            rows.append(row)
    return tuple(rows)
