"""Does the gate of online learning hold what it promises, and how many held-out turns does it need?

    python benchmarks/promotion.py                    # 10,000 lifetimes of 200 candidates; about five minutes
    python benchmarks/promotion.py --lifetimes 500    # rougher and quicker

Simulations with a known truth, vectorised (docs/concepts/promotion.md). A figure that is a share of n lifetimes has a
chance error of about sqrt(p (1 - p) / n).
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from clawgym.online.betting import FRACTIONS, log_evidence, spend, within_reach
from clawgym.online.watch import LiveSignal, watch

Array = NDArray[np.floating]
Generator = np.random.Generator
ALPHA = 0.05
CANDIDATES = 200
TURNS = 300
NUMBERS = (1, 10, 50, 200)
_CHUNK = 250
"""Lifetimes simulated at once, so that their wealth stays in the cache."""
_Q = 0.8
"""Power."""


# Differences of two versions that are equally good. ``shape`` is (lifetimes, candidates); one call is one turn.
def graded(generator: Generator, lifetimes: int, candidates: int) -> Array:
    """Scores between 0 and 1 around the turn's difficulty."""
    base = generator.random((lifetimes, 1), dtype=np.float32)
    serving = base + 0.5 * (generator.random((lifetimes, 1), dtype=np.float32) - 0.5)
    version = base + 0.5 * (generator.random((lifetimes, candidates), dtype=np.float32) - 0.5)
    return np.clip(version, 0, 1) - np.clip(serving, 0, 1)


def votes(generator: Generator, lifetimes: int, candidates: int) -> Array:
    """Scores of 0 and 1; a candidate differs from the serving version on 40 % of the turns."""
    serving = generator.random((lifetimes, 1), dtype=np.float32) < 0.5
    differs = generator.random((lifetimes, candidates), dtype=np.float32) < 0.4
    return np.where(differs, np.where(serving, np.float32(-1), np.float32(1)), np.float32(0))


def skewed(generator: Generator, lifetimes: int, candidates: int) -> Array:
    """The serving version always has 0.9. A candidate has 1, but 0 on half of the hard turns, one in five."""
    hard = generator.random((lifetimes, 1), dtype=np.float32) < 0.2
    fails = (generator.random((lifetimes, candidates), dtype=np.float32) < 0.5) & hard
    return np.where(fails, np.float32(-0.9), np.float32(0.1))


NULLS: dict[str, Callable[[Generator, int, int], Array]] = {"graded": graded, "votes": votes, "skewed": skewed}


def levels(candidates: int = CANDIDATES) -> NDArray[np.float32]:
    """The wealth that each candidate needs."""
    return np.array([1 / spend(k, ALPHA) for k in range(1, candidates + 1)], dtype=np.float32)


