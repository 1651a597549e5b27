"""Episodes per second of training: two versions of the library beside each other, in one run.

    git worktree add ../before REV && (cd ../before && make .venv/.installed)
    python benchmarks/rollouts.py ../before

A base is made once by the recipe's supervised part. From it both versions run the recipe's reinforcement by turns, from
the same tasks and seeds, with a learning rate so small that the policy stays the base. Without staleness, a step waits
for its episodes and then trains: printed are episodes per second of waiting, the share of waiting in a step, and the
median of the rounds' ratios. Grading is compared with a bare ``python check.py`` by ``benchmarks/env.py``.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import subprocess
from pathlib import Path
from statistics import median

HERE = Path(__file__).resolve().parents[1]


def run(checkout: Path, kind: str, out: Path, config: str, settings: list[str]) -> list[dict[str, float]]:
    """The metrics of a run, step by step."""
    shutil.rmtree(out, ignore_errors=True)
    words = [str(checkout / ".venv/bin/clawgym"), "train", kind, "--config", config, "--out", str(out)]
    words += [word for setting in settings for word in ("--set", setting)]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL, cwd=checkout)
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text("utf-8").splitlines()]


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("before", type=Path, help="a checkout of the earlier version, installed")
    ask.add_argument("--out", type=Path, default=Path("runs/rollouts"))
    ask.add_argument("--config", default=str(HERE / "benchmarks/write-word.yaml"))
    ask.add_argument("--rounds", type=int, default=3)
    ask.add_argument("--steps", type=int, default=8)
    ask.add_argument("--set", action="append", default=[], dest="settings")
    said = ask.parse_args()
    out = said.out.resolve()
    base = out / "base"
    if not (base / "report.html").exists():
        run(HERE, "sft", base, said.config, said.settings)
    few = ["tasks.validation={first: 0, count: 4}", "tasks.heldout={first: 1000, count: 4}", "evaluation.every=1000"]
    own = [f"model.path={base}", f"budget.steps={said.steps}", "optimizer.lr=1.0e-12", *few, *said.settings]
    found: dict[str, list[tuple[float, float, float]]] = {"before": [], "after": []}
    for number in range(said.rounds):
        order = ["before", "after"] if number % 2 else ["after", "before"]
        for name in order:
            checkout = said.before.resolve() if name == "before" else HERE
            rows = run(checkout, "rl", out / name, said.config, own)[1:]  # the first step also starts things
            episodes = sum(row["rollout/submitted_trajectories"] for row in rows)
            waited = sum(row["timing/wait_for_batch"] for row in rows)
            steps = sum(row["timing/step"] for row in rows)
            found[name].append((episodes / waited, waited / steps, steps / len(rows)))
            print(f"round {number + 1}, {name}: {episodes / waited:.1f} episodes/s", flush=True)
    print(f"\n{platform.processor() or platform.machine()}, recipe {said.config}, {said.rounds} rounds, medians")
    print("| version | episodes/s | share of a step that waits | seconds a step |\n|---|---:|---:|---:|")
    for name, rounds in found.items():
        print(f"| {name} | " + " | ".join(f"{median(column):.2f}" for column in zip(*rounds, strict=True)) + " |")
    ratios = [after[0] / before[0] for before, after in zip(found["before"], found["after"], strict=True)]
    print(f"\nepisodes/s, after to before: {median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()
