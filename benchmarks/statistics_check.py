"""Do the statistics hold what they promise? Runs with a known truth are drawn, and the promises counted.

    python benchmarks/statistics_check.py            # about five minutes
    python benchmarks/statistics_check.py -n 200     # rougher and quicker

Every figure is a share of simulated runs; its own chance error is about sqrt(p (1 - p) / runs).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator

import numpy as np

from clawgym.evaluation.paired import detectable, difference
from clawgym.statistics import Estimate, mean, pass_at_k, pass_hat_k, rate

Generator = np.random.Generator


def passes(generator: Generator, tasks: int, k: int, p: float, spread: float = 0.5) -> np.ndarray:
    """(tasks, k) zeros and ones; the chances of the tasks have mean ``p`` and are alike (0 spread) or far apart (1)."""
    return (generator.random((tasks, k)) < chances(generator, tasks, p, spread)[:, None]).astype(float)


def chances(generator: Generator, tasks: int, p: float, spread: float) -> np.ndarray:
    """The tasks' own chances of success."""
    return generator.beta(p / spread, (1 - p) / spread, tasks) if spread else np.full(tasks, p)


def partial_scores(generator: Generator, tasks: int) -> np.ndarray:
    """Scores as checkers give them: a third 0, a third 1, the rest in between. Mean 0.5."""
    kind = generator.random(tasks)
    return np.where(kind < 1 / 3, 0.0, np.where(kind < 2 / 3, 1.0, generator.random(tasks)))


def low_scores(generator: Generator, tasks: int) -> np.ndarray:
    """A skewed case: four in five are 0, the rest anything. Mean 0.1."""
    return np.where(generator.random(tasks) < 0.8, 0.0, generator.random(tasks))


def covers(estimate: Estimate | None, truth: float) -> bool:
    assert estimate is not None
    return estimate.low <= truth <= estimate.high


def coverage_of_rates(runs: int, tasks: int, k: int, p: float) -> float:
    """Share of Wilson intervals (clustered for k > 1) that hold the true rate."""
    generator = np.random.default_rng(tasks * 1000 + k)
    return sum(covers(rate(passes(generator, tasks, k, p).tolist()), p) for _ in range(runs)) / runs


def coverage_of_means(runs: int, tasks: int, draw: Callable[[Generator, int], np.ndarray], truth: float) -> float:
    """Share of bootstrap intervals that hold the true mean."""
    generator = np.random.default_rng(tasks)
    return sum(covers(mean([[v] for v in draw(generator, tasks)]), truth) for _ in range(runs)) / runs


def bias_of_pass_k(runs: int, n: int, k: int, p: float) -> tuple[float, float]:
    """Mean error of pass@k and of pass^k from ``n`` samples with chance ``p``."""
    counts = np.random.default_rng(n * 100 + k).binomial(n, p, runs)
    at = np.mean([pass_at_k(n, int(c), k) for c in counts]) - (1 - (1 - p) ** k)
    hat = np.mean([pass_hat_k(n, int(c), k) for c in counts]) - p**k
    return float(at), float(hat)


def false_positives(runs: int, tasks: int, k: int, p: float, spread: float) -> float:
    """Share of comparisons that tell two equal agents apart by their strict rates."""
    generator = np.random.default_rng(tasks * 10 + k)
    found = 0
    for _ in range(runs):
        each = chances(generator, tasks, p, spread)[:, None]
        one, other = ((generator.random((tasks, k)) < each).mean(axis=1) for _ in range(2))
        found += difference((other - one).tolist()).significant
    return found / runs


def false_positives_partial(runs: int, tasks: int) -> float:
    """The same for two agents with partial scores, independent of each other."""
    generator = np.random.default_rng(tasks)
    pairs = ((partial_scores(generator, tasks), partial_scores(generator, tasks)) for _ in range(runs))
    return sum(difference((b - a).tolist()).significant for a, b in pairs) / runs


def power(runs: int, tasks: int, discordant: float) -> tuple[float, float]:
    """(true difference, share found), strict: this share of tasks goes one way or the other."""
    least = _fixed_point(lambda d: detectable(float(np.sqrt(max(discordant, d) - d * d)), tasks, True))
    total = max(discordant, least)
    generator = np.random.default_rng(tasks)
    found = 0
    for _ in range(runs):
        draw = generator.random(tasks)
        deltas = np.where(draw < (total + least) / 2, 1.0, np.where(draw < total, -1.0, 0.0))
        found += difference(deltas.tolist()).significant
    return least, found / runs


def power_partial(runs: int, tasks: int, deviation: float = 0.3) -> tuple[float, float]:
    """(true difference, share found) for scores in between, whose differences vary by ``deviation``."""
    least = detectable(deviation, tasks, False)
    generator = np.random.default_rng(tasks)
    width = deviation * np.sqrt(3)
    draws = (generator.uniform(least - width, least + width, tasks) for _ in range(runs))
    return least, sum(difference(d.tolist()).significant for d in draws) / runs


def _fixed_point(function: Callable[[float], float], start: float = 0.1) -> float:
    for _ in range(200):
        start = function(start)
    return start


def lines(runs: int) -> Iterator[str]:
    """The figures, one a line."""
    yield f"95% intervals: share that holds the truth ({runs} runs each)"
    for p in (0.05, 0.3, 0.6):
        for k in (1, 4):
            shown = "  ".join(f"{n} tasks {coverage_of_rates(runs, n, k, p):.3f}" for n in (10, 40, 200))
            yield f"  strict, true rate {p:.2f}, k = {k}:   {shown}"
    for name, draw, truth in (("partial scores", partial_scores, 0.5), ("mostly 0", low_scores, 0.1)):
        shown = "  ".join(f"{n} tasks {coverage_of_means(runs, n, draw, truth):.3f}" for n in (10, 40, 200))
        yield f"  mean, {name}:   {shown}"
    yield "pass@k, pass^k: mean error over 20,000 draws"
    for n, k in ((4, 2), (8, 4), (16, 16)):
        at, hat = bias_of_pass_k(20_000, n, k, 0.3)
        yield f"  n = {n}, k = {k}:   {at:+.4f}  {hat:+.4f}"
    yield "compare: share of equal pairs that it tells apart (at most 0.05 wanted)"
    for k, spread in ((1, 0.0), (1, 1.0), (4, 0.5)):
        shown = "  ".join(f"{n} tasks {false_positives(runs, n, k, 0.4, spread):.3f}" for n in (10, 40, 200))
        yield f"  strict, k = {k}, tasks {'alike' if not spread else 'unlike'}:   {shown}"
    shown = "  ".join(f"{n} tasks {false_positives_partial(runs, n):.3f}" for n in (10, 40, 200))
    yield f"  official, partial scores:   {shown}"
    yield "compare: share found of true differences as large as it calls detectable (0.8 wanted)"
    for discordant in (0.1, 0.3):
        shown = "  ".join(
            f"{n} tasks {100 * least:.1f} points {found:.3f}"
            for n in (40, 200, 500)
            for least, found in [power(runs, n, discordant)]
        )
        yield f"  strict, {100 * discordant:.0f}% of tasks differ:   {shown}"
    shown = "  ".join(
        f"{n} tasks {100 * least:.1f} points {found:.3f}"
        for n in (10, 40, 200)
        for least, found in [power_partial(runs, n)]
    )
    yield f"  official, differences vary by 0.3:   {shown}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("-n", "--runs", type=int, default=1000, help="simulated runs per figure")
    for line in lines(parser.parse_args().runs):
        print(line)
        sys.stdout.flush()


if __name__ == "__main__":
    main()
