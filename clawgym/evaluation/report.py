"""Write ``report.html``: the page of a whole run as one file, without a server or a network.

Invariants:

- The page loads nothing. Its Content-Security-Policy allows only its own style and script, by hash.
- Texts of tasks, agents and verifiers are untrusted. They are data of the page, with control and format characters as
  visible escapes.
- The size is bounded. Long texts are cut, with a note of how much is left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from clawgym._version import __version__
from clawgym.evaluation import answers, summary
from clawgym.records import Image
from clawgym.records.run_folder import RunFolder, write_atomic
from clawgym.reporting.page import mailable, source_answer, source_id
from clawgym.reporting.pictures import stills
from clawgym.reporting.transcripts import Transcript

__all__ = ["render_report", "write_report"]

_TOTAL = 20 * 2**20
"""Approximate limit of the embedded transcripts together, in bytes."""
_TEXT_CAPS = (16_000, 4_000, 1_000, 240)
"""Characters per text. The first that makes a transcript fit its budget is used."""
_STEP = 1_500
"""About the bytes of a step whose texts are cut as short as possible."""
_LEAST, _MOST = 2_000, 400_000
"""Limits of the budget of one episode, in bytes."""
_FRAMES, _ALL_FRAMES = 60, 2_000
"""Most pictures of one episode, and of all."""
_PICTURES, _ALL_PICTURES = 2**20, 12 * 2**20
"""Most bytes of the pictures of one episode, and of all."""


def write_report(path: str | Path) -> Path:
    """Write ``report.html`` into the run folder at ``path`` and return its path."""
    run = RunFolder.read(path)
    target = run.path / "report.html"
    write_atomic(target, render_report(run).encode())
    return target


def render_report(run: RunFolder, *, total: int = _TOTAL) -> str:
    """Render the page of a run folder. ``total``: approximate limit of the embedded transcripts, in bytes."""
    name = run.path.resolve().name
    id = source_id(name, name)  # the file is for others: it has no path of this machine
    order = answers.ordered(run.manifest)
    by_key: dict[str, list[Mapping[str, Any]]] = {}
    for row in run.rows:
        by_key.setdefault(row["key"], []).append(row)
    lines = [(answers.episode_line(run.manifest, order, rows), rows) for rows in by_key.values()]
    lines.sort(key=lambda pair: (pair[0]["order"], pair[0]["sample"]))
    scores = summary.summarize(run)
    counted = {"done": len(lines), "total": len(lines)}
    state = "complete" if scores.complete else "incomplete"
    shown = {"state": state, "changed": 0.0, "indexed": counted}
    source = source_answer(
        id, "run", name, name, label=run.manifest.label[:200], run=answers.run_figures(run.manifest, scores), **shown
    )
    found: dict[str, Any] = {
        "sources": {"library": __version__, "writable": False, "paths": [], "sources": [source], "problems": []},
        f"runs/{id}": {**answers.run_answer(run, scores), "id": id, "path": name, **shown},
        f"runs/{id}/episodes": _page([line for line, _ in lines]),
    }
    budget = max(_LEAST, min(_MOST, total // max(1, len(lines))))
    for line, rows in lines:
        address = f"runs/{id}/episodes/{line['name']}"
        transcript = answers.transcript_of(run.path, line["name"])
        pictures = [image for _, image in transcript.pictures()]
        urls = stills(
            run.path,
            pictures,
            frames=min(_FRAMES, _ALL_FRAMES // len(lines)),
            size=min(_PICTURES, _ALL_PICTURES // len(lines)),
        )
        episode = answers.episode_answer(
            run.path, line, rows, transcript, lambda image, urls=urls: urls.get(image.sha256), budget // 8
        )
        if len(episode["pictures"]) < len(pictures):
            note = f"{len(episode['pictures'])} of {len(pictures)} pictures are shown; all are in pictures/."
            episode["notes"].append(note if urls else f"{note} To see them here: pip install 'clawgym[gui]'.")
        found[address] = {**episode, "run": id, "pool": None, "has_tokens": False}
        found[f"{address}/turns"] = _turns(transcript, budget, urls)
    return mailable(f"{name} · {run.manifest.label} · ClawGym", f"/runs/{id}", found)


def _page(items: Sequence[Any], note: str = "") -> dict[str, Any]:
    return {"total": len(items), "all": len(items), "offset": 0, "items": items, "note": note}


def _turns(transcript: Transcript, budget: int, urls: Mapping[str, str]) -> dict[str, Any]:
    """The whole transcript, in about ``budget`` bytes of JSON without its pictures."""

    def address(image: Image) -> str | None:
        return urls.get(image.sha256)

    count = len(transcript.steps)
    for most in _TEXT_CAPS if count * 300 <= budget else ():
        steps = answers.turns_answer(transcript, address=address, text=most)
        if len(json.dumps(steps)) - sum(map(len, urls.values())) <= budget:
            return _page([{**step, "turn": None} for step in steps], transcript.note)
    steps = answers.turns_answer(transcript, address=address, text=_TEXT_CAPS[-1])
    keep = max(1, budget // _STEP)
    note = transcript.note
    if count > 2 * keep:
        steps = steps[:keep] + steps[-keep:]
        note = f"{count - 2 * keep} steps in the middle are left out; see transcript.json for all."
    return _page([{**step, "turn": None} for step in steps], note)
