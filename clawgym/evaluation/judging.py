"""How models judged the episodes of a run: their votes, how far these agree, and what they cost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import comb, isfinite
from typing import Any

from clawgym.statistics import as_float, krippendorff_alpha

__all__ = ["JudgeAgreement", "judging_of"]


@dataclass(frozen=True)
class JudgeAgreement:
    """The votes of one grader with one model."""

    episodes: int
    """Number of graded episodes whose votes are known."""
    asked: int
    """How many votes were asked for."""
    read: int
    """How many votes could be read."""
    alpha: float | None
    """Krippendorff's alpha of the votes, each criterion of an episode being one unit; ``None`` if it is undefined
    (:func:`~clawgym.statistics.krippendorff_alpha`)."""
    same_verdict: float | None
    """Share of pairs of votes on one criterion of an episode that agree on whether it is wholly fulfilled (a score of
    1); ``None`` without pairs."""
    prompt_tokens: int
    completion_tokens: int
    cost_usd: float | None
    """``None`` if no price is known."""

    def __str__(self) -> str:
        parts = [f"{self.read:,} of {self.asked:,} votes read"]
        if self.alpha is not None:
            parts.append(f"agreement {self.alpha:.2f} (Krippendorff's alpha)")
        if self.same_verdict is not None:
            parts.append(f"{100 * self.same_verdict:.1f}% of pairs have the same verdict")
        cost = "" if self.cost_usd is None else f", ${self.cost_usd:.4f}"
        parts.append(f"{self.prompt_tokens:,} tokens in, {self.completion_tokens:,} out{cost}")
        return "; ".join(parts)


def judging_of(judgements: Iterable[Any]) -> JudgeAgreement | None:
    """Sum up the field ``judgement`` of stored results; ``None`` without any. What has another form is left out."""
    given = [one for one in judgements if isinstance(one, Mapping)]
    if not given:
        return None
    criteria = [[_numbers(votes) for votes in _values(one.get("votes"))] for one in given]
    units = [unit for units in criteria for unit in units]
    pairs = same = 0
    for unit in units:
        fulfilled = sum(vote >= 1 for vote in unit)
        pairs += comb(len(unit), 2)
        same += comb(fulfilled, 2) + comb(len(unit) - fulfilled, 2)
    costs = _numbers([one.get("cost_usd") for one in given])
    return JudgeAgreement(
        episodes=len(given),
        asked=_total(given, "asked"),
        read=sum(max(map(len, units), default=0) for units in criteria),
        alpha=krippendorff_alpha(units),
        same_verdict=same / pairs if pairs else None,
        prompt_tokens=_total(given, "prompt_tokens"),
        completion_tokens=_total(given, "completion_tokens"),
        cost_usd=sum(costs) if costs else None,
    )


def _values(votes: Any) -> Iterable[Any]:
    return votes.values() if isinstance(votes, Mapping) else ()


def _numbers(values: Any) -> list[float]:
    """The finite numbers in a list."""
    listed = values if isinstance(values, Sequence) and not isinstance(values, str) else ()
    given = (as_float(value) for value in listed if isinstance(value, int | float) and not isinstance(value, bool))
    return [value for value in given if isfinite(value)]


def _total(given: Iterable[Mapping[str, Any]], name: str) -> int:
    return int(sum(_numbers([one.get(name) for one in given])))
