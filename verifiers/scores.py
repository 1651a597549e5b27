"""Convert a verifier's output to named checks and scores. Pure functions.

``official`` equals the score of each format's original harness exactly. ClawGym's harness (``reward.sh`` of the public
data) scores 0.0 for a non-zero exit code and for missing or invalid output. Otherwise the score is the float in the
last non-empty line of stdout. The standard ``reward.sh`` computes it as the mean of all values of the checker's JSON
object.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

__all__ = [
    "COMPOSITE_KEYS",
    "checks_of",
    "baseline_adjusted",
    "last_line_score",
    "out_of_range",
    "plain_mean",
    "standard_score",
    "without_composites",
]

COMPOSITE_KEYS = frozenset(
    {
        "reward",
        "score",
        "total",
        "overall",
        "final",
        "final_reward",
        "final_score",
        "overall_reward",
        "overall_score",
        "total_reward",
        "total_score",
        "weighted_score",
    }
)
"""Keys that summarize the others in one number. They are part of ``official``, but not of the baseline-adjusted
score."""


def standard_score(stdout: str) -> tuple[float, dict[str, float]]:
    """The score and the named checks that the standard ``reward.sh`` computes from the checker's stdout.

    Raises ValueError or TypeError where the standard script would end with an error, which scores 0.
    """
    data = json.loads(stdout.strip())
    if isinstance(data, dict) and data:
        values = {str(k): float(v) for k, v in data.items()}
        return sum(values.values()) / len(values), values
    if isinstance(data, int | float):
        return float(data), {"score": float(data)}
    return 0.0, {}


def last_line_score(stdout: str) -> float:
    """The float in the last non-empty line; 0.0 if there is none or it is not a number."""
    lines = [line for line in stdout.splitlines() if line.strip()]
    try:
        return float(lines[-1].strip())
    except (IndexError, ValueError):
        return 0.0


def checks_of(values: Mapping[str, float]) -> dict[str, float]:
    """Named checks, clipped to [0, 1]; NaN and infinite values become 0."""
    return {k: min(1.0, max(0.0, v)) if math.isfinite(v) else 0.0 for k, v in values.items()}


def out_of_range(values: Mapping[str, float]) -> tuple[str, ...]:
    """Names of the checks whose score is below 0, above 1 or NaN."""
    return tuple(name for name, score in values.items() if not 0 <= score <= 1)


def without_composites(checks: Mapping[str, float]) -> dict[str, float]:
    """The checks without composite keys; all checks if there are only composite ones."""
    return {k: v for k, v in checks.items() if k not in COMPOSITE_KEYS} or dict(checks)


def plain_mean(checks: Mapping[str, float]) -> float:
    """Mean of the non-composite checks; 0.0 without any."""
    kept = without_composites(checks)
    return math.fsum(kept.values()) / len(kept) if kept else 0.0


def baseline_adjusted(score: float, baseline: float) -> float:
    """The baseline-adjusted score max(0, (s - b) / (1 - b)), for the no-model baseline b; 0 if b is 1."""
    return max(0.0, (score - baseline) / (1 - baseline)) if baseline < 1 else 0.0
