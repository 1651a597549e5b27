"""``report.html`` of a training run: the page of ``clawgym view`` as one file."""

from __future__ import annotations

from pathlib import Path

from clawgym._version import __version__
from clawgym.reporting.page import mailable, source_answer, source_id
from clawgym.trainers.common.answers import training_answer, training_figures

__all__ = ["render"]


def render(path: Path) -> str:
    """The report of the run folder ``path``, as HTML."""
    name = path.resolve().name
    id = source_id(name, name)  # the file is for others: it has no path of this machine
    figures = training_figures(path)
    known = {"state": "unknown", "changed": 0.0}
    label = f"{figures['method']} · {figures['model']}"
    source = source_answer(id, "training", name, name, label=label, training=figures, **known)
    answers = {
        "sources": {"library": __version__, "writable": False, "paths": [], "sources": [source], "problems": []},
        f"training/{id}": {**training_answer(path), "id": id, "path": name, "pool": None, **known},
    }
    return mailable(f"{name} · ClawGym training", f"/training/{id}", answers)
