"""The gate between a candidate version and the users: promoted, kept as a candidate, or rejected.

Invariants:

- Over a service's lifetime, the probability that any candidate is promoted that is no better than the serving version,
  or worse than the first version by more than a margin, is at most ``GateRules.alpha``.
- A candidate is judged by held-out turns that came after the last decision that its weights can depend on. So nothing
  that decisions told about older turns can help it. Between two decisions, weights must not depend on figures of the
  gate.
- One number belongs to one comparison. A candidate that is compared with a new serving version takes a new number.
- Scores that are missing, repeated or out of range are errors. They are never filled in.

``docs/concepts/promotion.md`` has the rules, their sources and what they assume.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from clawgym.online.betting import lower_bound, spend, upper_bound

__all__ = [
    "CandidateVersion",
    "Criterion",
    "Figures",
    "GateRules",
    "Lifetime",
    "PairedEvidence",
    "PlannedItem",
    "PromotionDecision",
    "Verdict",
    "VersionScore",
    "decide",
]

Criterion = Literal["turns", "tasks", "style", "safety"]
"""``turns``: held-out turns, against the serving version. The others are against the first version."""
Verdict = Literal["promoted", "candidate", "rejected"]
_CRITERIA: tuple[Criterion, ...] = get_args(Criterion)


@dataclass(frozen=True, slots=True)
class GateRules:
    """The settings of the gate."""

    alpha: float = 0.05
    """Largest probability of any false promotion in the lifetime of the service."""
    margins: Mapping[Criterion, float] = field(default_factory=lambda: {"tasks": 0.1, "style": 0.1, "safety": 0.05})
    """The loss against the first version that is still accepted, for each of these three criteria."""
    sources: int = 2
    """The fewest sources of scores (such as judges) of held-out turns. With two or more, the gain must show without
    any one of them. With 1, a judge that likes every candidate can promote it."""
    reject_alpha: float = 0.05
    """Largest probability that a candidate that should pass is ever rejected; all four criteria share it."""

    def __post_init__(self) -> None:
        for name, value in (("alpha", self.alpha), ("reject_alpha", self.reject_alpha)):
            if not 0 < value < 1:
                raise ValueError(f"{name}={value}: give a number between 0 and 1")
        if set(self.margins) != set(_CRITERIA) - {"turns"}:
            raise ValueError(f"margins for {sorted(self.margins)}: give one for each of tasks, style and safety")
        for criterion, margin in self.margins.items():
            if not 0 < margin < 1:
                raise ValueError(f"the margin of {criterion} is {margin}: give a number between 0 and 1")
        if self.sources < 1:
            raise ValueError(f"sources={self.sources}: give 1 or more")


@dataclass(frozen=True, slots=True)
class PlannedItem:
    """A held-out turn, a task or a canary that both versions are to answer."""

    id: str
    group: str
    """The session of a turn; the task of a sample. The items of one group count as one value, their mean, as they are
    correlated. A session is planned when it has ended."""
    at: float = 0.0
    """When the session began, on the clock of :class:`Lifetime`. Used for held-out turns only."""


@dataclass(frozen=True, slots=True)
class VersionScore:
    """The score that one source gave to the answer of one version to one item."""

    item: str
    version: str
    value: float
    """In [0, 1]."""
    source: str = "verifier"

    def __post_init__(self) -> None:
        if not 0 <= self.value <= 1:  # NaN is not
            raise ValueError(f"{self.item}: a score of {self.value} by {self.source}: give a number in [0, 1]")


@dataclass(frozen=True, slots=True)
class PairedEvidence:
    """The scores of one criterion: what was planned, in order, and what two versions got so far."""

    items: Sequence[PlannedItem]
    """All items of the criterion in the order in which they are scored, which must not depend on scores."""
    scores: Sequence[VersionScore]

    def differences(self, version: str, other: str) -> dict[str, NDArray[np.float64]]:
        """Source -> mean difference of each group, ``version`` minus ``other``, in [-1, 1], in the planned order.

        A group counts when every source has scored both versions on all of its items. The last groups may be
        incomplete; they do not count yet.

        Raises:
            ValueError: an item or a score is there twice, belongs to nothing that was planned, or is missing while
                later groups are scored.
        """
        return _differences(self.items, self.scores, version, other)


@dataclass(frozen=True, slots=True)
class CandidateVersion:
    """One comparison of a version with the serving and the first version (:meth:`Lifetime.submit`)."""

    version: str
    number: int
    """Which comparison of the service it is, from 1. It decides the level of its tests."""
    serving: str
    first: str
    after: float
    """When the last decision was made that it can depend on. Only sessions that began later count."""


@dataclass(frozen=True, slots=True)
class Figures:
    """What one criterion shows about a candidate."""

    criterion: Criterion
    n: int
    """Number of groups: sessions, or tasks."""
    mean: float | None
    """Mean difference, candidate minus the other version; None without groups."""
    lower: float
    """Lower bound at ``alpha``. With several sources, the least of the bounds without one of them."""
    upper: float
    """Upper bound at a quarter of ``GateRules.reject_alpha``."""
    needed: float
    """What the lower bound must exceed: 0, or minus the margin."""
    alpha: float
    sources: int

    @property
    def passed(self) -> bool:
        return self.lower > self.needed

    @property
    def failed(self) -> bool:
        """Whether the criterion is clearly not met."""
        return self.upper < self.needed


@dataclass(frozen=True, slots=True)
class PromotionDecision:
    """The verdict on a candidate, with the figures of every criterion and the reasons in words."""

    candidate: CandidateVersion
    verdict: Verdict
    figures: Mapping[Criterion, Figures]
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Lifetime:
    """Which versions a service has served and compared. Immutable: each method returns a new one.

    Numbers are never used again, whatever happens to a candidate, so a service must keep this object across restarts
    (``dataclasses.asdict``).
    """

    served: tuple[str, ...]
    """The versions that were promoted and not rolled back. The first is the first version, the last is serving."""
    rules: GateRules = field(default_factory=GateRules)
    submitted: int = 0
    open: tuple[CandidateVersion, ...] = ()
    now: float = 0.0
    """Time of the last event."""
    decided: float = 0.0
    """Time of the last promotion or rollback."""
    rejections: tuple[tuple[str, float], ...] = ()
    """The versions that were rejected since then, and when."""

    def __post_init__(self) -> None:
        if not self.served:
            raise ValueError("a service without versions: give the first version")

    def submit(self, version: str, at: float, made: float | None = None) -> Lifetime:
        """Open a comparison of ``version`` at time ``at`` with the serving version.

        ``made`` is when its weights were fixed, by default ``at``. Rejections of others that came later do not shorten
        the turns that it is judged by, since it cannot depend on them.

        Raises:
            ValueError: the version is being compared or is serving, ``at`` is before the last event, or ``made`` is
                after ``at``.
        """
        later = self._at(at)
        if version == self.served[-1] or any(version == one.version for one in self.open):
            raise ValueError(f"{version} is serving or being compared already: submit another version")
        made = at if made is None else made
        if not made <= at:  # NaN is not
            raise ValueError(f"{version} was made at {made}, after the present time {at}: correct it")
        known = [time for name, time in self.rejections if name == version or time <= made]
        after = max([self.decided, *known])
        one = CandidateVersion(version, self.submitted + 1, self.served[-1], self.served[0], after)
        return replace(later, submitted=one.number, open=(*self.open, one))

    def decide(self, version: str, evidence: Mapping[Criterion, PairedEvidence]) -> PromotionDecision:
        """:func:`decide` on an open candidate. Raises ValueError if it is not open."""
        return decide(self._candidate(version), evidence, self.rules)

    def close(self, version: str) -> Lifetime:
        """End a comparison for a reason that does not depend on scores; its level is not given back."""
        self._candidate(version)
        return replace(self, open=tuple(one for one in self.open if one.version != version))

    def reject(self, version: str, at: float) -> Lifetime:
        """End a comparison by a decision.

        Raises:
            ValueError: the version is not open, or ``at`` is before the last event.
        """
        return replace(self.close(version)._at(at), rejections=(*self.rejections, (version, at)))

    def promote(self, decision: PromotionDecision, at: float) -> Lifetime:
        """Serve the promoted version. All open comparisons end: they were with the version that served before.

        Raises:
            ValueError: the verdict is not ``promoted``, the candidate is not open, or ``at`` is before the last event.
        """
        version = decision.candidate.version
        if decision.verdict != "promoted" or self._candidate(version) != decision.candidate:
            raise ValueError(f"{version} was not promoted over {self.served[-1]}: decide again")
        return replace(self._at(at), served=(*self.served, version), open=(), decided=at, rejections=())

    def roll_back(self, at: float) -> Lifetime:
        """Serve the version before the serving one again. All open comparisons end.

        Raises:
            ValueError: the first version is serving, or ``at`` is before the last event.
        """
        if len(self.served) == 1:
            raise ValueError(f"{self.served[0]} is the first version: there is none to go back to")
        return replace(self._at(at), served=self.served[:-1], open=(), decided=at, rejections=())

    def _candidate(self, version: str) -> CandidateVersion:
        for one in self.open:
            if one.version == version:
                return one
        raise ValueError(f"{version} is not being compared: submit it again")

    def _at(self, at: float) -> Lifetime:
        if not at >= self.now:  # NaN is not
            raise ValueError(f"time {at} is before the last event, {self.now}: give the present time")
        return replace(self, now=at)


def decide(
    candidate: CandidateVersion, evidence: Mapping[Criterion, PairedEvidence], rules: GateRules
) -> PromotionDecision:
    """Decide on a candidate from the scores so far. May be called after every new score.

    - ``promoted``: the lower bound of the gain over the serving version is above 0, and the lower bounds of the
      differences from the first version are above minus their margins.
    - ``rejected``: the upper bound of one of these is below what it must exceed.
    - ``candidate``: neither; more scores may come.

    Raises:
        ValueError: a criterion is missing, a turn is not newer than the last decision, or the scores do not fit the
            plan (:meth:`PairedEvidence.differences`).
    """
    if set(evidence) != set(_CRITERIA):
        raise ValueError(f"evidence for {sorted(evidence)}: give turns, tasks, style and safety, empty ones too")
    old = [item.id for item in evidence["turns"].items if not item.at > candidate.after]
    if old:
        raise ValueError(
            f"turn {old[0]} and {len(old) - 1} others are not newer than the last decision before {candidate.version}: "
            f"give the held-out turns of sessions that began after {candidate.after}"
        )
    figures: dict[Criterion, Figures] = {
        criterion: _figures(criterion, candidate, evidence[criterion], rules) for criterion in _CRITERIA
    }
    failed = [one for one in figures.values() if one.failed]
    waiting = list(_waiting(figures, rules))
    if failed:
        return PromotionDecision(candidate, "rejected", figures, tuple(map(_why_failed, failed)))
    if waiting:
        return PromotionDecision(candidate, "candidate", figures, tuple(waiting))
    return PromotionDecision(candidate, "promoted", figures, tuple(map(_why_passed, figures.values())))


def _figures(criterion: Criterion, candidate: CandidateVersion, evidence: PairedEvidence, rules: GateRules) -> Figures:
    other = candidate.serving if criterion == "turns" else candidate.first
    by_source = evidence.differences(candidate.version, other)
    alpha = spend(candidate.number, rules.alpha)
    needed = 0.0 if criterion == "turns" else -rules.margins[criterion]
    values = np.array(list(by_source.values()))
    whole = values.mean(axis=0) if by_source else np.zeros(0)
    views = [np.delete(values, i, axis=0).mean(axis=0) for i in range(len(values))] if len(values) > 1 else [whole]
    return Figures(
        criterion,
        whole.size,
        float(whole.mean()) if whole.size else None,
        min(lower_bound(view, alpha) for view in views),
        upper_bound(whole, rules.reject_alpha / len(_CRITERIA)),
        needed,
        alpha,
        len(by_source),
    )


def _differences(
    items: Sequence[PlannedItem], scores: Sequence[VersionScore], version: str, other: str
) -> dict[str, NDArray[np.float64]]:
    planned = Counter(item.id for item in items)
    twice = [id for id, count in planned.items() if count > 1]
    if twice:
        raise ValueError(f"item {twice[0]} is planned twice: give each id once")
    held: dict[tuple[str, str, str], float] = {}
    for score in scores:
        if score.item not in planned or score.version not in (version, other):
            raise ValueError(
                f"a score of item {score.item} and version {score.version} belongs to nothing planned: leave it out"
            )
        if (score.source, score.version, score.item) in held:
            raise ValueError(f"{score.source} scored item {score.item} of {score.version} twice: give one score")
        held[score.source, score.version, score.item] = score.value
    sources = sorted({source for source, _, _ in held})
    groups = [(name, [item.id for item in group]) for name, group in groupby(items, key=lambda item: item.group)]
    parted = [name for name, count in Counter(name for name, _ in groups).items() if count > 1]
    if parted:
        raise ValueError(f"group {parted[0]} is planned in two places: give the items of a group together")
    rows: list[list[float]] = []
    missing: tuple[str, str, str] | None = None
    for _, ids in groups if sources else ():
        gaps = [(s, v, id) for id in ids for s in sources for v in (version, other) if (s, v, id) not in held]
        if gaps:
            missing = missing or gaps[0]
        elif missing:
            source, lacking, id = missing
            raise ValueError(
                f"item {id} of {lacking} has no score of {source}, but later groups have: "
                "score it, and give 0 to an answer that failed"
            )
        else:
            rows.append([float(np.mean([held[s, version, id] - held[s, other, id] for id in ids])) for s in sources])
    values = np.array(rows).reshape(len(rows), len(sources))
    return {source: values[:, i] for i, source in enumerate(sources)}


def _waiting(figures: Mapping[Criterion, Figures], rules: GateRules) -> Iterator[str]:
    turns = figures["turns"]
    if turns.sources < rules.sources:
        yield f"turns: scores of {turns.sources} sources; {rules.sources} are needed, so that no one alone decides"
    for one in figures.values():
        if not one.passed:
            yield f"{_told(one)}: the lower bound {one.lower:+.3f} is not above {one.needed:+.3f} yet"


def _why_failed(one: Figures) -> str:
    return f"{_told(one)}: clearly worse, as the upper bound {one.upper:+.3f} is below {one.needed:+.3f}"


def _why_passed(one: Figures) -> str:
    return f"{_told(one)}: the lower bound {one.lower:+.3f} is above {one.needed:+.3f}"


def _told(one: Figures) -> str:
    against = "serving" if one.criterion == "turns" else "first"
    mean = "no difference known" if one.mean is None else f"mean difference {one.mean:+.3f}"
    return f"{one.criterion}: {mean} from the {against} version over n={one.n}"
