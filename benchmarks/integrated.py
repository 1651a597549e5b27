"""Do process rewards help, and how good must a judge be? Outcome alone beside outcome and process, judge by judge.

    python benchmarks/integrated.py --out runs/integrated

``text-steps`` has four or five steps, and is worth something only if all are right. For each seed a policy is imitated
from scratch until it solves some of them (``base``), and from it the same number of episodes is learnt from, with

- ``outcome``: no judge;
- ``exact``: a judge that knows the reference solution, step by step: what a rule can be at best;
- ``auc-0.9``, ``auc-0.75``, ``auc-0.6``: the same one, which says the opposite at some turns;
- ``random``: it knows nothing (AUC 0.5);
- ``prm``: a process reward model, trained on milestones of the base policy's episodes on tasks of the same split.

Every run is a folder below ``--out`` and goes on where it was interrupted. The table shows success on the held-out
tasks, sampled at temperature 1, and what the judge was worth by the outcomes of the run (``process_auc``, the mean of
its last ten steps); over seeds, the difference to ``outcome`` of the same seed and its interval. ``report.html`` has
the gain against the judge's quality, the mean of the seeds with the least and the most of them.
"""

from __future__ import annotations

import argparse
import os
from functools import cache
from pathlib import Path
from statistics import fmean

from learning import half_width, heldout, newcombe, rows, train

from clawgym.agents.demonstrate import reference_calls
from clawgym.agents.text_protocol import Command, parse_reply
from clawgym.records.judge import Judge, Judgeable, Vote
from clawgym.reporting.experiment import chart, experiment, experiment_page, line
from clawgym.rewards.rules import DegradedJudge, RuleJudge
from clawgym.tasks.packs import terminal_basic

TRAIN = range(2000, 2800)
SETTINGS = (
    "tasks.generators=[text-steps]",
    "tasks.demonstrations={first: 0, count: 240}",
    f"tasks.train={{first: {TRAIN.start}, count: {len(TRAIN)}}}",
    "reward.score=strict",
    # What the arms share stays as it is when the recipe is tuned; little is imitated, so that rewards decide.
    "rollout={groups: 8, group_size: 8, temperature: 1.0, concurrency: 64}",
    "algorithm={old: rollout, minibatches: 2, imitation: 1.0}",
    "optimizer={lr: 6.0e-4, warmup: 10}",
    "evaluation={every: 12, canary: 0}",
)
ARMS: dict[str, tuple[str | None, float | None]] = {
    "outcome": (None, None),
    "exact": ("integrated:exact", 1.0),
    "auc-0.9": ("integrated:auc_90", 0.9),
    "auc-0.75": ("integrated:auc_75", 0.75),
    "auc-0.6": ("integrated:auc_60", 0.6),
    "random": ("integrated:auc_50", 0.5),
    "prm": ("prm", None),
}
"""The judge, and its AUC by construction."""


@cache
def solutions() -> dict[str, list[str]]:
    """Instruction -> the commands of its reference solution, for what is learnt."""
    made = (terminal_basic.make("text-steps", 2 * n) for n in TRAIN)
    return {
        task.instruction: [str(c.arguments["command"]) for c in reference_calls(task) if c.name == "bash"]
        for task in made
    }


def as_the_reference(asked: Judgeable) -> Vote:
    """+1 for the command that the reference solution has at this step, else -1."""
    wanted = solutions()[asked.task]
    step = sum(message.get("role") == "assistant" for message in asked.history)
    said = parse_reply(str(asked.action.get("content") or ""))
    return 1 if isinstance(said, Command) and wanted[step : step + 1] == [said.text.strip()] else -1


def exact() -> Judge:
    return RuleJudge(as_the_reference, rule="the reference's command")


def auc_90() -> Judge:
    return DegradedJudge(exact(), 0.9)


def auc_75() -> Judge:
    return DegradedJudge(exact(), 0.75)


def auc_60() -> Judge:
    return DegradedJudge(exact(), 0.6)


