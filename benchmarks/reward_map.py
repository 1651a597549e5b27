"""Where do process rewards pay, and where do they cost? A map by the base's success, the number of steps and the judge.

    python benchmarks/reward_map.py --out runs/reward-map

For each cell a model from scratch imitates a demonstrator that is right so often (:func:`sparse.chances`) that it
solves about 0.01, 0.05 or 0.3 of the tasks of 3, 4 or 8 dependent steps. (Of two steps there are too few different
ones to keep held-out tasks apart.) From it, 40 updates on 64 episodes each, without imitation: with the outcome alone,
and with the outcome and a judge that knows the reference solution (``exact``), errs in a quarter of its pairs
(``auc-0.75``) or in half of them (``random``). The gain is held-out success with a judge minus held-out success with
the outcome alone, of the same base; the interval is Student's over the seeds, 95 %.

All runs use the workspace of :mod:`inprocess`, which has the tasks' own checkers; that module's command plays recorded
episodes again in sandboxes. Every run is a folder below ``--out``, and the same command resumes it. ``map.svg`` is the
map.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from statistics import fmean

import sparse
from learning import half_width, heldout, measured
from markupsafe import Markup

STEPS = (3, 4, 8)
SUCCESS = (0.01, 0.05, 0.3)
JUDGES = ("exact", "auc-0.75", "random")
SETTINGS = (
    "backend=inprocess:InProcess",
    "tasks.train.count=300",  # the others are left for demonstrations
    "rollout.groups=8",
    "optimizer.lr=2.0e-4",  # chosen on seed 100; at 5e-4, policies that solve 0.26 solve nothing after five updates
    "budget.steps=40",
    "evaluation.every=20",
    "sft={steps: 600, batch: 16, lr: 2.0e-3, evaluate_every: 300, shuffle_words: true}",
)
Cell = tuple[int, float]


def run_cell(out: Path, cell: Cell, seed: int) -> None:
    steps, success = cell
    own = (*SETTINGS, f"seed={seed}", f"tasks.generators=[chain-{steps}]", f"agent.max_steps={steps + 1}")
    base = folder(out, cell, seed, "base")
    sparse.train_base(out, base, sparse.RECIPE, success ** (1 / steps), *own, least=1000)
    for arm in ("outcome", *JUDGES):
        settings = (*own, f"model.path={base}", *sparse.ARMS[arm])
        sparse.learn(folder(out, cell, seed, arm), sparse.RECIPE, *settings)


def folder(out: Path, cell: Cell, seed: int, arm: str) -> Path:
    return out / f"{cell[0]}-{cell[1]:g}-{arm}-{seed}"


def cells(seeds: list[int]) -> Iterator[tuple[Cell, int]]:
    """Seed by seed, so that a map is there early."""
    for seed in seeds:
        yield from ((cell, seed) for cell in product(STEPS, SUCCESS))


def found(out: Path, cell: Cell, seeds: list[int], arm: str) -> dict[int, float]:
    """Seed -> held-out success of the runs that have ended."""
    runs = {seed: folder(out, cell, seed, arm) for seed in seeds}
    return {seed: heldout(run)["score"] for seed, run in runs.items() if measured(run)}


def table(out: Path, seeds: list[int]) -> dict[tuple[Cell, str], list[float]]:
    """Print what is there as Markdown. Returns the gains of each cell and judge."""
    print("| steps | base, aimed at | base | outcome | exact | AUC 0.75 | random | seeds |")
    print("|---|---|---|---|---|---|---|---|")
    gains: dict[tuple[Cell, str], list[float]] = {}
    for cell in product(STEPS, SUCCESS):
        base, alone = found(out, cell, seeds, "base"), found(out, cell, seeds, "outcome")
        words = [f"{fmean(each.values()):.3f}" if each else "" for each in (base, alone)]
        for judge in JUDGES:
            both = found(out, cell, seeds, judge)
            gain = gains[cell, judge] = [both[seed] - alone[seed] for seed in both if seed in alone]
            words.append(said(gain))
        print(f"| {cell[0]} | {cell[1]:g} | {' | '.join(words)} | {len(alone)} |")
    return gains


def said(gain: list[float]) -> str:
    return "" if not gain else f"{fmean(gain):+.2f}" + (f" ± {half_width(gain):.2f}" if len(gain) > 1 else "")


def drawn(gains: Mapping[tuple[Cell, str], list[float]], *, side: int = 92, left: int = 60, top: int = 60) -> str:
    """An SVG: a square of cells for each judge, blue where it pays and red where it costs."""
    wide = len(SUCCESS) * side + left
    parts = [
        Markup('<svg viewBox="0 0 {w} {h}" role="img" xmlns="http://www.w3.org/2000/svg">').format(
            w=wide * len(JUDGES), h=top + len(STEPS) * side + 30
        ),
        Markup("<style>text{font:12px sans-serif;text-anchor:middle}text.n{font-weight:bold}</style>"),
        Markup('<rect width="100%" height="100%" style="fill:white"/>'),
    ]
    write = Markup('<text class="{c}" x="{x}" y="{y}">{t}</text>').format
    for n, judge in enumerate(JUDGES):
        parts.append(write(c="n", x=wide * n + left + 1.5 * side, y=20, t=f"judge: {judge}"))
        for column, success in enumerate(SUCCESS):
            parts.append(write(c="", x=wide * n + left + (column + 0.5) * side, y=44, t=f"base {success:g}"))
        for row, steps in enumerate(STEPS):
            y = top + row * side
            parts.append(write(c="", x=wide * n + left / 2, y=y + side / 2, t=f"{steps} steps"))
            for column, success in enumerate(SUCCESS):
                gain = gains[(steps, success), judge]
                x, mean = wide * n + left + column * side, fmean(gain) if gain else 0.0
                part = min(1.0, abs(mean) / 0.3)
                colour = f"rgba({'30,90,200' if mean > 0 else '200,50,30'},{part:.2f})"
                box = Markup('<rect x="{x}" y="{y}" width="{s}" height="{s}" style="fill:{c};stroke:#888"/>')
                parts.append(box.format(x=x, y=y, s=side, c=colour))
                for line, text in enumerate(said(gain).split(" ", 1)):
                    parts.append(write(c="n" if not line else "", x=x + side / 2, y=y + side / 2 + 16 * line, t=text))
    return Markup("\n").join([*parts, Markup("</svg>\n")])


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--out", type=Path, default=Path("runs/reward-map"))
    ask.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    ask.add_argument("--table", action="store_true", help="show what is there, run nothing")
    asked = ask.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    asked.out.mkdir(parents=True, exist_ok=True)
    for cell, seed in [] if asked.table else cells(asked.seeds):
        run_cell(asked.out, cell, seed)
    (asked.out / "map.svg").write_text(drawn(table(asked.out, asked.seeds)))


if __name__ == "__main__":
    main()
