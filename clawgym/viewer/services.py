"""The answer about an online service, with the type ``Online`` of ``web/src/api.ts``; and its two changes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clawgym.errors import ServiceError
from clawgym.files import open_below, read_below
from clawgym.online.versions import Version, Versions
from clawgym.viewer.sources import is_alive

__all__ = ["online_answer", "promote", "roll_back"]

_LARGEST = 2**22


def online_answer(folder: Path) -> dict[str, Any]:
    """``Online`` of the answers, without ``id`` and ``writable``.

    Raises :class:`~clawgym.errors.ServiceError` for a folder without versions, or with a damaged log."""
    versions = _versions(folder)
    serving = versions.serving.number
    where, compared, watched = (
        _document(folder, name) for name in ("address.json", "gate/latest.json", "gate/watch.json")
    )
    running = is_alive(where.get("pid"))
    return {
        "name": folder.name,
        "path": str(folder),
        "base_url": str(where.get("base_url"))[:200] if running else None,
        "serving": serving,
        "versions": [_version(version, serving) for version in versions.all()],
        "events": [
            {
                "at": one.at,
                "kind": one.kind,
                "version": one.version,
                "before": one.before,
                "reason": str(one.reason)[:2_000],
            }
            for one in versions.events
        ],
        "comparison": _gate(compared, compared.get("version")) if compared else None,
        "watch": {
            "version": int(watched["version"]),
            "verdict": str(watched.get("verdict") or "")[:80],
            "reason": str(watched.get("reason") or "")[:2_000],
        }
        if isinstance(watched.get("version"), int)
        else None,
        "notes": [] if running else ["The service does not run. A change takes effect at its next start."],
    }


def promote(folder: Path, version: int) -> None:
    """Let a candidate answer. Raises :class:`~clawgym.errors.ServiceError`."""
    _versions(folder).promote(version, "by hand, in the viewer")


def roll_back(folder: Path, version: int | None) -> None:
    """Let an earlier version answer again; None: the one before. Raises :class:`~clawgym.errors.ServiceError`."""
    _versions(folder).roll_back("by hand, in the viewer", version)


def _versions(folder: Path) -> Versions:
    try:
        open_below(folder, "versions/log.jsonl").close()  # refuses a link, which would lead out of the folder
    except OSError as error:
        raise ServiceError(f"{folder}/versions/log.jsonl {error.strerror}: name the folder of a service") from error
    return Versions(folder / "versions")


def _document(folder: Path, name: str) -> dict[str, Any]:
    """A JSON object of the service; empty if there is none."""
    try:
        found = json.loads(read_below(folder, name, _LARGEST))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _version(version: Version, serving: int) -> dict[str, Any]:
    answers = version.number == serving
    return {
        "number": version.number,
        "parent": version.parent,
        "state": version.state,
        "answers": answers,
        "made": version.made,
        "sessions": len(version.sessions),
        "gate": [_gate(result, version.number) for result in version.gate],
        "can_promote": version.state == "candidate",
        "can_roll_back_to": version.state == "promoted" and not answers,
    }


def _gate(result: Mapping[str, Any], version: Any) -> dict[str, Any]:
    """``GateResult`` of the answers."""
    reasons, figures = result.get("reasons"), result.get("figures")
    return {
        "version": version if isinstance(version, int) else 0,
        "verdict": str(result.get("verdict") or "")[:80],
        "reasons": [str(reason)[:2_000] for reason in reasons] if isinstance(reasons, list) else [],
        "figures": [
            {
                "name": str(name)[:80],
                "n": int(_number(one.get("n")) or 0),
                "value": _number(one.get("mean")),
                "low": _number(one.get("lower")),
                "high": _number(one.get("upper")),
                "needed": _number(one.get("needed")),
            }
            for name, one in (figures.items() if isinstance(figures, Mapping) else ())
            if isinstance(one, Mapping)
        ],
    }


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
