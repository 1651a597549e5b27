"""Does it learn, and from what? A recipe for several seeds, with the arms that would remove the effect.

    python benchmarks/learning.py --out runs/learning

For each seed a policy imitates demonstrations from scratch (``base``). From it are made

- ``full``: reinforcement, as the recipe says;
- ``shuffled``: the same with the rewards of each step dealt out anew, so that they say nothing;
- ``self-only``: advantages are 0. Left is imitation, also of the episodes that were solved;
- ``demos-only``: the same without those episodes. No reward has an effect;
- ``gradient-only``: the policy gradient without imitation, at a sixth of the rate;
- ``sft``: imitation of the demonstrations alone, without episodes, for as long as ``full`` took;
- ``sft-2``, ``sft-4``, ``sft-8``: the same with so many times as many demonstrations.

All arms but ``sft`` have the same number of updates (``--steps``) on as many episodes; ``sft`` has the same time. Where
the recipe imitates nothing during RL, ``full`` is the policy gradient alone, and ``self-only`` and ``demos-only``
imitate with weight 1. Every run is a folder below ``--out``, and the same command resumes it. The table shows success
on the held-out tasks, sampled at temperature 1 and greedy, before and after. The interval of the difference is
Newcombe's for independent proportions for a seed (Statistics in Medicine 17, 1998, method 10; the tasks are the same,
so it is too wide), and Student's t over seeds. The checkpoint is the one that the validation split chose.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from clawgym.statistics import student_t
from clawgym.trainers.config import load_config

ARMS: dict[str, tuple[str, ...]] = {
    "full": (),
    "shuffled": ("reward.shuffle=true",),
    "self-only": ("algorithm.advantage=zero",),
    "demos-only": ("algorithm.advantage=zero", "algorithm.self_imitation=false"),
    "gradient-only": ("algorithm.imitation=0",),
    "sft": (),
    "sft-2": (),
    "sft-4": (),
    "sft-8": (),
}


def train(kind: str, out: Path, *settings: str, config: str) -> None:
    """One run, to its end: for one that has ended, the command does nothing."""
    words = [str(Path(sys.executable).parent / "clawgym"), "train", kind, "--config", config, "--out", str(out)]
    for setting in settings:
        words += ["--set", setting]
    print("$ clawgym", " ".join(words[1:]), flush=True)
    subprocess.run(words, check=True)


def rows(run: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / f"{name}.jsonl").read_text("utf-8").splitlines()]


def measured(run: Path) -> bool:
    """Whether there is a measurement on the held-out split. A run that was stopped may have a report without one."""
    return (run / "report.html").exists() and any(row["split"] == "heldout" for row in rows(run, "evaluations"))


def heldout(run: Path, *, greedy: bool = False) -> dict[str, Any]:
    """The last measurement on the held-out split."""
    return [row for row in rows(run, "evaluations") if row["split"] == "heldout" and row["greedy"] == greedy][-1]


def seconds(run: Path) -> float:
    """Of learning."""
    found = rows(run, "metrics")
    return found[-1].get("timing/learning_seconds") or sum(row["timing/update"] for row in found)


def newcombe(before: dict[str, Any], after: dict[str, Any]) -> tuple[float, float, float]:
    """The difference of two proportions and its interval of 95 %."""
    rise = after["score"] - before["score"]
    down = ((after["score"] - after["low"]) ** 2 + (before["high"] - before["score"]) ** 2) ** 0.5
    up = ((after["high"] - after["score"]) ** 2 + (before["score"] - before["low"]) ** 2) ** 0.5
    return rise, rise - down, rise + up


def half_width(values: Sequence[float], confidence: float = 0.95) -> float:
    """Of Student's interval of the mean of two or more values."""
    return student_t((1 + confidence) / 2, len(values) - 1) * stdev(values) / len(values) ** 0.5


def run_seed(out: Path, seed: int, arms: list[str], config: str, steps: int | None, shared: Sequence[str]) -> None:
    """Every arm of a seed."""
    base, said = out / f"base-{seed}", load_config(config, shared)
    own = (f"seed={seed}", *shared)
    train("sft", base, *own, config=config)
    for arm in sorted(arms, key=list(ARMS).index):
        settings = (*own, f"model.path={base}", *ARMS[arm])
        if arm in ("self-only", "demos-only") and not said.algorithm.imitation:
            settings += ("algorithm.imitation=1",)
        if steps is not None:
            settings += (f"budget.steps={steps}", "budget.minutes=null")
        if arm == "gradient-only":
            settings += (f"optimizer.lr={said.optimizer.lr / 6}",)
        if arm.startswith("sft"):
            times, shown = int(arm[4:] or 1), said.tasks.demonstrations
            settings += (f"tasks.demonstrations={{first: {shown.first}, count: {times * shown.count}}}",)
            pace = fmean(row["timing/update"] for row in rows(base, "metrics"))
            count = max(1, round(seconds(out / f"full-{seed}") / pace))
            settings += (f"sft.steps={count}", f"sft.lr={said.sft.lr / 5}", "sft.decay=false", "sft.until=null")
            settings += (f"sft.evaluate_every={max(1, count // 8)}",)
        train("sft" if arm.startswith("sft") else "rl", out / f"{arm}-{seed}", *settings, config=config)


def table(out: Path, seeds: list[int]) -> None:
    """What is there, as Markdown."""
    print("| arm | seed | before | after | rise | greedy before | after | minutes |\n|---|---|---|---|---|---|---|---|")
    for arm in ARMS:
        rises = []
        for seed in seeds:
            base, run = out / f"base-{seed}", out / f"{arm}-{seed}"
            if not (measured(base) and measured(run)):
                continue
            before, after = heldout(base), heldout(run)
            greedy = [heldout(folder, greedy=True)["score"] for folder in (base, run)]
            rise, low, high = newcombe(before, after)
            rises.append(rise)
            print(
                f"| {arm} | {seed} | {before['score']:.2f} | {after['score']:.2f} | "
                f"{rise:+.2f} [{low:+.2f}, {high:+.2f}] | {greedy[0]:.2f} | {greedy[1]:.2f} | {seconds(run) / 60:.1f} |"
            )
        if len(rises) > 1:
            print(f"| **{arm}** | all | | | **{fmean(rises):+.2f}** +- {half_width(rises):.2f} | | | |")


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--out", type=Path, default=Path("runs/learning"))
    ask.add_argument("--config", default="tiny-cpu")
    ask.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    ask.add_argument("--arms", nargs="+", choices=[*ARMS], default=[*ARMS][:6])
    ask.add_argument("--steps", type=int, help="of each arm but sft (default: the budget of the recipe)")
    ask.add_argument("--set", action="append", default=[], dest="settings", help="a setting of all runs")
    ask.add_argument("--table", action="store_true", help="show what is there, run nothing")
    said = ask.parse_args()
    if any(arm.startswith("sft") for arm in said.arms) and "full" not in said.arms:
        said.arms.append("full")  # it says how long
    for seed in said.seeds:
        if not said.table:
            run_seed(said.out, seed, said.arms, said.config, said.steps, said.settings)
    table(said.out, said.seeds)


if __name__ == "__main__":
    main()
