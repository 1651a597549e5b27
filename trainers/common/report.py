"""``report.html`` of a training run: the page of ``clawgym view`` as one file; and charts for results of benchmarks.

Invariant: the markup of a chart contains only numbers and escaped text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from clawgym._version import __version__
from clawgym.reporting.page import mailable, source_answer, source_id
from clawgym.trainers.common.answers import training_answer, training_figures

__all__ = ["curve", "curve_file", "render"]


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


def curve(
    lines: Sequence[tuple[str, Sequence[tuple[float, float]]]],
    *,
    bands: Sequence[Sequence[tuple[float, float, float]]] = (),
    low: float | None = None,
    high: float | None = None,
    width: int = 520,
    height: int = 180,
) -> Markup:
    """An SVG chart of lines (name, points (x, y)), each with an optional band (x, low, high). ``low`` and ``high`` set
    the limits of the y axis."""
    points = [(x, y) for _, line in lines for x, y in line if math.isfinite(y)]
    if not points:
        return Markup("")
    left, right, top, bottom = 52, 8, 8, 22
    x0, x1 = min(x for x, _ in points), max(x for x, _ in points)
    y0 = min(y for _, y in points) if low is None else low
    y1 = max(y for _, y in points) if high is None else high
    y1 = y1 if y1 > y0 else y0 + (abs(y0) or 1.0)

    def at(x: float, y: float) -> str:
        across = (x - x0) / (x1 - x0) if x1 > x0 else 0.5
        up = (y - y0) / (y1 - y0)
        return f"{left + across * (width - left - right):.1f},{top + (1 - up) * (height - top - bottom):.1f}"

    parts = [Markup('<svg viewBox="0 0 {w} {h}" role="img">').format(w=width, h=height)]
    for value in (y0, (y0 + y1) / 2, y1):
        x, y = at(x0, value).split(",")
        parts.append(
            Markup('<line class="grid" x1="{l}" x2="{r}" y1="{y}" y2="{y}"/>').format(l=left, r=width - right, y=y)
        )
        parts.append(
            Markup('<text x="{x}" y="{y}" text-anchor="end">{t}</text>').format(
                x=left - 6, y=float(y) + 4, t=f"{value:.3g}"
            )
        )
    for x in dict.fromkeys((x0, x1)):
        where = at(x, y0).split(",")[0]
        anchor = "start" if x == x0 else "end"
        parts.append(
            Markup('<text x="{x}" y="{y}" text-anchor="{a}">{t}</text>').format(
                x=where, y=height - 6, a=anchor, t=f"{x:g}"
            )
        )
    for number, band in enumerate(bands):
        outline = [at(x, min(b, y1)) for x, _, b in band] + [at(x, max(a, y0)) for x, a, _ in reversed(band)]
        parts.append(Markup('<polygon class="band c{n}" points="{p}"/>').format(n=number % 3, p=" ".join(outline)))
    for number, (name, line) in enumerate(lines):
        shown = " ".join(at(x, y) for x, y in line if math.isfinite(y))
        parts.append(
            Markup('<polyline class="c{n}" points="{p}"><title>{t}</title></polyline>').format(
                n=number % 3, p=shown, t=name
            )
        )
    parts.append(Markup("</svg>"))
    return Markup("").join(parts)


def curve_file(lines: Sequence[tuple[str, Sequence[tuple[float, float]]]], **options: Any) -> bytes:
    """The chart of :func:`curve` as an SVG file, with colours and the names of the lines."""
    head, _, rest = str(curve(lines, **options)).partition(">")
    style = "line{stroke:#ddd}polyline{fill:none}polygon{opacity:.15}text{font:11px sans-serif}" + "".join(
        f"polyline.c{n}{{stroke:{colour}}}polygon.c{n},text.c{n}{{fill:{colour}}}"
        for n, colour in enumerate(("#26c", "#c52", "#283"))
    )
    names = Markup("").join(
        Markup('<text class="c{n}" x="60" y="{y}">{t}</text>').format(n=number % 3, y=20 + 14 * number, t=name)
        for number, (name, _) in enumerate(lines)
    )
    rest = rest.removesuffix("</svg>")
    return f'{head} xmlns="http://www.w3.org/2000/svg"><style>{style}</style>{rest}{names}</svg>'.encode()
