"""``report.html`` of a training run: one self-contained file with its curves.

Invariant: the markup contains only numbers from the run's own files, and escaped text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from clawgym.records.run_folder import RunFolder
from clawgym.trainers.common.data_use import data_uses
from clawgym.visible import visible_value

__all__ = ["curve", "curve_file", "lanes", "render"]

_HERE = Path(__file__).parent
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


def render(path: Path) -> str:
    """The report of the run folder ``path``, as HTML."""
    folder = RunFolder.read(path)
    metrics, evaluations = _lines(path / "metrics.jsonl"), _lines(path / "evaluations.jsonl")
    scores = [
        (f"{part}, {'greedy' if greedy else 'sampled'}",
         [row for row in evaluations if row["split"] == part and row["greedy"] == greedy])
        for part in ("heldout", "validation") for greedy in (False, True)
    ]  # fmt: skip
    scores = [(name, rows) for name, rows in scores if rows]
    curves = []
    for title, names in _CURVES:
        lines = [(name, [(row["step"], row[name]) for row in metrics if name in row]) for name in names]
        lines = [(name, points) for name, points in lines if points]
        if lines:
            curves.append((title, curve(lines)))
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE), autoescape=True, finalize=visible_value, trim_blocks=True
    )
    return environment.get_template("report.html.j2").render(
        name=path.name,
        manifest=folder.manifest,
        data=data_uses(folder.manifest),
        config=_flat(folder.manifest.config),
        steps=metrics[-1]["step"] if metrics else 0,
        scores=[(name, rows, curve([(name, _points(rows))], bands=[_bands(rows)], low=0, high=1))
                for name, rows in scores],
        curves=curves,
        timeline=lanes(_lines(path / "timeline.jsonl")),
    )  # fmt: skip


def _lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a JSONL file; an incomplete last line, left by a kill, is skipped."""
    try:
        return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]
    except FileNotFoundError:
        return []


def _points(rows: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    return [(row["step"], row["score"]) for row in rows]


def _bands(rows: Sequence[Mapping[str, Any]]) -> list[tuple[float, float, float]]:
    return [(row["step"], row["low"], row["high"]) for row in rows]


def _flat(value: Mapping[str, Any], before: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for key, item in value.items():
        if isinstance(item, Mapping):
            rows += _flat(item, f"{before}{key}.")
        else:
            rows.append((before + key, json.dumps(item)))
    return rows


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


def lanes(rows: Sequence[Mapping[str, Any]], *, width: int = 1060) -> Markup:
    """An SVG timeline with one lane for each ``loop``, busy from ``start`` to ``end`` (seconds)."""
    if not rows:
        return Markup("")
    left, high = 90, 22
    loops = list(dict.fromkeys(row["loop"] for row in rows))
    begin, over = min(row["start"] for row in rows), max(row["end"] for row in rows)
    scale = (width - left - 8) / ((over - begin) or 1.0)
    parts = [Markup('<svg viewBox="0 0 {w} {h}" role="img">').format(w=width, h=high * (len(loops) + 1))]
    for number, loop in enumerate(loops):
        parts.append(Markup('<text x="0" y="{y}">{t}</text>').format(y=high * number + 15, t=loop))
    for row in rows:
        number = loops.index(row["loop"])
        parts.append(
            Markup('<rect class="c{n}" x="{x:.1f}" y="{y}" width="{w:.1f}" height="{h}"/>').format(
                n=number % 3,
                x=left + (row["start"] - begin) * scale,
                y=high * number + 4,
                w=max(0.5, (row["end"] - row["start"]) * scale),
                h=high - 6,
            )
        )
    parts.append(
        Markup('<text x="{x}" y="{y}" text-anchor="end">{t:.0f} s</text></svg>').format(
            x=width - 8, y=high * len(loops) + 15, t=over - begin
        )
    )
    return Markup("").join(parts)
