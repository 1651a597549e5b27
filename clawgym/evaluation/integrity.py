"""Do the lines of a run folder agree with their run manifest, their seals, their files, and each other?

Invariant: everything here is found without running anything. A seal shows that a line was edited by somebody who did
not seal it again; against one who did, only grading again helps (:mod:`clawgym.evaluation.verify`).
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clawgym.errors import TaskError
from clawgym.evaluation.summary import summarize
from clawgym.records import Outcome
from clawgym.records.atif import PICTURES, picture_name, steps_from_atif
from clawgym.records.run_folder import RESULTS, SUMMARY, RunFolder, seal_of
from clawgym.verifiers.scores import corrected, plain_mean

__all__ = ["belongs", "discrepancies", "edited", "picture_damage", "results_digest", "unpacked"]

Row = Mapping[str, Any]
_LARGEST = 320 * 2**20
"""A frozen workspace is at most 256 MiB; the rest is for headers."""


def belongs(run: RunFolder, row: Row) -> bool:
    """Whether a row is a sample of a task of the run manifest, graded by that task's verifier."""
    about = run.manifest.tasks.get(row.get("task_id", ""))
    if about is None or row.get("task_hash") != about["hash"]:
        return False
    sample = row.get("sample")
    if not isinstance(sample, int) or not 0 <= sample < run.manifest.samples:
        return False
    result = row.get("result") or {}
    verifier = result.get("verifier_hash") if isinstance(result, Mapping) else "?"
    return row["key"] == f"{row['task_id']}#{sample}" and (not verifier or verifier == about["verifier"])


def edited(run: RunFolder, row: Row) -> bool:
    """Whether a line does not match its seal, or has lost it (folders of before there were seals have none)."""
    if "seal" not in row:
        return any("seal" in other for other in run.rows)
    return row["seal"] != seal_of(row)


def discrepancies(run: RunFolder) -> dict[str, tuple[str, ...]]:
    """What does not fit, by episode key; under the empty key, what is about the folder."""
    out: dict[str, list[str]] = {}
    graded: set[str] = set()
    for number, row in enumerate(run.rows, 1):
        found = out.setdefault(row["key"], [])
        if edited(run, row):
            found.append(f"line {number} of {RESULTS} was edited: it does not match its seal")
        if not belongs(run, row) and row["outcome"] != Outcome.UNSUPPORTED:
            found.append(f"line {number} of {RESULTS} does not fit the run manifest")
        if row["key"] in graded:
            found.append(f"line {number} of {RESULTS} replaces a result that was final")
        if row["outcome"] != Outcome.INFRA:
            graded.add(row["key"])
        if row["outcome"] not in (Outcome.INFRA, Outcome.UNSUPPORTED):
            try:
                found += _contradictions(run, row)
            except (AttributeError, TypeError, ValueError):
                found.append(f"line {number} of {RESULTS} holds no result that can be read")
    if not _summary_fits(run):
        out[""] = [f"{SUMMARY} does not say what the lines of {RESULTS} say"]
    return {key: tuple(dict.fromkeys(found)) for key, found in out.items() if found}


def _contradictions(run: RunFolder, row: Row) -> list[str]:
    """What cannot be in one row together."""
    result = row["result"]
    checks, strict = result.get("checks") or {}, result.get("strict") or 0.0
    found = []
    if (row["outcome"] == Outcome.SOLVED) != (strict >= 1):
        found.append(f"outcome {row['outcome']} and strict {strict:g} contradict each other")
    if (strict >= 1) != (bool(checks) and not result.get("cause") and min(checks.values()) >= 1):
        found.append(f"strict {strict:g} and the checks contradict each other")
    floor = result.get("floor")
    if floor is not None:
        if floor != run.manifest.tasks.get(row["task_id"], {}).get("floor"):
            found.append("its floor is not that of the run manifest")
        if abs(corrected(plain_mean(checks), floor) - (result.get("corrected") or 0.0)) > 1e-9:
            found.append("corrected does not follow from the checks and the floor")
    return found


def _summary_fits(run: RunFolder) -> bool:
    """Whether ``summary.json`` says the scores of these lines; one of fewer lines, or none at all, is none."""
    try:
        stored = json.loads((run.path / SUMMARY).read_bytes())
        now = summarize(run)
        if stored["attempts"] != now.attempts:
            return True
        for name in ("strict", "official", "corrected"):
            told, true = stored["scores"][name], getattr(now.scores, name)
            if (told is None) != (true is None) or (told and abs(told["value"] - true.value) > 1e-9):
                return False
    except FileNotFoundError:
        return True
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return True


def results_digest(run: RunFolder) -> str:
    """Hex SHA-256 of ``results.jsonl`` as it is."""
    try:
        return hashlib.sha256((run.path / RESULTS).read_bytes()).hexdigest()
    except FileNotFoundError:
        return ""


def picture_damage(run: RunFolder, transcript: Path, sound: set[str]) -> str | None:
    """What ails the pictures that a transcript names, whose names are their digests; those in order join ``sound``."""
    data = transcript.read_bytes()
    if f"/{PICTURES}/".encode() not in data:
        return None
    try:
        seen = [seen.image for step in steps_from_atif(json.loads(data)) for seen in step.observations]
    except (ValueError, TaskError):
        return None  # found where it is read
    for image in seen:
        name = picture_name(image) if image is not None else None
        if image is None or name is None or name in sound:
            continue
        try:
            digest = hashlib.sha256((run.path / PICTURES / name).read_bytes()).hexdigest()
        except OSError:
            return f"{PICTURES}/{name} is missing"
        if digest != image.sha256:
            return f"{PICTURES}/{name} is not the file that was written with this result"
        sound.add(name)
    return None


def unpacked(path: Path) -> bytes:
    """The content of a gzip file of at most 320 MiB. Raises ValueError if it is damaged or larger."""
    unpacker = zlib.decompressobj(wbits=31)
    try:
        data = unpacker.decompress(path.read_bytes(), _LARGEST)
    except zlib.error as error:
        raise ValueError(f"it is no gzip file ({error})") from error
    if not unpacker.eof or unpacker.unused_data:
        raise ValueError("it is cut off, too large, or has something after its end")
    return data
