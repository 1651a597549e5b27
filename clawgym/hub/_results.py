"""The files of an evaluation's run folder that are pushed to the Hub, and a pulled run folder."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clawgym.evaluation.integrity import discrepancies
from clawgym.evaluation.report import render_report
from clawgym.evaluation.summary import SCORE_LABELS, summarize
from clawgym.files import LARGEST_FILE, read_below
from clawgym.hub._card import model_name, portable
from clawgym.hub._checkpoint import HubError
from clawgym.hub._upload import Upload, UploadPlan, refuse_secrets, render, repo_name, texts_of
from clawgym.records.atif import PICTURES, json_safe
from clawgym.records.run_folder import (
    LARGEST_RESULTS,
    MANIFEST,
    PROGRAM,
    RESULTS,
    SUMMARY,
    TRANSCRIPT,
    WORKSPACE,
    RunFolder,
    write_atomic,
)

__all__ = ["OURS", "PULLED", "finish_results", "plan_results"]

_EPISODE = rf"episodes/[\w.~-]+/(?:{re.escape(TRANSCRIPT)}|{re.escape(WORKSPACE)}|{re.escape(PROGRAM)})"
_PICTURE = rf"{PICTURES}/[0-9a-f]{{64}}\.(?:png|jpg|gif|webp)"
PULLED = re.compile(rf"{re.escape(MANIFEST)}|{re.escape(RESULTS)}|{_EPISODE}|{_PICTURE}")
"""The files of pushed results that are pulled. The summary and the report are made anew from them."""
OURS = re.compile(rf"{PULLED.pattern}|{re.escape(SUMMARY)}|report\.html|verification\.json|README\.md")


def plan_results(run: str | Path, *, transcripts: bool = False, workspaces: bool = False) -> UploadPlan:
    """Collect and check the files of an evaluation.

    Args:
        run: the run folder.
        transcripts: also the transcripts of the episodes, with their pictures.
        workspaces: also the final workspaces, with the transcripts: what grading again needs.

    Raises:
        HubError: ``run`` is not an evaluation, its results are inconsistent, or something in it looks like a secret.
        RunFolderError: ``run`` is not a run folder.
    """
    folder = RunFolder.read(run)
    if folder.manifest.kind != "eval":
        raise HubError(f"{run}: a run of kind {folder.manifest.kind!r}: give the folder of an evaluation")
    if not folder.rows:
        raise HubError(f"{run}: has no results: let the evaluation run first")
    if found := discrepancies(folder):
        key, lines = next(iter(found.items()))
        raise HubError(f"{run}: {key}: {lines[0]}: check it with `clawgym runs verify {run}`")
    names = [MANIFEST, RESULTS, SUMMARY, "report.html", "verification.json"]
    names = [name for name in names if (folder.path / name).exists()]
    kinds = [TRANSCRIPT] * (transcripts or workspaces) + [WORKSPACE, PROGRAM] * workspaces
    for row in folder.latest.values():
        place = folder.place_of(row)
        names += [f"{place}/{kind}" for kind in kinds if kind in (row.get("files") or {})]
    if kinds and (folder.path / PICTURES).is_dir():
        found_there = (path.name for path in sorted((folder.path / PICTURES).iterdir()))
        names += [name for one in found_there if re.fullmatch(_PICTURE, name := f"{PICTURES}/{one}")]
    uploads = [Upload(name, _regular(folder.path, name)) for name in names]
    card = Upload("README.md", _card(folder, bool(kinds), workspaces).encode())
    texts = (text for upload in [*uploads, card] if not upload.path.startswith(PICTURES) for text in texts_of(upload))
    refuse_secrets(texts, "the run folder")
    uploads = sorted([*uploads, card], key=lambda upload: upload.path)
    name = folder.path.resolve().name
    return UploadPlan(name, "dataset", f"{name}: results", tuple(uploads), (), OURS)


def _regular(folder: Path, name: str) -> Path:
    """The file's path. Raises :class:`HubError` if it is no regular file below the folder."""
    try:
        read_below(folder, name, LARGEST_RESULTS if name == RESULTS else LARGEST_FILE)
    except OSError as error:
        raise HubError(f"{folder / name}: {error.strerror}: restore it, or push the run without it") from error
    return folder / name


def _card(run: RunFolder, transcripts: bool, workspaces: bool) -> str:
    manifest, summary = run.manifest, summarize(run)
    about = manifest.task_set
    return render(
        "results.md.j2",
        name=portable(run.path.resolve().name),
        slug=repo_name(run.path.resolve().name),
        manifest=manifest,
        label=portable(manifest.label),
        model=model_name(str(manifest.engine.get("model") or manifest.agent.get("model") or "")),
        task_set=portable(str(about.get("name") or "unnamed tasks")),
        version=str(about.get("version") or ""),
        digest=str(about.get("hash") or ""),
        tasks=len(manifest.tasks),
        scores=[(label, getattr(summary.scores, name)) for name, label in SCORE_LABELS.items()],
        groups=summary.groups,
        summary=summary,
        transcripts=transcripts,
        workspaces=workspaces,
    )


def finish_results(folder: Path) -> list[str]:
    """Check a pulled run folder, write its summary and report, and return notes for the user.

    Raises :class:`HubError` if it is damaged or inconsistent.
    """
    try:
        run = RunFolder.read(folder)
        found = discrepancies(run)
        if found:
            key, lines = next(iter(found.items()))
            raise HubError(f"the results are inconsistent ({key[:80]!r}: {lines[0][:200]}): ask their author")
        stored = sum(_files_fit(run, row) for row in run.latest.values())
        write_atomic(folder / SUMMARY, (json.dumps(json_safe(summarize(run).to_dict()), indent=1) + "\n").encode())
        write_atomic(folder / "report.html", render_report(run).encode())
    except HubError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError, OSError) as error:
        reason = str(error).split("\n")[0][:200]
        raise HubError(f"the results are damaged ({type(error).__name__}: {reason}): ask their author") from error
    if stored:
        return ["`clawgym runs verify` grades the stored workspaces again"]
    return ["without workspaces, the scores cannot be checked"]


def _files_fit(run: RunFolder, row: Mapping[str, Any]) -> bool:
    """Whether the workspace of an episode is there. Raises :class:`HubError` if a file is not the one of the row."""
    place = run.place_of(row)
    for name, digest in (row.get("files") or {}).items():
        if name not in (TRANSCRIPT, WORKSPACE, PROGRAM) or not (run.path / place / name).exists():
            continue
        if hashlib.sha256(run.read_of(row, name)).hexdigest() != digest:
            raise HubError(f"{place}/{name} is not the file of its result: ask the author")
    return (run.path / place / WORKSPACE).exists()
