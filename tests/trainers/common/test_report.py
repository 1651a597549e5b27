"""Curves of a training report, as SVG."""

from __future__ import annotations

import math
import re

from clawgym.trainers.common.report import curve


def texts(svg: str) -> list[tuple[float, float, str]]:
    """(x, y, text) of each label."""
    found = re.findall(r'<text x="([\d.]+)" y="([\d.]+)"[^>]*>([^<]*)</text>', svg)
    return [(float(x), float(y), text) for x, y, text in found]


def test_chart_line_spans_the_axes() -> None:
    svg = str(curve([("score", [(0, 1.0), (5, 2.0), (10, 3.0)])], width=500, height=180))
    line = re.search(r'<polyline class="c0" points="([^"]*)"><title>score</title>', svg)
    assert line is not None
    assert line[1] == "52.0,158.0 272.0,83.0 492.0,8.0"
    assert texts(svg) == [
        (46, 162, "1"), (46, 87, "2"), (46, 12, "3"), (52, 174, "0"), (492, 174, "10"),
    ]  # fmt: skip


def test_chart_band_stays_within_bounds() -> None:
    svg = str(curve([("s", [(0, 0.5), (1, 0.5)])], bands=[[(0, -0.2, 1.2), (1, 0.25, 0.75)]], low=0.0, high=1.0))
    band = re.search(r'<polygon class="band c0" points="([^"]*)"', svg)
    assert band is not None
    heights = [float(point.split(",")[1]) for point in band[1].split()]
    assert heights == [8.0, 45.5, 120.5, 158.0]


def test_chart_skips_nan_and_is_empty_without_points() -> None:
    svg = str(curve([("loss", [(0, 1.0), (1, math.nan), (2, 2.0), (3, math.inf)])]))
    line = re.search(r'points="([^"]*)"', svg)
    assert line is not None
    assert len(line[1].split()) == 2
    assert curve([]) == curve([("loss", [(0, math.nan)])]) == ""