class Wealth:
    """The evidence of many comparisons, turn by turn: what :func:`clawgym.online.betting.log_evidence` computes."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.bets = [np.ones(shape, dtype=np.float32) for _ in FRACTIONS]

    def add(self, differences: Array) -> Array:
        """Take the values of one turn; returns the evidence that the mean is above 0."""
        for fraction, bet in zip(FRACTIONS, self.bets, strict=True):
            bet *= 1 + np.float32(fraction) * differences
        return sum(self.bets[1:], self.bets[0].copy()) / len(FRACTIONS)


def false_promotions(kind: str, lifetimes: int, turns: int = TURNS, seed: int = 0) -> tuple[float, float]:
    """Share of lifetimes with any promotion of 200 candidates that are no better, with a look after each turn.

    All candidates are compared on the same turns. Second: the share if each candidate has the level 5 % of its own.
    """
    generator = np.random.default_rng(seed)
    needed, found, alone = levels(), 0, 0
    for start in range(0, lifetimes, _CHUNK):
        count = min(_CHUNK, lifetimes - start)
        wealth, most = Wealth((count, CANDIDATES)), np.zeros((count, CANDIDATES), dtype=np.float32)
        for _ in range(turns):
            np.maximum(most, wealth.add(NULLS[kind](generator, count, CANDIDATES)), out=most)
        found += int((most >= needed).any(axis=1).sum())
        alone += int((most >= 1 / ALPHA).any(axis=1).sum())
    return found / lifetimes, alone / lifetimes


def fixed_test(kind: str, lifetimes: int, turns: int = TURNS, seed: int = 0) -> float:
    """The same with a z-test at the level of each candidate, looked at after each turn from the 20th on."""
    from statistics import NormalDist

    generator = np.random.default_rng(seed)
    z = np.array([NormalDist().inv_cdf(1 - spend(k, ALPHA)) for k in range(1, CANDIDATES + 1)])
    total, squares = np.zeros((lifetimes, CANDIDATES)), np.zeros((lifetimes, CANDIDATES))
    hit = np.zeros((lifetimes, CANDIDATES), dtype=bool)
    for n in range(1, turns + 1):
        d = NULLS[kind](generator, lifetimes, CANDIDATES)
        total += d
        squares += d * d
        if n >= 20:
            mean = total / n
            hit |= mean > z * np.sqrt(np.maximum(squares / n - mean**2, 0) / (n - 1))
    return float(hit.any(axis=1).mean())


def correlated(lifetimes: int, sessions: int = 150, length: int = 4, seed: int = 0) -> tuple[float, float]:
    """Share of lifetimes with a false promotion if turns of a session are correlated: one value a turn, a session.

    In half of the sessions a candidate wins often, in the other half it loses as often: votes, intraclass correlation
    0.35.
    """
    generator = np.random.default_rng(seed)
    needed = levels()
    shape = (lifetimes, CANDIDATES)
    hit = {"turn": np.zeros(lifetimes, dtype=bool), "session": np.zeros(lifetimes, dtype=bool)}
    by_turn, by_session = Wealth(shape), Wealth(shape)
    for _ in range(sessions):
        better = np.where(generator.random(shape, dtype=np.float32) < 0.5, np.float32(0.8), np.float32(0.2))
        total = np.zeros(shape, dtype=np.float32)
        for _ in range(length):
            u = generator.random(shape, dtype=np.float32)
            d = np.where(u < 0.4 * better, np.float32(1), np.where(u < 0.4, np.float32(-1), np.float32(0)))
            total += d
            hit["turn"] |= (by_turn.add(d) >= needed).any(axis=1)
        hit["session"] |= (by_session.add(total / length) >= needed).any(axis=1)
    return float(hit["turn"].mean()), float(hit["session"].mean())


def hill_climb(lifetimes: int, turns: int = TURNS, seed: int = 0) -> tuple[float, float]:
    """Share of lifetimes with a false promotion among candidates that are random changes of one another.

    A candidate redraws its votes on a tenth of the turns, which is no real gain, and all are judged on the same turns.
    First: each is made from the best one so far, by a trainer that sees scores. Second: each is made from the last one,
    or from the serving version after a rejection, which brings new turns: the trainer learns of decisions alone.
    """
    generator = np.random.default_rng(seed)

    def votes_of(lifetimes: int) -> NDArray[np.bool_]:
        return generator.random((lifetimes, turns)) < 0.5

    serving, best = votes_of(lifetimes), votes_of(lifetimes)
    blind_serving, line = votes_of(lifetimes), votes_of(lifetimes)
    seeing, blind = np.zeros(lifetimes, dtype=bool), np.zeros(lifetimes, dtype=bool)
    for number in range(1, CANDIDATES + 1):
        needed = 1 / spend(number, ALPHA)
        made = np.where(generator.random((lifetimes, turns)) < 0.1, votes_of(lifetimes), best)
        seeing |= (_paths(made.astype(np.float32) - serving) >= needed).any(axis=1)
        best = np.where((made.sum(axis=1) > best.sum(axis=1))[:, None], made, best)
        line = np.where(generator.random((lifetimes, turns)) < 0.1, votes_of(lifetimes), line)
        gain = line.astype(np.float32) - blind_serving
        blind |= (_paths(gain) >= needed).any(axis=1)
        rejected = (_paths(-gain) >= 4 / ALPHA).any(axis=1)
        blind_serving[rejected], line[rejected] = votes_of(int(rejected.sum())), votes_of(int(rejected.sum()))
    return float(seeing.mean()), float(blind.mean())


def _paths(differences: Array) -> Array:
    """The evidence after each value of the last axis."""
    total = np.zeros_like(differences)
    for fraction in FRACTIONS:
        total += np.cumprod(1 + np.float32(fraction) * differences, axis=-1)
    return total / len(FRACTIONS)


def improving(lifetimes: int, turns: int = 1000, seed: int = 0) -> tuple[float, float, float]:
    """A service that does improve: 40 rounds of 5 candidates on the same turns, which came after the last decision.

    One in ten is better than the serving version by 0.1, six are equal, three are worse by 0.05 (graded scores). A
    round ends with the first promotion, or after ``turns``.

    Returns:
        Share of lifetimes with a false promotion, share of rounds with a better candidate that promote one, promotions
        in a lifetime.
    """
    generator = np.random.default_rng(seed)
    needed = levels()
    wrong, good, chances, promotions = np.zeros(lifetimes, dtype=bool), 0, 0, 0
    for block in range(CANDIDATES // 5):
        gain = generator.choice(np.array([0.1, 0, -0.05], dtype=np.float32), p=[0.1, 0.6, 0.3], size=(lifetimes, 5))
        wealth = Wealth((lifetimes, 5))
        chosen = np.full(lifetimes, -1)
        for _ in range(turns):
            d = np.clip(gain + graded(generator, lifetimes, 5), -1, 1)
            crossed = wealth.add(d) >= needed[5 * block : 5 * block + 5]
            first = (chosen < 0) & crossed.any(axis=1)
            chosen[first] = crossed[first].argmax(axis=1)
        promoted = chosen >= 0
        its_gain = gain[np.arange(lifetimes), np.maximum(chosen, 0)]
        wrong |= promoted & (its_gain <= 0)
        better = (gain > 0).any(axis=1)
        chances += int(better.sum())
        good += int((promoted & (its_gain > 0)).sum())
        promotions += int(promoted.sum())
    return float(wrong.mean()), good / chances, promotions / lifetimes


# Differences with a true gain, one column a turn.
def normal(spread: float) -> Callable[[Generator, float, int, int], Array]:
    """Normal differences, cut to [-1, 1]."""
    return lambda generator, gain, runs, turns: np.clip(generator.normal(gain, spread, (runs, turns)), -1, 1)


def changed(share: float) -> Callable[[Generator, float, int, int], Array]:
    """Votes of 0 and 1; this share of the turns changes, one way or the other."""

    def draw(generator: Generator, gain: float, runs: int, turns: int) -> Array:
        u = generator.random((runs, turns))
        return np.where(u < (share + gain) / 2, 1.0, np.where(u < share, -1.0, 0.0))

    return draw


SPREADS = {
    "graded scores, spread 0.2": (0.2, normal(0.2)),
    "graded scores, spread 0.3": (0.3, normal(0.3)),
    "votes, 20 % of turns change": (math.sqrt(0.2 - 0.01), changed(0.2)),
    "votes, 40 % of turns change": (math.sqrt(0.4 - 0.01), changed(0.4)),
}


def first_crossing(evidence: Array, needed: float) -> int | None:
    """The number of values after which 80 % of the runs (rows) have crossed; None if they have not."""
    hit = evidence >= needed
    if hit.any(axis=1).mean() < _Q:
        return None
    return int(np.quantile(np.where(hit.any(axis=1), hit.argmax(axis=1) + 1, hit.shape[1] + 1), _Q, method="higher"))


def agrapa(differences: Array, cap: float = 0.9) -> Array:
    """Evidence of the approximate GRAPA bets of Waudby-Smith and Ramdas (2023)."""
    n = np.arange(1, differences.shape[1] + 1)
    mean = np.cumsum(differences, axis=1) / (n + 1)
    variance = (0.25 + np.cumsum((differences - mean) ** 2, axis=1)) / (n + 1)
    mean, variance = _delayed(mean, 0.0), _delayed(variance, 0.25)
    return np.exp(np.cumsum(np.log1p(np.clip(mean / (variance + mean**2), 0, cap) * differences), axis=1))


def empirical_bernstein(differences: Array, alpha: float) -> Array:
    """Evidence of their predictable plug-in empirical-Bernstein process."""
    y, n = (1 + differences) / 2, np.arange(1, differences.shape[1] + 1)
    mean = (0.5 + np.cumsum(y, axis=1)) / (n + 1)
    variance = (0.25 + np.cumsum((y - mean) ** 2, axis=1)) / (n + 1)
    mean, variance = _delayed(mean, 0.5), _delayed(variance, 0.25)
    bet = np.minimum(np.sqrt(2 * math.log(1 / alpha) / (variance * n * np.log(1 + n))), 0.5)
    return np.exp(np.cumsum(bet * (y - 0.5) - (y - mean) ** 2 * (-np.log1p(-bet) - bet), axis=1))


def _delayed(values: Array, first: float) -> Array:
    return np.concatenate([np.full((len(values), 1), first), values[:, :-1]], axis=1)


def fixed_size(spread: float, gain: float, alpha: float) -> int:
    """Turns that a z-test at ``alpha`` with one look at the end needs for 80 % power."""
    from statistics import NormalDist

    return math.ceil(((NormalDist().inv_cdf(1 - alpha) + NormalDist().inv_cdf(_Q)) * spread / gain) ** 2)


def power_rows(runs: int, seed: int = 0) -> Iterator[tuple[str, list[int | None]]]:
    """Held-out turns for 80 % power, at a gain of 0.1: the candidates of :data:`NUMBERS`."""
    generator = np.random.default_rng(seed)
    for name, (_, draw) in SPREADS.items():
        evidence = _paths(draw(generator, 0.1, runs, 2400))
        yield name, [first_crossing(evidence, 1 / spend(k, ALPHA)) for k in NUMBERS]
    shared = normal(0.3)(generator, 0.1, runs, 2400)
    judges = [_paths(np.clip(shared + generator.normal(0, 0.2, shared.shape), -1, 1)) for _ in range(2)]
    evidence = np.minimum(*judges)
    yield (
        "two judges, each alone: spread 0.3, and 0.2 of each judge",
        [first_crossing(evidence, 1 / spend(k, ALPHA)) for k in NUMBERS],
    )
    effect = generator.normal(0, 0.15, (runs, 1200))
    sessions = np.mean(
        [np.clip(0.1 + effect + generator.normal(0, 0.26, effect.shape), -1, 1) for _ in range(4)], axis=0
    )
    evidence = _paths(sessions)
    found = [first_crossing(evidence, 1 / spend(k, ALPHA)) for k in NUMBERS]
    yield (
        "sessions of 4 turns, spread 0.3, correlation 0.25 (in turns)",
        [None if one is None else 4 * one for one in found],
    )


def method_rows(runs: int, seed: int = 0) -> Iterator[tuple[str, list[int | None]]]:
    """The same for the first and the 50th candidate by four methods."""
    generator = np.random.default_rng(seed)
    for name, (spread, draw) in SPREADS.items():
        d = draw(generator, 0.1, runs, 2400)
        row: list[int | None] = []
        for number in (1, 50):
            alpha = spend(number, ALPHA)
            found = (_paths(d), agrapa(d), empirical_bernstein(d, alpha))
            row += [first_crossing(one, 1 / alpha) for one in found] + [fixed_size(spread, 0.1, alpha)]
        yield name, row


def gain_rows(runs: int, seed: int = 0) -> Iterator[tuple[str, list[int | None]]]:
    """Turns for 80 % power at other gains, first candidate, graded scores with spread 0.3 and votes."""
    generator = np.random.default_rng(seed)
    for name in ("graded scores, spread 0.3", "votes, 40 % of turns change"):
        draw = SPREADS[name][1]
        yield (
            name,
            [
                first_crossing(_paths(draw(generator, gain, runs, turns)), 1 / spend(1, ALPHA))
                for gain, turns in ((0.05, 5000), (0.1, 2400), (0.2, 1000), (0.3, 600))
            ],
        )


def margin_rows(runs: int, margin: float, seed: int = 0) -> Iterator[tuple[str, list[int | None]]]:
    """Tasks or canaries after which 80 % of the candidates that are equal to the first version pass the margin."""
    generator = np.random.default_rng(seed)
    for name, draw in (
        ("no task changes", changed(0.0)),
        ("5 % of tasks change, one way or the other", changed(0.05)),
        ("20 % of tasks change", changed(0.2)),
        ("graded scores, spread 0.2", normal(0.2)),
        ("32 % of tasks change: both pass four of five, by chance", changed(0.32)),
    ):
        d = draw(generator, 0.0, runs, 6000 if margin < 0.1 else 4000)
        evidence = np.mean([np.cumprod(1 + f * ((1 + d) / (1 - margin) - 1), axis=1) for f in FRACTIONS], axis=0)
        yield name, [first_crossing(evidence, 1 / spend(k, ALPHA)) for k in NUMBERS]


def verdict_rows(runs: int, most: int = 3000, part: int = 40, seed: int = 0) -> Iterator[tuple[str, list[str]]]:
    """Candidates that pass, and that are given up, with a look after each part, and the median number until then."""
    generator, level = np.random.default_rng(seed), spend(1, ALPHA)
    for margin, share, true in (
        (0.05, 0.05, 0.0), (0.05, 0.28, 0.0), (0.05, 0.28, -0.02), (0.05, 0.28, -0.05), (0.05, 0.28, -0.1),
        (0.1, 0.2, 0.0), (0.1, 0.2, -0.05), (0.1, 0.2, -0.1), (0.1, 0.2, -0.15),
    ):  # fmt: skip
        ends: dict[str, list[int]] = {"passes": [], "given up": [], "neither": []}
        for differences in changed(share)(generator, true, runs, most):
            for n in range(part, most + 1, part):
                held = differences[:n]
                if log_evidence(held, -margin) >= -math.log(level):
                    ends["passes"].append(n)
                elif not within_reach(held, -margin, level, most):
                    ends["given up"].append(n)
                elif n == most:
                    ends["neither"].append(n)
                else:
                    continue
                break
        yield (
            f"{margin}, {share:.0%} of replies change, true difference {true:+.2f}",
            [f"{len(n) / runs:.0%}" + (f" ({np.median(n):,.0f})" if n else "") for n in ends.values()],
        )


def spending_rows() -> Iterator[tuple[str, list[float]]]:
    """ln(1 / level) for the candidates of :data:`NUMBERS` and on average over the first 50 and 200."""

    def row(weight: Callable[[int], float]) -> list[float]:
        logs = [-math.log(ALPHA * weight(k)) for k in range(1, CANDIDATES + 1)]
        return [*(logs[k - 1] for k in NUMBERS), sum(logs[:50]) / 50, sum(logs) / len(logs)]

    for c in (1, 5, 20, 100):
        yield f"c / ((k + c - 1)(k + c)), c = {c}", row(lambda k, c=c: c / ((k + c - 1) * (k + c)))
    yield "6 / (pi² k²)", row(lambda k: 6 / (math.pi**2 * k**2))
    yield "1 / (2.1097 (k + 1) ln²(k + 1))", row(lambda k: 1 / (2.1097 * (k + 1) * math.log(k + 1) ** 2))
    yield "equal levels, 200 candidates and no more", row(lambda k: 1 / CANDIDATES)


def signals(
    generator: Generator, approval: float, start: int, periods: int, sessions: int, thumbs: float = 0.3
) -> list[LiveSignal]:
    """Live signals: two judges vote on each session, the user gives a thumb on some.

    A session went well with probability ``approval``. Each source sees that in nine of ten sessions, and is wrong in
    the others. A judge votes 0 in a fifth.
    """
    made = []
    for period in range(start, start + periods):
        for number in range(sessions):
            good, session = generator.random() < approval, f"{period}-{number}"
            for source in ("judge:a", "judge:b", "user"):
                right, speaks = generator.random() < 0.9, generator.random()
                if source == "user" and speaks > thumbs:
                    continue
                value = 1 if good == right else -1
                made.append(
                    LiveSignal(source, session, session, 0 if source != "user" and speaks < 0.2 else value, period)
                )
    return made


def detection(
    runs: int, drop: float, periods: int, sessions: int, approval: float = 0.8, seed: int = 0
) -> tuple[float, float, float | None]:
    """Shares of services with enough evidence of a drop within ``periods``, and of those that are rolled back.

    Third: the median period of the rollback.

    The version before had as many periods. ``drop`` is of the approval, so the mean signal drops by about 1.4 times it.
    """
    found: list[int] = []
    enough: set[int] = set()
    for run in range(runs):
        generator = np.random.default_rng((seed, run))
        before = signals(generator, approval, 0, periods, sessions)
        after = signals(generator, approval - drop, periods, periods, sessions)
        for now in range(periods, 2 * periods + 1, max(10 // sessions, 1)):
            decision = watch(before, [one for one in after if one.period < now], now)
            if decision.evidence >= decision.needed:
                enough.add(run)
            if decision.verdict == "rollback":
                found.append(now - periods)
                break
    return len(enough) / runs, len(found) / runs, float(np.median(found)) if len(found) > runs / 2 else None


def false_alarms(runs: int, periods: int = 200, seed: int = 0) -> float:
    """Share of services whose evidence of a drop ever suffices with no drop, an upper limit of the false rollbacks.

    Three sources with correlated values, without the check of leaving one out, tolerance 0, a look after each period.
    """
    generator = np.random.default_rng(seed)
    quality = generator.random((2, runs, periods, 1)) < 0.8
    seen = np.where(generator.random((2, runs, periods, 3)) < 0.9, quality, ~quality) * 2.0 - 1
    changes = (seen[1] - seen[0]) / 2
    views = [changes.mean(axis=2), *(np.delete(changes, one, axis=2).mean(axis=2) for one in range(3))]
    evidence = np.mean([_paths(-view) for view in views], axis=0)
    return float((evidence >= 1 / ALPHA).any(axis=1).mean())


def table(head: list[str], rows: Iterator[tuple[str, list[str]]]) -> Iterator[str]:
    yield "| " + " | ".join(head) + " |"
    yield "|---|" + "---:|" * (len(head) - 1)
    for name, cells in rows:
        yield "| " + " | ".join([name, *cells]) + " |"
    yield ""


def _turns(rows: Iterator[tuple[str, list[int | None]]]) -> Iterator[tuple[str, list[str]]]:
    return ((name, ["more" if one is None else f"{one:,}" for one in cells]) for name, cells in rows)


def _percent(value: float) -> str:
    return f"{100 * value:.2f} %"


def lines(lifetimes: int) -> Iterator[str]:
    """The figures, as Markdown."""
    few, runs = max(lifetimes // 10, 10), max(lifetimes // 5, 100)
    candidates = ["1st candidate", "10th candidate", "50th candidate", "200th candidate"]
    assert log_evidence(np.zeros(3)) == 0

    yield f"### Lifetimes with a false promotion ({lifetimes:,} of {CANDIDATES} candidates that are no better)\n"
    yield from table(
        ["scores", "the gate", "5 % for each candidate", f"z-test at the gate's levels ({few:,} lifetimes)"],
        (
            (kind, [*map(_percent, false_promotions(kind, lifetimes)), _percent(fixed_test(kind, few))])
            for kind in NULLS
        ),
    )
    yield f"### Attacks on the evidence ({few:,} lifetimes)\n"
    by_turn, by_session = correlated(few)
    seeing, blind = hill_climb(few)
    yield from table(
        ["attack", "false promotions without the rule", "with the rule"],
        iter(
            [
                (
                    "turns of a session are correlated; rule: one value a session",
                    [_percent(by_turn), _percent(by_session)],
                ),
                (
                    "candidates are changes of one another; rule: training learns of decisions alone, which bring new "
                    "turns",
                    [_percent(seeing), _percent(blind)],
                ),
            ]
        ),
    )
    wrong, good, promotions = improving(few)
    yield f"### A service that improves ({few:,} lifetimes)\n"
    yield from table(
        ["false promotion", "rounds with a better candidate that promote it", "promotions in a lifetime"],
        iter([(_percent(wrong), [_percent(good), f"{promotions:.1f}"])]),
    )
    yield f"### Held-out turns for 80 % power at a gain of 0.1 ({runs:,} runs)\n"
    yield from table(["paired differences", *candidates], _turns(power_rows(runs)))
    yield "### By method: first candidate, then 50th\n"
    methods = ["gate", "aGRAPA", "empirical Bernstein", "z-test, one look"]
    yield from table(
        ["paired differences", *(f"{m}, {k}" for k in ("1st", "50th") for m in methods)], _turns(method_rows(runs))
    )
    yield "### By gain, first candidate\n"
    yield from table(["paired differences", "+0.05", "+0.1", "+0.2", "+0.3"], _turns(gain_rows(runs)))
    yield "### Tasks or canaries for 80 % power, candidates equal to the first version\n"
    yield from table(
        ["margin and paired differences", *candidates],
        _turns((f"{margin}, {name}", cells) for margin in (0.05, 0.1) for name, cells in margin_rows(runs, margin)),
    )
    yield f"### Canaries until a verdict: at most 3,000, a look after every 40 ({few:,} candidates)\n"
    yield from table(["margin, and canaries", "pass (median number)", "given up", "neither"], verdict_rows(few))
    yield "### Spending sequences: ln(1 / level)\n"
    yield from table(
        ["sequence", *candidates, "mean of 50", "mean of 200"],
        ((name, [f"{one:.1f}" for one in cells]) for name, cells in spending_rows()),
    )
    alarm, services = false_alarms(lifetimes), max(lifetimes // 250, 10)
    yield f"### Rollback ({services} services, 300 sessions before and 300 after, a look every 10 sessions)\n"
    yield f"Without a drop, the evidence ever suffices in {_percent(alarm)} of {lifetimes:,} services.\n"
    yield from table(
        [
            "drop of approval, from 80 %",
            "sessions a period",
            "enough evidence",
            "rolled back",
            "median delay in periods",
            "in sessions",
        ],
        (
            (
                f"{100 * drop:.0f} points",
                [f"{sessions}", f"{100 * enough:.0f} %", f"{100 * share:.0f} %", *_delay(delay, sessions)],
            )
            for drop in (0.0, 0.1, 0.2, 0.4)
            for sessions in (1, 5)
            for enough, share, delay in [detection(services, drop, 300 // sessions, sessions)]
        ),
    )


def _delay(delay: float | None, sessions: int) -> tuple[str, str]:
    return ("", "") if delay is None else (f"{delay:.0f}", f"{delay * sessions:.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("-n", "--lifetimes", type=int, default=10_000, help="simulated lifetimes of 200 candidates")
    started = time.monotonic()
    for line in lines(parser.parse_args().lifetimes):
        print(line, flush=True)
    print(f"{time.monotonic() - started:.0f} s, {time.process_time():.0f} s of CPU time")


if __name__ == "__main__":
    main()
