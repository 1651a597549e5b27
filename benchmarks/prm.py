"""Process reward models beside a bag of words: AUC and calibration on held-out families and on another policy.

    python benchmarks/prm.py --out runs/prm --tasks 3

Two scripted policies work on ``terminal-basic``, with milestones. ``careless`` looks around, makes commands of other
tasks, breaks commands, and removes what it made; its episodes are trained on. ``hasty`` runs wrong solutions of the
task, and writes its commands in another way; its episodes are of other tasks, and only evaluated. Each ``--kinds`` is
one ``clawgym train prm``; the hidden states are those of a packaged model.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from clawgym.agents.demonstrate import reference_calls
from clawgym.engines.protocol import Delta
from clawgym.gateway.server import Gateway
from clawgym.pool import Pool
from clawgym.records import Task, Usage
from clawgym.sandbox import backend as make_backend
from clawgym.tasks.packs import terminal_basic
from clawgym.trainers import protocols
from clawgym.trainers.common.collector import Player
from clawgym.trainers.config import load_config

LOOKS = ("ls -la", "find . -type f | head -20", "cat $(find . -type f | head -1) | head -5", "wc -l $(find . -type f)")
SETTINGS = ("reward.milestones=turn", "agent.max_steps=12", "tasks.demonstrations.count=1", "tasks.train.count=1")
KINDS = {
    "half": ["prm.layer=15"],
    "mlp": ["prm.layer=15", "prm.hidden=16"],
    "whole": [],
}


def commands(task: Task) -> list[str]:
    """The commands of the reference solution."""
    return [str(call.arguments["command"]) for call in reference_calls(task) if call.name == "bash"]


def careless(task: Task, dice: random.Random) -> list[str]:
    """Commands of an episode."""
    right, plan = commands(task), [dice.choice(LOOKS)] * (dice.random() < 0.6)
    other = commands(terminal_basic.make(str(task.metadata["generator"]), 100_000 + dice.randrange(1000)))
    solves = dice.random() < 0.7
    for n, command in enumerate(right):
        if dice.random() < 0.35:
            plan.append(dice.choice((other[n % len(other)], command[: len(command) * 2 // 3])))
        if solves:
            plan.append(command)
    if dice.random() < 0.4:
        plan.append('rm -rf "$(ls -t | head -1)"')
        plan += right * (solves and dice.random() < 0.5)
    return [*plan, *[dice.choice(LOOKS)] * (dice.random() < 0.4)]


def hasty(task: Task, dice: random.Random) -> list[str]:
    """Commands of an episode."""
    plan = []
    if dice.random() < 0.6:
        plan.append(dice.choice(task.wrong_solutions).read().decode())
    if dice.random() < 0.7:
        plan.append("set -e\n" + "\n".join(commands(task)))
    if dice.random() < 0.3:
        plan.append("rm -r ./*")
    return [*plan, "ls | sort"]


class Scripted:
    """An engine that replies with the commands of a policy, one at a time, and then submits."""

    name = "scripted"

    def __init__(self, tasks: Sequence[Task], policy: Callable[[Task, random.Random], list[str]]) -> None:
        self._plans = {task.instruction: policy(task, random.Random(task.id)) for task in tasks}

    async def stream(self, body: Mapping[str, Any], *, session: str = "") -> AsyncIterator[Delta]:
        plan = self._plans[next(m["content"] for m in body["messages"] if m["role"] == "user")]
        number = sum(m["role"] == "assistant" for m in body["messages"])
        yield Delta(text=f"```bash\n{plan[number]}\n```" if number < len(plan) else "<submit/>")
        yield Delta(finish_reason="stop", usage=Usage())

    def identity(self) -> dict[str, Any]:
        return {"name": self.name}

    async def aclose(self) -> None: ...


async def collect(file: Path, policy: Callable[[Task, random.Random], list[str]], seeds: Sequence[int]) -> None:
    """One episode of each generator and seed."""
    if file.exists():
        return
    config = load_config("tiny-cpu", [*SETTINGS, "rollout.concurrency=4"])
    tasks = [terminal_basic.make(name, seed) for name in terminal_basic.GENERATORS for seed in seeds]
    sandboxes = make_backend(config.backend)
    part = file.with_suffix(".part")
    with Pool(part) as pool:
        async with Gateway(Scripted(tasks, policy), pool) as gateway:
            await gateway.listen()
            player = Player(config, gateway, sandboxes)
            await asyncio.gather(*(player.play(task, seed=0) for task in tasks))
    await sandboxes.aclose()
    part.rename(file)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/prm"))
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tasks", type=int, default=3, help="of each generator; the other policy has one more")
    parser.add_argument("--kinds", nargs="+", choices=[*KINDS], default=[*KINDS])
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    pools = given.out / "careless.db", given.out / "hasty.db"
    started = time.monotonic()
    await collect(pools[0], careless, range(0, 2 * given.tasks, 2))
    await collect(pools[1], hasty, (1,))
    print(f"episodes: {time.monotonic() - started:.0f} s", flush=True)
    print("| trained | data | model | AUC | Brier | ECE | AUC better by |\n|---|---|---|---|---|---|---|")
    for kind in given.kinds:
        started = time.monotonic()
        files = (f"prm.data=[{pools[0]}]", f"prm.others=[{pools[1]}]", f"prm.model={given.model}", "prm.context=256")
        await protocols.train(load_config("tiny-cpu", [*SETTINGS, *files, *KINDS[kind]]), given.out / kind, "prm")
        found = json.loads((given.out / kind / "evaluation.json").read_text())
        for part in ("heldout", "others"):
            for name, row in found[part].items():
                shown = [_shown(row[column]) for column in ("auc", "brier", "ece", "gain")]
                print(f"| {kind} | {part} | {name} | {' | '.join(shown)} |", flush=True)
        print(f"{kind}: {time.monotonic() - started:.0f} s, {found['turns']}", flush=True)


def _shown(found: Mapping[str, float] | None) -> str:
    return "" if found is None else f"{found['value']:.3f} [{found['low']:.3f}, {found['high']:.3f}]"


if __name__ == "__main__":
    asyncio.run(main())