def auc_50() -> Judge:
    return DegradedJudge(exact(), 0.5)


def run_seed(out: Path, seed: int, arms: list[str], steps: int) -> None:
    """Every arm of a seed."""
    own = (*SETTINGS, f"seed={seed}")
    base = out / f"base-{seed}"
    train("sft", base, *own, config="tiny-cpu")
    for arm in arms:
        budget = (f"budget.steps={steps}", "budget.minutes=null")
        judge = ARMS[arm][0]
        judged = () if judge is None else (f"reward.judge={judge}",)
        if judge == "prm":
            train("prm", out / f"model-{seed}", *own, f"model.path={base}", "prm.groups=96", config="tiny-cpu")
            judged = (*judged, f"reward.judge_options.path={out}/model-{seed}")
        settings = (*own, f"model.path={base}", *budget, *judged)
        train("rl", out / f"{arm}-{seed}", *settings, config="tiny-cpu")


def quality(run: Path) -> float | None:
    """AUC of the judge's votes against the outcomes of the run, lately."""
    found = [row["reward/process_auc"] for row in rows(run, "metrics") if "reward/process_auc" in row]
    return fmean(found[-10:]) if found else None


def acted(run: Path) -> float:
    """Steps in the environment that were learnt from."""
    return sum(
        row["rollout/avg_steps_per_trajectory"] * row["rollout/submitted_trajectories"] for row in rows(run, "metrics")
    )


def table(out: Path, seeds: list[int]) -> None:
    """What is there, as Markdown; and the report."""
    gains: dict[str, list[float]] = {}
    print(
        "| | seed | before | after | rise | to outcome | steps | AUC by outcomes |\n|---|---|---|---|---|---|---|---|"
    )
    for arm in ARMS:
        for seed in seeds:
            run, alone = out / f"{arm}-{seed}", out / f"outcome-{seed}"
            if not (run / "report.html").exists() or not (alone / "report.html").exists():
                continue
            before, after = heldout(out / f"base-{seed}"), heldout(run)
            rise, low, high = newcombe(before, after)
            gain, auc = after["score"] - heldout(alone)["score"], quality(run)
            gains.setdefault(arm, []).append(gain)
            print(
                f"| {arm} | {seed} | {before['score']:.2f} | {after['score']:.2f} "
                f"| {rise:+.2f} [{low:+.2f}, {high:+.2f}] | {gain:+.2f} "
                f"| {acted(run):,.0f} | {'' if auc is None else f'{auc:.2f}'} |"
            )
        if len(found := gains.get(arm, [])) > 1:
            print(f"| **{arm}** | all | | | | **{fmean(found):+.2f}** +- {half_width(found):.2f} | | |")
    known = sorted((auc, arm) for arm, (_, auc) in ARMS.items() if auc is not None and arm in gains)
    if len(known) > 1:
        gained = [(x, fmean(gains[arm]), min(gains[arm]), max(gains[arm])) for x, arm in known]
        zero = [(x, 0.0, 0.0, 0.0) for x, _ in known]
        drawn = chart(
            "Gain in held-out success over the outcome alone",
            [line("mean and range of the seeds", gained), line("outcome alone", zero)],
            across="AUC of the judge",
        )
        page = out / "report.html"
        page.write_text(experiment_page(experiment(out.resolve().name, charts=[drawn], tables=[])), "utf-8")
        print(f"\n{page}")


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--out", type=Path, default=Path("runs/integrated"))
    ask.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    ask.add_argument("--arms", nargs="+", choices=[*ARMS], default=[*ARMS])
    ask.add_argument("--steps", type=int, default=24, help="of learning, 64 episodes each")
    ask.add_argument("--table", action="store_true", help="show what is there, run nothing")
    said = ask.parse_args()
    here = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(here)  # where a run finds the judges of this file
    if not said.table:
        said.out.mkdir(parents=True, exist_ok=True)
        for seed in said.seeds:
            run_seed(said.out, seed, said.arms, said.steps)
    table(said.out, said.seeds)


if __name__ == "__main__":
    main()
