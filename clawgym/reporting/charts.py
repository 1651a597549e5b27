"""Inline SVG charts for reports.

Invariant: the markup contains only computed numbers and escaped text; colours come from CSS classes.
"""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from clawgym.statistics import Estimate

__all__ = ["bar", "histogram", "whisker"]


def whisker(estimate: Estimate | None, width: int = 220, height: int = 18) -> Markup:
    """A mean and its interval on an axis from 0 to 1."""
    if estimate is None:
        return Markup("")
    pad = 5
    scale = width - 2 * pad

    def x(value: float) -> str:
        return f"{pad + scale * value:.1f}"

    middle = height / 2
    return Markup(
        '<svg class="whisker" viewBox="0 0 {w} {h}" width="{w}" height="{h}" role="img" aria-label="{label}">'
        '<line class="axis" x1="{x0}" x2="{x1}" y1="{m}" y2="{m}"/>'
        '<line class="tick" x1="{xh}" x2="{xh}" y1="{t0}" y2="{t1}"/>'
        '<line class="range" x1="{lo}" x2="{hi}" y1="{m}" y2="{m}"/>'
        '<circle class="dot" cx="{v}" cy="{m}" r="4.5"/></svg>'
    ).format(
        w=width,
        h=height,
        m=middle,
        x0=x(0),
        x1=x(1),
        xh=x(0.5),
        t0=middle - 3,
        t1=middle + 3,
        lo=x(estimate.low),
        hi=x(estimate.high),
        v=x(estimate.value),
        label=f"{100 * estimate.value:.1f}%, interval {100 * estimate.low:.1f} to {100 * estimate.high:.1f}",
    )


def bar(share: float, width: int = 160, kind: str = "plain") -> Markup:
    """A horizontal bar, filled to ``share`` (0 to 1) of its ``width``."""
    share = min(1.0, max(0.0, share))
    return Markup(
        '<svg class="bar {kind}" viewBox="0 0 {w} 8" width="{w}" height="8" aria-hidden="true">'
        '<rect class="track" width="{w}" height="8" rx="4"/><rect class="fill" width="{f}" height="8" rx="4"/></svg>'
    ).format(w=width, f=f"{width * share:.1f}", kind=kind)


def histogram(parts: Sequence[tuple[str, Sequence[float]]], bins: int = 20) -> Markup:
    """A stacked histogram of values in [0, 1]. Each part is (CSS class, values). The last bin includes 1."""
    counts = [[0] * bins for _ in parts]
    for row, (_, values) in zip(counts, parts, strict=True):
        for value in values:
            row[min(bins - 1, max(0, int(value * bins)))] += 1
    tallest = max((sum(column) for column in zip(*counts, strict=True)), default=0) or 1
    left, top, plot_w, plot_h = 34, 8, 560, 150
    step = plot_w / bins
    shapes = []
    for tick in sorted({0, tallest // 2, tallest}):
        y = top + plot_h * (1 - tick / tallest)
        shapes.append(
            Markup('<line class="grid" x1="{}" x2="{}" y1="{:.1f}" y2="{:.1f}"/>').format(left, left + plot_w, y, y)
        )
        shapes.append(
            Markup('<text class="label" x="{}" y="{:.1f}" text-anchor="end">{}</text>').format(left - 6, y + 4, tick)
        )
    for column in range(bins):
        y = float(top + plot_h)
        for row, (kind, _) in zip(counts, parts, strict=True):
            if row[column]:
                height = plot_h * row[column] / tallest
                y -= height
                shapes.append(
                    Markup(
                        '<rect class="{}" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}">'
                        "<title>{:.2f} to {:.2f}: {} episodes</title></rect>"
                    ).format(
                        kind,
                        left + step * column + 1.5,
                        y,
                        step - 3,
                        height,
                        column / bins,
                        (column + 1) / bins,
                        row[column],
                    )
                )
    for value in (0, 0.25, 0.5, 0.75, 1):
        shapes.append(
            Markup('<text class="label" x="{:.1f}" y="{}" text-anchor="middle">{}</text>').format(
                left + plot_w * value, top + plot_h + 18, f"{value:g}"
            )
        )
    return Markup('<svg class="histogram" viewBox="0 0 604 186" role="img" aria-label="Distribution">{}</svg>').format(
        Markup("").join(shapes)
    )
