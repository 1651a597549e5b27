"""From what a verifier printed to named checks and numbers. Pure functions.

``official`` follows each format's own harness to the bit. ClawGym's (``reward.sh`` of the public data): exit
code other than 0, unparsable or missing output: 0.0; else the float of the last non-empty stdout line, which
the standard ``reward.sh`` computes as the plain mean over all values of the checker's JSON object.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

__all__ = [
    "COMPOSITE_KEYS",
    "checks_of",
    "corrected",
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
"""Keys that repeat the others in one number. They count in ``official`` and are left out of ``corrected``."""


def standard_score(stdout: str) -> tuple[float, dict[str, float]]:
    """What the standard ``reward.sh`` computes from the checker's stdout: (score, named checks).

    Raises ValueError (or TypeError) where the standard script would end with an error, so score 0.
    """
    data = json.loads(stdout.strip())
    if isinstance(data, dict) and data:
        values = {str(k): float(v) for k, v in data.items()}
        return sum(values.values()) / len(values), values
    if isinstance(data, int | float):
        return float(data), {"score": float(data)}
    return 0.0, {}


def last_line_score(stdout: str) -> float:
    """The float of the last non-empty line; 0.0 if there is none or it is not a number."""
    lines = [line for line in stdout.splitlines() if line.strip()]
    try:
        return float(lines[-1].strip())
    except (IndexError, ValueError):
        return 0.0


def checks_of(values: Mapping[str, float]) -> dict[str, float]:
    """Named checks held to [0, 1]; what is not a finite number is 0."""
    return {k: min(1.0, max(0.0, v)) if math.isfinite(v) else 0.0 for k, v in values.items()}


def out_of_range(values: Mapping[str, float]) -> tuple[str, ...]:
    """Names of the checks whose score is below 0, above 1 or NaN."""
    return tuple(name for name, score in values.items() if not 0 <= score <= 1)


def without_composites(checks: Mapping[str, float]) -> dict[str, float]:
    """The checks without composite keys; all of them if there is nothing else."""
    return {k: v for k, v in checks.items() if k not in COMPOSITE_KEYS} or dict(checks)


def plain_mean(checks: Mapping[str, float]) -> float:
    """Mean of the non-composite checks; 0.0 without any."""
    kept = without_composites(checks)
    return math.fsum(kept.values()) / len(kept) if kept else 0.0


def corrected(score: float, floor: float) -> float:
    """max(0, (s - f) / (1 - f)); 0 where the floor is 1 (nothing is left to earn)."""
    return max(0.0, (score - floor) / (1 - floor)) if floor < 1 else 0.0
