"""Check that the results of a run folder are consistent: with the run manifest, their checksums, files and each other.

Nothing is executed. The checksum of a line (its key ``seal``) detects edits, unless the checksum was recomputed. Then
only grading again finds them (:mod:`clawgym.evaluation.regrade`).
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Mapping
from typing import Any

from clawgym.errors import TaskError
from clawgym.evaluation.summary import summarize
from clawgym.records import Outcome
from clawgym.records.atif import PICTURES, picture_name, steps_from_atif
from clawgym.records.run_folder import RESULTS, SUMMARY, RunFolder, checksum_of
from clawgym.verifiers.scores import baseline_adjusted, plain_mean

__all__ = ["belongs", "discrepancies", "edited", "picture_damage", "results_digest", "unpacked"]

Row = Mapping[str, Any]
_MAX_UNPACKED = 320 * 2**20
"""Bytes. A frozen workspace has at most 256 MiB; the rest is for tar headers."""


def belongs(run: RunFolder, row: Row) -> bool:
    """Whether a row is a sample of a task in the run manifest, graded by that task's verifier."""
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
    """Whether a line does not match its checksum, or lacks one although other lines have it.

    The first versions wrote no checksums.
    """
    if "seal" not in row:
        return any("seal" in other for other in run.rows)
    return row["seal"] != checksum_of(row)


def discrepancies(run: RunFolder) -> dict[str, tuple[str, ...]]:
    """The inconsistencies found, by episode key; those of the whole folder under the empty key."""
    out: dict[str, list[str]] = {}
    graded: set[str] = set()
    for number, row in enumerate(run.rows, 1):
        found = out.setdefault(row["key"], [])
        if edited(run, row):
            found.append(f"line {number} of {RESULTS} was edited: it does not match its checksum")
        if not belongs(run, row) and row["outcome"] != Outcome.UNSUPPORTED:
            found.append(f"line {number} of {RESULTS} contradicts the run manifest")
        if row["key"] in graded:
            found.append(f"line {number} of {RESULTS} replaces a final result")
        if row["outcome"] != Outcome.INFRA:
            graded.add(row["key"])
        if row["outcome"] not in (Outcome.INFRA, Outcome.UNSUPPORTED):
            try:
                found += _contradictions(run, row)
            except (AttributeError, TypeError, ValueError):
                found.append(f"line {number} of {RESULTS} has no readable result")
    if not _summary_fits(run):
        out[""] = [f"the scores in {SUMMARY} differ from those of {RESULTS}"]
    return {key: tuple(dict.fromkeys(found)) for key, found in out.items() if found}


def _contradictions(run: RunFolder, row: Row) -> list[str]:
    """The contradictions between the fields of one row."""
    result = row["result"]
    checks, strict = result.get("checks") or {}, result.get("strict") or 0.0
    found = []
    if (row["outcome"] == Outcome.SOLVED) != (strict >= 1):
        found.append(f"outcome {row['outcome']} and strict {strict:g} contradict each other")
    if (strict >= 1) != (bool(checks) and not result.get("cause") and min(checks.values()) >= 1):
        found.append(f"strict {strict:g} and the checks contradict each other")
    baseline = result.get("floor")
    if baseline is not None:
        if baseline != run.manifest.tasks.get(row["task_id"], {}).get("floor"):
            found.append("its no-model baseline (floor) differs from the run manifest's")
        if abs(baseline_adjusted(plain_mean(checks), baseline) - (result.get("corrected") or 0.0)) > 1e-9:
            found.append("its baseline-adjusted score (corrected) contradicts the checks and the baseline")
    return found


def _summary_fits(run: RunFolder) -> bool:
    """Whether ``summary.json`` has the scores of these rows. True if it is missing or covers fewer rows."""
    try:
        stored = json.loads(run.read_file(SUMMARY))
        now = summarize(run)
        if stored["attempts"] != now.attempts:
            return True
        for name in ("strict", "official", "corrected"):
            old, new = stored["scores"][name], getattr(now.scores, name)
            if (old is None) != (new is None) or (old and abs(old["value"] - new.value) > 1e-9):
                return False
    except FileNotFoundError:
        return True
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return True


def results_digest(run: RunFolder) -> str:
    """Hex SHA-256 of ``results.jsonl``; empty if there is none."""
    try:
        return hashlib.sha256(run.read_file(RESULTS)).hexdigest()
    except FileNotFoundError:
        return ""


def picture_damage(run: RunFolder, transcript: bytes, intact: set[str]) -> str | None:
    """Describe the first damaged picture that a transcript refers to; None if all match the digests in their names.

    The names of undamaged pictures are added to ``intact`` and are not read again.
    """
    if f"/{PICTURES}/".encode() not in transcript:
        return None
    try:
        seen = [seen.image for step in steps_from_atif(json.loads(transcript)) for seen in step.observations]
    except (ValueError, TaskError):
        return None  # reported where the transcript is read
    for image in seen:
        name = picture_name(image) if image is not None else None
        if image is None or name is None or name in intact:
            continue
        try:
            digest = hashlib.sha256(run.read_file(f"{PICTURES}/{name}")).hexdigest()
        except OSError:
            return f"{PICTURES}/{name} is missing"
        if digest != image.sha256:
            return f"{PICTURES}/{name} changed after this result was written"
        intact.add(name)
    return None


def unpacked(packed: bytes) -> bytes:
    """The content of a gzip file, at most 320 MiB. Raises ValueError if it is damaged or larger."""
    unpacker = zlib.decompressobj(wbits=31)
    try:
        data = unpacker.decompress(packed, _MAX_UNPACKED)
    except zlib.error as error:
        raise ValueError(f"not a gzip file ({error})") from error
    if not unpacker.eof or unpacker.unused_data:
        raise ValueError("the file is truncated, too large, or has data after its end")
    return data
