"""Do both trainers end at the same success? The same model, tasks and settings, seed by seed.

    python benchmarks/parity.py --out runs/parity                      # five seeds, forty steps each
    python benchmarks/parity.py --out runs/parity --seeds 2 --steps 3  # whether it works

A policy of one layer is imitated once (``base``); from it the trainers ``local`` and ``verl`` (on CPUs, ``sync``)
reinforce for the same steps, with the same seeds, so also on the same groups of tasks. Every run is a folder below
``--out`` and goes on where it was interrupted.

What is compared is the success on the held-out tasks of the checkpoint that the validation part chose, sampled at
temperature 1. The difference is taken by seed, and its interval is Student's t over seeds, at 90 %: where it lies
within 0.1 of 0, two one-sided tests at the level of 0.05 each say that the trainers are equivalent within 0.1.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import yaml

from clawgym.evaluation.statistics import student_t

MARGIN = 0.1
SETTINGS: dict[str, Any] = {
    "name": "parity",
    "backend": "namespace",
    "model": {"scratch": {"hidden": 64, "layers": 1, "heads": 2, "kv_heads": 1, "context_window": 512}},
    "tasks": {
        "generators": ["write-word"], "demonstrations": {"count": 40}, "train": {"first": 1000, "count": 200},
        "validation": {"count": 32}, "heldout": {"first": 1000, "count": 128},
    },
    "agent": {"protocol": "text", "system_prompt": "Work.", "max_steps": 2, "max_tokens": 24, "max_malformed": 1},
    "sft": {"steps": 150, "batch": 16, "lr": 2.0e-3, "decay": False, "evaluate_every": 50, "shuffle_words": True},
    "rollout": {"groups": 4, "group_size": 6, "concurrency": 24},
    "optimizer": {"lr": 5.0e-4},
    "compute": {"threads": 1, "row_tokens": 512, "micro_tokens": 4096},
    "evaluation": {"every": 10, "canary": 0},
    "checkpoint_every": 10,
    "verl": {"engine": "transformers"},
}  # fmt: skip


def train(kind: str, out: Path, config: Path, *settings: str) -> None:
    """One run, to its end."""
    if (out / "report.html").exists() and rows(out) and rows(out)[-1]["split"] == "heldout" and rows(out)[-1]["greedy"]:
        return
    words = [str(Path(sys.executable).parent / "clawgym"), "train", kind, "--config", str(config), "--out", str(out)]
    for setting in settings:
        words += ["--set", setting]
    print("$ clawgym", " ".join(words[1:]), flush=True)
    subprocess.run(words, check=True)


def rows(run: Path) -> list[dict[str, Any]]:
    path = run / "evaluations.jsonl"
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []


def success(run: Path) -> float:
    """On what is held out, at the end."""
    return [row for row in rows(run) if row["split"] == "heldout" and not row["greedy"]][-1]["score"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    config = args.out / "config.yaml"
    config.write_text(yaml.safe_dump({**SETTINGS, "budget": {"steps": args.steps}}))
    base = args.out / "base"
    train("sft", base, config)
    found: list[tuple[float, float]] = []
    for seed in range(args.seeds):
        ends = []
        for trainer in ("local", "verl"):
            run = args.out / f"{trainer}-{seed}"
            train("rl", run, config, f"model.path={base}", f"seed={seed}", f"trainer={trainer}")
            ends.append(success(run))
        found.append((ends[0], ends[1]))
        print(f"seed {seed}: local {ends[0]:.3f}, verl {ends[1]:.3f}", flush=True)
    apart = [verl - local for local, verl in found]
    print(f"before: {success(base):.3f}; local {fmean(a for a, _ in found):.3f}, verl {fmean(b for _, b in found):.3f}")
    if len(apart) < 2:
        return
    half = student_t(0.95, len(apart) - 1) * stdev(apart) / len(apart) ** 0.5
    low, high = fmean(apart) - half, fmean(apart) + half
    same = "equivalent" if low > -MARGIN and high < MARGIN else "not shown to be equivalent"
    print(f"verl - local: {fmean(apart):+.3f}, 90 % interval {low:+.3f} to {high:+.3f}: {same} within {MARGIN}")


if __name__ == "__main__":
    main()
