"""Where do process rewards pay? Long chains of dependent steps, from a base that solves almost none of them.

    python benchmarks/sparse.py --out runs/sparse
    python benchmarks/sparse.py --out runs/sparse-tools --recipe benchmarks/sparse-tools.yaml \\
        --arms outcome final-phi milestones random shuffled

For each seed a model from scratch imitates a thousand episodes of ``chain-8``
(:mod:`clawgym.trainers.recipes.chains`) by somebody who confuses commands: where ``sort -r`` is asked, it often does
``sort`` (``base``; see :func:`chances`). So single steps mostly succeed, whole chains almost never, and the policy has
something to choose between. (A model that has imitated few correct episodes is wrong as often, but says the same in
each attempt: its entropy is 0.006 nats a token, and rewards cannot change what is never tried.) From it, with the same
number of updates on as many episodes, and without imitation but for the last three,

- ``outcome``: 1 for a solved task, else 0; ``dynamic``: the same, and groups without a difference are replaced;
- ``final-phi``: partial credit at the end, the share of right files; no credit for single turns;
- ``milestones``: outcome, and for each turn the change of that share; ``return-to-go``: the change by this and all
  later turns; ``sum``: outcome and milestones added before they are normalised;
- ``exact``, ``auc-0.75``, ``random``: outcome, and a judge that knows the reference solution, or errs in a quarter or a
  half of its pairs;
- ``prm``: outcome, and a judge that ``clawgym train prm`` trained on the milestones of 512 episodes of the base: a head
  on the hidden states of the base;
- ``shuffled``: milestones, dealt out anew among the turns of a step: the control of turn credit;
- ``full``: milestones, and imitation of solved episodes and the base's demonstrations beside them;
- ``self-only``: advantages are 0; solved episodes and the base's demonstrations are imitated; ``demos-only``: the
  demonstrations alone, so no reward has an effect.

Settings were chosen on seeds 100 to 102. Every run is a folder below ``--out``, and the same command resumes it. The
table shows success on held-out tasks, sampled at temperature 1, with the checkpoint that the validation split chose,
and the mean of success on the validation split while the policy learns.
Differences are those of the same seed: their mean over seeds with Student's interval of 95 %.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from learning import half_width, heldout, measured, rows, seconds, train

from clawgym.agents.demonstrate import reference_calls
from clawgym.agents.text_protocol import Command, MalformedCall, parse_reply
from clawgym.pool import Pool
from clawgym.records import Task
from clawgym.records.judge import Judge, Judgeable, Vote
from clawgym.rewards.rules import DegradedJudge, RuleJudge
from clawgym.trainers.common.demonstrations import demonstrate
from clawgym.trainers.common.splits import load_splits
from clawgym.trainers.common.supervised import conversations
from clawgym.trainers.config import load_config
from clawgym.trainers.recipes import chains

TRAIN = range(2000, 4000)
RIGHT = 0.64
"""Mean share of right commands of the demonstrator, by default: 0.64**8 is 0.03."""
RECIPE = Path(__file__).with_name("sparse.yaml")
ARMS: dict[str, tuple[str, ...]] = {
    "outcome": (),
    "dynamic": ("rollout.replaced=16",),
    "final-phi": ("reward.score=official",),
    "milestones": ("reward.milestones=turn",),
    "return-to-go": ("reward.milestones=return-to-go",),
    "sum": ("reward.milestones=turn", "reward.combine=sum"),
    "exact": ("reward.judge=sparse:exact",),
    "auc-0.75": ("reward.judge=sparse:auc_75",),
    "random": ("reward.judge=sparse:auc_50",),
    "prm": ("reward.judge=prm",),
    "shuffled": ("reward.milestones=turn", "reward.shuffle=process"),
    "full": ("reward.milestones=turn", "algorithm.imitation=1"),
    "self-only": ("algorithm.advantage=zero", "algorithm.imitation=1"),
    "demos-only": ("algorithm.advantage=zero", "algorithm.imitation=1", "algorithm.self_imitation=false"),
}


@cache
def solutions(steps: int) -> dict[str, list[str]]:
    """Instruction -> the commands of its reference solution."""
    made = (chains.pack().make(f"chain-{steps}", 2 * n) for n in TRAIN)
    return {task.instruction: [str(call.arguments["command"]) for call in reference_calls(task)[:-1]] for task in made}


def as_the_reference(asked: Judgeable) -> Vote:
    """+1 for what the reference solution does at this step, else -1."""
    at = sum(message.get("role") == "assistant" for message in asked.history)
    said = parse_reply(str(asked.action.get("content") or ""))
    wanted = solutions(asked.task.count("Make "))[asked.task][at : at + 1]
    did = [said.text.strip()] if isinstance(said, Command) else []
    return 1 if did == wanted and not isinstance(said, MalformedCall) else -1


def exact() -> Judge:
    return RuleJudge(as_the_reference, rule="the reference's command")


def auc_75() -> Judge:
    return DegradedJudge(exact(), 0.75)


def auc_50() -> Judge:
    return DegradedJudge(exact(), 0.5)


CONFUSED = {
    "sort -r": "sort",
    "sort": "sort -r",
    "head": "tail",
    "tail": "head",
    "sed 1d": "sed '$d'",
    "sed '$d'": "sed 1d",
    "tac": "cat",
    "ship_order": "cancel_order",
    "cancel_order": "ship_order",
}
"""A command or tool, and the one that is taken for it."""
BETTER = ("sort", "head", "sed 1d", "ship_order")


def chances(right: float, share: float = 3 / 7) -> tuple[float, float]:
    """How often a confused demonstrator does what is asked for, if it is one of :data:`BETTER` (a ``share`` of all) and
    if not, for a mean of ``right``. A policy that imitates it is right more often than not on a part only, so choosing
    the likelier command does not solve a chain."""
    better = min(0.95, 1.4 * right)
    return better, (right - share * better) / (1 - share)


def confused(text: str, right: float, rng: random.Random) -> str:
    """A command or the name of a tool, as a confused demonstrator gives it."""
    name = max((name for name in CONFUSED if f"{text} ".startswith(f"{name} ")), key=len, default="")
    if not name:
        return text
    better, other = chances(right, 1 / 2 if name.endswith("_order") else 3 / 7)
    return text if rng.random() < (better if name in BETTER else other) else CONFUSED[name] + text[len(name) :]


def as_confused(task: Task, right: float, rng: random.Random) -> Task:
    """The task with the solution of a confused demonstrator."""
    (file,) = task.solution
    if task.brings_tools:
        calls = json.loads(file.read())
        text = json.dumps([{**call, "name": confused(call["name"], right, rng)} for call in calls])
    else:
        text = "\n".join(confused(line, right, rng) for line in file.read().decode().splitlines())
    return replace(task, solution=(replace(file, source=text.encode()),))


def demonstrations(out: Path, recipe: Path, right: float, settings: Sequence[str], least: int = 1) -> Path:
    """A file of ``least`` or more conversations with a confused demonstrator, who begins again, with other errors, if
    there are fewer tasks."""
    config = load_config(recipe, settings)
    file = out / f"confused-{config.tasks.generators[0]}-{right:.2f}-{config.seed}.jsonl"
    if file.exists():
        return file
    tasks, rng = load_splits(config.tasks, config.agent).demonstrations, random.Random(config.seed)
    rows: list[dict[str, Any]] = []
    while len(rows) < least:
        changed = [as_confused(task, right, rng) for task in sorted(tasks, key=lambda task: task.id)]
        with Pool(file.with_name(f"{file.stem}-{len(rows)}.db")) as pool:
            asyncio.run(demonstrate(config, changed, pool))
            found = list(conversations(pool, "demonstrations", solved=False))
        if not found:
            raise SystemExit(f"{file}: no demonstration was recorded: see the errors above")
        rows += sorted(found, key=lambda row: row["task_id"])
    lines = [json.dumps({name: row[name] for name in ("messages", "tools") if name in row}) for row in rows]
    file.write_text("\n".join(lines) + "\n")
    return file


def train_base(out: Path, base: Path, recipe: Path, right: float, *settings: str, least: int = 1) -> None:
    data = demonstrations(out, recipe, right, settings, least)
    train("sft", base, *settings, f"sft.data={data}", config=str(recipe))


def run_seed(out: Path, recipe: Path, right: float, seed: int, arms: list[str], settings: tuple[str, ...]) -> None:
    """Every arm of a seed."""
    own = (f"seed={seed}", *settings)
    base = out / f"base-{seed}"
    train_base(out, base, recipe, right, *own)
    for arm in arms:
        extra: tuple[str, ...] = ()
        if "algorithm.imitation=1" in ARMS[arm]:
            extra = (f"sft.data={demonstrations(out, recipe, right, own)}",)
        if arm == "prm":
            judge = out / f"judge-{seed}"
            train("prm", judge, *own, f"model.path={base}", config=str(recipe))
            extra = (f"reward.judge_options.path={judge}",)
        learn(out / f"{arm}-{seed}", recipe, *own, f"model.path={base}", *ARMS[arm], *extra)


def learn(run: Path, recipe: Path, *settings: str) -> None:
    """Train an arm. Ends the program if its judge failed at many turns, as the arm is not what its name says then."""
    train("rl", run, *settings, config=str(recipe))
    if any(setting.startswith("reward.judge=") for setting in settings) and judged(run) < 0.8:
        raise SystemExit(f"{run}: {judged(run):.2f} of the turns were judged: see the warnings of the run")


def turns(run: Path) -> float:
    """Turns in the environment that were learnt from."""
    return sum(
        row["rollout/avg_steps_per_trajectory"] * row["rollout/submitted_trajectories"] for row in rows(run, "metrics")
    )


def judged(run: Path) -> float:
    """Share of the turns that have a process reward, of those that another turn of the episode follows."""
    scored = followed = 0.0
    for row in rows(run, "metrics"):
        count = row["rollout/avg_steps_per_trajectory"]
        scored += row.get("reward/process_scored_frac", 0.0) * count
        followed += count - 1
    return min(1.0, scored / followed) if followed else 1.0


def right_steps(base: Path) -> str:
    """Of the steps of chains that follow right ones, the share that is right, in sampled held-out episodes."""
    right = tried = 0
    with Pool(base / "pool.db") as pool:
        for episode in pool.episodes(channel="heldout", state="closed"):
            kind, _, count = episode.task_id.rpartition("-")[0].partition("-")
            if kind == "chain" and episode.meta["gateway"]["sampling"]["temperature"]:
                done = round(int(count) * episode.rewards["official"])
                right, tried = right + done, tried + min(int(count), done + 1)
    return f"{right / tried:.2f}" if tried else ""


def curve(run: Path) -> dict[int, float]:
    """Step -> success on the validation split."""
    found = rows(run, "evaluations")
    return {row["step"]: row["score"] for row in found if row["split"] == "validation" and row["step"]}


def while_learning(run: Path) -> float:
    """Mean success on the validation split, after the first step and until the last one."""
    return fmean(curve(run).values())


def table(out: Path, seeds: list[int]) -> None:
    """What is there, as Markdown."""
    print("| base | before | greedy | files right | steps right, after right ones |\n|---|---|---|---|---|")
    for seed in seeds:
        if measured(base := out / f"base-{seed}"):
            before, greedy = heldout(base), heldout(base, greedy=True)["score"]
            print(f"| {seed} | {before['score']:.3f} | {greedy:.3f} | {before['partial']:.2f} | {right_steps(base)} |")
    print(
        "\n| arm | seed | before | after | greedy | while learning | files right, before | after | turns | judged "
        "| minutes |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    ends: dict[str, dict[int, dict[str, float]]] = {arm: {} for arm in ARMS}
    for arm in ARMS:
        for seed in seeds:
            run, base = out / f"{arm}-{seed}", out / f"base-{seed}"
            if not (measured(base) and measured(run)):
                continue
            before, after = heldout(base), heldout(run)
            ends[arm][seed] = {**after, "learning": while_learning(run)}
            print(
                f"| {arm} | {seed} | {before['score']:.3f} | {after['score']:.3f} "
                f"[{after['low']:.2f}, {after['high']:.2f}] | {heldout(run, greedy=True)['score']:.3f} "
                f"| {while_learning(run):.3f} "
                f"| {before['partial']:.2f} | {after['partial']:.2f} "
                f"| {turns(run):,.0f} | {judged(run):.2f} | {seconds(run) / 60:.0f} |"
            )
    for arm, of in ends.items():
        if curves := [curve(out / f"{arm}-{seed}") for seed in of]:
            means = [f"{step}: {fmean(one[step] for one in curves):.2f}" for step in curves[0]]
            print(f"\n{arm}, {len(curves)} seeds, success on the validation split by step: {', '.join(means)}")
    print("\n| difference | seeds | success | positive in | while learning | positive in | files right | positive in |")
    print("|---|---|---|---|---|---|---|---|")
    measures = ("score", "learning", "partial")
    others = [arm for arm in ARMS if arm not in ("outcome", "milestones")]
    pairs = [
        ("milestones", "outcome"),
        ("full", "self-only"),
        *((arm, "outcome") for arm in others),
        *(("milestones", arm) for arm in others),
    ]
    for better, worse in pairs:
        both = sorted(ends[better].keys() & ends[worse].keys())
        if len(both) < 2:
            continue
        gaps = {name: [ends[better][s][name] - ends[worse][s][name] for s in both] for name in measures}
        shown = [
            f"{fmean(gap):+.3f} +- {half_width(gap):.3f} | {sum(one > 0 for one in gap)} of {len(both)}"
            for gap in gaps.values()
        ]
        print(f"| {better} - {worse} | {len(both)} | {' | '.join(shown)} |")


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--out", type=Path, default=Path("runs/sparse"))
    ask.add_argument("--recipe", type=Path, default=RECIPE)
    ask.add_argument("--right", type=float, default=RIGHT, help="mean share of right commands of the demonstrator")
    ask.add_argument("--seeds", type=int, nargs="+", default=[20, 21, 22, 23, 24])
    ask.add_argument("--arms", nargs="*", choices=[*ARMS], default=[*ARMS], help="none: the base alone")
    ask.add_argument("--set", action="append", default=[], dest="settings", help="a setting of all runs")
    ask.add_argument("--table", action="store_true", help="show what is there, run nothing")
    said = ask.parse_args()
    if said.recipe != RECIPE and {"exact", "auc-0.75"} & {*said.arms}:
        ask.error("the judges exact and auc-0.75 know the solutions of chains only: leave them out (--arms)")
    here = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(here)  # where a run finds the judges
    said.out.mkdir(parents=True, exist_ok=True)
    for seed in [] if said.table else said.seeds:
        run_seed(said.out, said.recipe, said.right, seed, said.arms, tuple(said.settings))
    table(said.out, said.seeds)


if __name__ == "__main__":
    main()
