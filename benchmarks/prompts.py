"""Prompt optimisation beside weight training, on equal numbers of episodes.

    python benchmarks/prompts.py --out runs/prompts

A model from scratch imitates a few demonstrations (the recipe ``write-word.yaml``), which is the base. From it

- ``weights``: ``clawgym train rl`` for as many steps as ``--episodes`` allow;
- ``gepa``: GEPA optimises the system prompt (:mod:`clawgym.interop.gepa`), with a scripted reflection model;
- ``random``: prompts of random words, as long as those of ``gepa``, each played on the validation tasks; the best one;
- ``base``: nothing.

All are evaluated on the same held-out tasks, sampled at temperature 1. Episodes of ``gepa`` and ``random`` count
wherever they are played, on training and on validation tasks; ``weights`` plays its validation tasks twice on top. The
table shows the episodes of each arm and its success with the interval of :mod:`clawgym.statistics`. The same command
resumes the training runs.

The reflection model is a script: it draws sentences from a list that people wrote, and reads nothing. So ``gepa`` shows
what GEPA's search adds to these sentences, not what a large model that reads transcripts would propose. And the base
has seen one system prompt only: other prompts mostly harm it. What this shows is how the two kinds of training are
compared at equal cost, with a control. Which is better for a large model it does not show.

Needs the packages of the extra ``train``, and ``gepa``.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path

import gepa
from learning import heldout, train

from clawgym.agents.tool_loop import ToolLoopAgent
from clawgym.engines.protocol import Sampling
from clawgym.gateway.local_engine import LocalEngine
from clawgym.interop.gepa import SYSTEM_PROMPT, ClawGymAdapter
from clawgym.records import Task
from clawgym.statistics import rate
from clawgym.tasks.packs.seeded import WORDS
from clawgym.trainers.common.checkpoints import Checkpoints
from clawgym.trainers.common.splits import load_splits
from clawgym.trainers.common.start_model import checkpoint_model
from clawgym.trainers.config import TrainConfig, load_config

CONFIG = str(Path(__file__).with_name("write-word.yaml"))
SETTINGS = ("tasks.heldout={first: 1000, count: 384}",)
"""More held-out tasks than the recipe has."""
HINTS = (
    "Work in the shell.",
    "Run one command, then read its output.",
    "Name files exactly as the task does.",
    "Check the result before you submit.",
    "Submit when the work is done.",
)
"""What the scripted reflection model can say."""


class Unclosed(LocalEngine):
    """The engine of all episodes: an agent does not close it."""

    async def aclose(self) -> None: ...


class Scripted:
    """A reflection model that reads nothing: two sentences of :data:`HINTS`, or as many random words."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def hint(self) -> str:
        return " ".join(self._rng.sample(HINTS, 2))

    def noise(self) -> str:
        return " ".join(self._rng.choice(WORDS) for _ in self.hint().split())

    def __call__(self, prompt: object) -> str:
        return f"```\n{self.hint()}\n```"


def adapter_of(config: TrainConfig, model: Path) -> ClawGymAdapter:
    engine, about = Unclosed(str(model)), config.agent
    sampling = Sampling(temperature=1.0, max_tokens=about.max_tokens)

    def agent(prompt: str | None) -> ToolLoopAgent:
        return ToolLoopAgent(
            engine,
            protocol=about.protocol,
            system_prompt=prompt,
            sampling=sampling,
            max_malformed=about.max_malformed,
        )

    return ClawGymAdapter(agent, reward="strict", concurrency=config.rollout.concurrency)


def score(adapter: ClawGymAdapter, prompt: str, tasks: Sequence[Task]) -> list[float]:
    return adapter.evaluate(list(tasks), {SYSTEM_PROMPT: prompt}).scores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--episodes", type=int, default=768, help="episodes of each arm")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    base, shared = given.out / "base", (f"seed={given.seed}", *SETTINGS)
    config = load_config(CONFIG, shared)
    train("sft", base, *shared, config=CONFIG)
    steps = given.episodes // (config.rollout.groups * config.rollout.group_size)
    budget = (f"budget.steps={steps}", f"evaluation.every={steps}")
    train("rl", given.out / "weights", *shared, f"model.path={base}", *budget, config=CONFIG)
    splits = load_splits(config.tasks, config.agent)
    best = Checkpoints(base).best()
    assert best is not None
    adapter, script = adapter_of(config, checkpoint_model(best)), Scripted(given.seed)
    first = config.agent.system_prompt or HINTS[0]
    found = gepa.optimize(
        {SYSTEM_PROMPT: first},
        list(splits.train),
        list(splits.validation),
        adapter=adapter,
        reflection_lm=script,
        max_metric_calls=given.episodes,
        seed=given.seed,
    )
    played = {"base": 0, "weights": steps * config.rollout.groups * config.rollout.group_size, "gepa": adapter.episodes}
    noise = [script.noise() for _ in range(given.episodes // len(splits.validation))]
    chosen = max(noise, key=lambda prompt: sum(score(adapter, prompt, splits.validation)))
    played["random"] = adapter.episodes - played["gepa"]
    prompts = {"base": first, "gepa": found.best_candidate[SYSTEM_PROMPT], "random": chosen}
    print("| arm | episodes | held-out success | system prompt |\n|---|---|---|---|")
    for name, prompt in prompts.items():
        estimate = rate([[value] for value in score(adapter, prompt, splits.heldout)])
        assert estimate is not None
        show(name, played[name], estimate.value, estimate.low, estimate.high, prompt)
    row = heldout(given.out / "weights")
    show("weights", played["weights"], row["score"], row["low"], row["high"], first)
    (given.out / "prompts.json").write_text(json.dumps({"prompts": prompts, "episodes": played}, indent=1))
    adapter.close()


def show(name: str, episodes: int, value: float, low: float, high: float, prompt: str) -> None:
    print(f"| `{name}` | {episodes} | {value:.2f} [{low:.2f}, {high:.2f}] | {prompt} |", flush=True)


if __name__ == "__main__":
    main()
