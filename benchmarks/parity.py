"""Do both trainers end at the same success? The same model, tasks and settings, seed by seed.

    python benchmarks/parity.py --out runs/parity                      # five seeds, twenty-four steps each
    python benchmarks/parity.py --out runs/parity --seeds 2 --steps 3  # whether it works

The recipe ``write-word.yaml``, with more tasks held out: a policy is imitated once (``base``); from it the trainers
``local`` and ``verl`` (on CPUs, ``sync``) reinforce for the same steps, with the same seeds, so also on the same groups
of tasks. Every run is a folder below ``--out`` and goes on where it was interrupted.

What is compared is the success on the held-out tasks of the checkpoint that the validation part chose, sampled at
temperature 1. The difference is taken by seed, and its interval is Student's t over seeds, at 90 %: where it lies
within 0.1 of 0, two one-sided tests at the level of 0.05 each say that the trainers are equivalent within 0.1.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import fmean

from learning import half_width, heldout, train

MARGIN = 0.1
TASKS = ("tasks.heldout.count=192",)
RECIPE = str(Path(__file__).with_name("write-word.yaml"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=24)
    args = parser.parse_args()
    base = args.out / "base"
    train("sft", base, *TASKS, config=RECIPE)
    both = (*TASKS, f"model.path={base}", f"budget.steps={args.steps}", "evaluation.every=8")
    found: list[tuple[float, float]] = []
    for seed in range(args.seeds):
        ends = []
        for trainer in ("local", "verl"):
            run = args.out / f"{trainer}-{seed}"
            train("rl", run, *both, f"seed={seed}", f"trainer={trainer}", "verl.engine=transformers", config=RECIPE)
            ends.append(heldout(run)["score"])
        found.append((ends[0], ends[1]))
        print(f"seed {seed}: local {ends[0]:.3f}, verl {ends[1]:.3f}", flush=True)
    apart = [verl - local for local, verl in found]
    before, local, verl = heldout(base)["score"], fmean(a for a, _ in found), fmean(b for _, b in found)
    print(f"before: {before:.3f}; local {local:.3f}, verl {verl:.3f}")
    if len(apart) < 2:
        return
    half = half_width(apart, 0.9)
    low, high = fmean(apart) - half, fmean(apart) + half
    same = "equivalent" if low > -MARGIN and high < MARGIN else "not shown to be equivalent"
    print(f"verl - local: {fmean(apart):+.3f}, 90 % interval {low:+.3f} to {high:+.3f}: {same} within {MARGIN}")


if __name__ == "__main__":
    main()
