"""What the local trainer costs: tokens per second, idle time, memory; beside TRL, and without running ahead.

    python benchmarks/train.py                                # all parts, but without TRL
    python benchmarks/train.py update --trl-python PATH       # beside TRL: a Python that has trl
    python benchmarks/train.py update --trl-python PATH --hidden 256 --layers 6
    python benchmarks/train.py ahead --steps 20

Each part runs in processes of its own, on random weights in float32, on one thread (``--threads``).

- run: a short ``clawgym train rl`` in real sandboxes: what its ``metrics.jsonl`` says, and the most memory it held.
- update: one update on 64 completions (8 prompts x 8), sampled before by our engine: ``make_batch`` and
  ``Learner.train_step`` beside one step of TRL's ``GRPOTrainer`` on the same weights, ids and rewards, in turns. TRL is
  timed from the moment it has its advantages, without sampling and rewards. CPU time, so that others on
  the machine count for little; per token of prompts and completions, whatever was filled up or shared. ``rollout`` and
  ``recompute`` are ``algorithm.old``: TRL makes one pass, as ``rollout`` does; ``recompute`` makes one more. The ratio
  (above 1: ours is faster) is that of the medians, to TRL at the better of two sizes of micro-batches; its range is
  that of the rounds. Norms of the first gradient show that the two compute the same.
- ahead: episodes whose agent runs a command of long-tailed duration first (log-normal), the same durations with each
  ``rollout.staleness``, in real sandboxes.
- memory: what one ``Learner.train_step`` adds to the resident memory at its peak, in a fresh process each, beside what
  rows padded to the longest would hold.
- batch: CPU time of ``make_batch``, without a model.
- score: CPU time of the teachers of hindsight hints, one forward pass for each hint and turn, and in batches; in
  brackets how many times faster.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import multiprocessing
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from clawgym.agents.protocol import AgentContext, AgentReport
from clawgym.agents.tool_loop import ToolLoopAgent
from clawgym.engines.protocol import GenerateRequest, Sampling
from clawgym.engines.tiny import make_tiny_model
from clawgym.engines.transformers import TransformersEngine
from clawgym.pool import Pool
from clawgym.pool.states import Batch, BatchEpisode, BatchGroup, PooledEpisode
from clawgym.records import TrainingSequence
from clawgym.rewards.scoring import ScoreRequest, TorchScorer
from clawgym.trainers.common import collector
from clawgym.trainers.common.batch import make_batch
from clawgym.trainers.common.policy import load_policy
from clawgym.trainers.common.services import pool_file
from clawgym.trainers.common.splits import load_splits
from clawgym.trainers.config import TrainConfig
from clawgym.trainers.local.learner import Learner
from clawgym.trainers.local.main import train

PARTS = ("run", "update", "ahead", "memory", "batch", "score")
LR = 1e-6
GROUPS, SIZE = 8, 8
UPDATE = (34, 18, 26, 24, 10)
AHEAD = (11, 9, 8, 14, 15, 15, 16, 10)
MEMORY = (36, 9, 10, 14, 20, 22, 18)
SCORE = (40, 16, 16, 16)


# --- ids to learn from --------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Row:
    """One completion."""

    prompt: tuple[int, ...]
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    reward: float


Groups = list[list[Row]]


async def sampled(engine: TransformersEngine, prompts: Sequence[tuple[int, ...]], lengths: list[list[int]]) -> Groups:
    """Completions of these prompts with these numbers of tokens, half of each group rewarded."""

    async def one(prompt: tuple[int, ...], length: int, reward: float) -> Row:
        tokens = [
            t async for t in engine.generate(GenerateRequest(prompt, Sampling(temperature=1.0, max_tokens=length)))
        ]
        ids = tuple(id for t in tokens for id in t.ids)
        return Row(prompt, ids, tuple(p for t in tokens for p in t.logprobs), reward)

    return [
        list(await asyncio.gather(*(one(prompt, length, float(n % 2)) for n, length in enumerate(most))))
        for prompt, most in zip(prompts, lengths, strict=True)
    ]


def batch_of(groups: Groups) -> Batch:
    """As the pool would give it."""

    def episode(group: int, n: int, row: Row) -> BatchEpisode:
        pooled = PooledEpisode(
            id=f"{group}-{n}", channel="train", task_id=str(group), task_hash="", group=str(group), sample=n, seed=0,
            agent="", secret_sha256="", state="closed", n_turns=1, opened_at=0.0, outcome="failed", reward=row.reward,
            rewards={"strict": row.reward},
        )  # fmt: skip
        count = len(row.ids)
        mask = (0,) * len(row.prompt) + (1,) * count
        return BatchEpisode(
            pooled, (TrainingSequence((0,), row.prompt + row.ids, mask, row.logprobs, (0,) * count, (0,) * count),), {}
        )

    made = [
        BatchGroup(str(g), str(g), tuple(episode(g, n, row) for n, row in enumerate(rows)))
        for g, rows in enumerate(groups)
    ]
    return Batch("trainer", 0, tuple(made), 0.0)


# --- update ---------------------------------------------------------------------------------------------------------


def works(vocab: int) -> Iterator[tuple[str, list[tuple[int, ...]], list[list[int]]]]:
    """(name, prompts, numbers of tokens to sample after them)."""
    rng = random.Random(0)

    def prompts(length: int) -> list[tuple[int, ...]]:
        return [tuple(rng.randrange(9, vocab) for _ in range(length)) for _ in range(GROUPS)]

    yield "even: 64 ids, 64 sampled", prompts(64), [[64] * SIZE] * GROUPS
    mixed = [[min(256, 1 + int(rng.expovariate(1 / 64))) for _ in range(SIZE)] for _ in range(GROUPS)]
    yield "mixed: 64 ids, 1 to 256 sampled", prompts(64), mixed
    yield "group: 600 ids, 32 sampled", prompts(600), [[32] * SIZE] * GROUPS


class Ours:
    """One learner, update after update."""

    def __init__(self, folder: Path, old: str, groups: Groups) -> None:
        self._config = TrainConfig.model_validate({"algorithm": {"old": old}, "optimizer": {"lr": LR}})
        policy = load_policy(self._config.model, folder, self._config.compute)
        self._learner = Learner(policy, self._config)
        self._batch = batch_of(groups)
        self.grad_norm = 0.0

    def update(self) -> float:
        """CPU seconds."""
        started = time.process_time()
        figures = self._learner.train_step(make_batch(self._batch, self._config, seed=0), seed=0)
        seconds = time.process_time() - started
        self.grad_norm = self.grad_norm or figures["actor/grad_norm"]
        return seconds


class Theirs:
    """TRL's trainer in a process of its own. ``micro``: completions that go through the model at once."""

    def __init__(self, python: str, folder: Path, micro: int, threads: int) -> None:
        self._file = folder.parent / f"work-{micro}.json"
        self._process = subprocess.Popen(
            [python, str(Path(__file__).with_name("train_trl.py")), str(folder), str(micro), str(threads), str(LR)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": str(threads), "TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1"},
        )
        self.grad_norm = 0.0

    def learn_from(self, groups: Groups) -> None:
        """From now on."""
        work = [
            {"prompt": rows[0].prompt, "completions": [r.ids for r in rows], "rewards": [r.reward for r in rows]}
            for rows in groups
        ]
        self._file.write_text(json.dumps(work))
        self.grad_norm = 0.0

    def update(self) -> float:
        """CPU seconds."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{self._file}\n")
        self._process.stdin.flush()
        for text in self._process.stdout:
            if text.startswith("@@ "):
                said = json.loads(text[3:])
                self.grad_norm = self.grad_norm or said["grad_norm"]
                return said["seconds"]
        raise SystemExit("TRL's half ended: run `PATH benchmarks/train_trl.py FOLDER 8 1 1e-6` by hand to see why")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def measure_update(options: argparse.Namespace, folder: Path) -> None:
    engine = TransformersEngine(folder, dtype=torch.float32, max_batch=GROUPS * SIZE)
    if not options.trl_python:
        print("TRL is not measured: --trl-python PATH was not given")
    trl = {
        f"TRL, {micro} at once": Theirs(options.trl_python, folder, micro, options.threads)
        for micro in (8, 64)
        if options.trl_python
    }
    line("", "", "us a token", "TRL / this", "gradient", widths=UPDATE)
    for name, prompts, lengths in works(engine.vocab_size):
        groups = asyncio.run(sampled(engine, prompts, lengths))
        # The same denominator for all, so that neither filling nor sharing counts as work done.
        tokens = sum(len(row.prompt) + len(row.ids) for rows in groups for row in rows)
        those: dict[str, Any] = {f"ours, {old}": Ours(folder, old, groups) for old in ("rollout", "recompute")}
        for which, theirs in trl.items():
            theirs.learn_from(groups)
            those[which] = theirs
        seconds: dict[str, list[float]] = {which: [] for which in those}
        for round_ in range(options.rounds + 1):
            for which, one in those.items():
                took = one.update()
                if round_:  # the first warms up
                    seconds[which].append(1e6 * took / tokens)
        best = min(trl, key=lambda which: statistics.median(seconds[which]), default=None)
        for which, found in seconds.items():
            ratio = ""
            if best is not None:
                each = [b / a for a, b in zip(found, seconds[best], strict=True)]
                middle = statistics.median(seconds[best]) / statistics.median(found)
                ratio = f"{middle:.2f} ({min(each):.2f} to {max(each):.2f})"
            spread = f"{statistics.median(found):.1f} ({min(found):.1f} to {max(found):.1f})"
            line(name, which, spread, ratio, f"{those[which].grad_norm:.4f}", widths=UPDATE)
    for theirs in trl.values():
        theirs.close()


# --- whole runs -----------------------------------------------------------------------------------------------------


def small(options: argparse.Namespace, **rollout: Any) -> TrainConfig:
    """A run in real sandboxes that measures as little as it may."""
    heads = max(2, options.hidden // 64)
    return TrainConfig.model_validate(
        {
            "backend": "namespace",
            "model": {
                "scratch": {
                    "hidden": options.hidden, "layers": options.layers, "heads": 2 * heads, "kv_heads": heads,
                    "context_window": 1024,
                }
            },
            "tasks": {
                "generators": ["write-word"],
                "demonstrations": {"count": 1},
                "train": {"first": 100, "count": 64},
                "validation": {"count": 1},
                "heldout": {"first": 100, "count": 1},
            },
            "agent": {"protocol": "text", "system_prompt": "Work in the shell.", "max_steps": 4, "max_tokens": 48},
            "rollout": rollout,
            "optimizer": {"lr": LR},
            "compute": {"threads": options.threads},
            "evaluation": {"every": 10**6, "canary": 0},
            "budget": {"steps": options.steps},
        }
    )  # fmt: skip


class Quiet:
    """Says nothing."""

    def say(self, text: str) -> None: ...

    def step(self, step: int, figures: Any) -> None: ...

    def measuring(self, part: str, episodes: int) -> None: ...

    def measured(self, row: Any) -> None: ...


def steps_of(config: TrainConfig, out: Path) -> list[dict[str, Any]]:
    """A run's figures, step by step. The first step warms up: what follows is counted from its end."""
    asyncio.run(train(config, out, view=Quiet()))
    return [json.loads(text) for text in (out / "metrics.jsonl").read_text().splitlines()]


def measure_run(options: argparse.Namespace, folder: Path) -> None:
    config = small(options, groups=4, group_size=4, concurrency=16)
    before = resident("VmRSS")
    first, *rows = steps_of(config, folder / "run")
    wall = rows[-1]["time"] - first["time"]
    waited, learnt = (sum(row[name] for row in rows) for name in ("timing/wait_for_batch", "timing/update"))
    idle = sum(row["timing/rollouts_idle_seconds"] for row in rows)
    tokens = sum(row["rollout/sampled_tokens"] for row in rows)
    computed = sum(row["perf/update_tokens_per_second"] * row["timing/update"] for row in rows)
    found = {
        "seconds a step": f"{wall / len(rows):.2f}",
        "turns of an episode": f"{statistics.fmean(row['rollout/avg_steps_per_trajectory'] for row in rows):.1f}",
        "rollout: sampled tokens/s": f"{tokens / waited:.0f}",
        "update: tokens/s through the model": f"{computed / learnt:.0f}",
        "trainer idle": f"{waited / wall:.0%}",
        "rollouts idle": f"{idle / wall:.0%}",
        "memory before": f"{before:.0f} MiB",
        "memory at its peak": f"{resident('VmHWM'):.0f} MiB",
    }
    for name, value in found.items():
        line(name, value, widths=(36, 12))


# --- running ahead --------------------------------------------------------------------------------------------------


class Slow(ToolLoopAgent):
    """Runs a command first that takes as long as this episode's seed says."""

    tasks: frozenset[str] = frozenset()

    async def run(self, context: AgentContext) -> AgentReport:
        if context.task.id in self.tasks:
            seconds = min(45.0, context.rng.lognormvariate(0.5, 1.0))
            await context.sandbox.exec(["sleep", f"{seconds:.3f}"], timeout=60)
        return await super().run(context)


def measure_ahead(options: argparse.Namespace, folder: Path) -> None:
    places = 16
    config = small(options, groups=4, group_size=4, concurrency=places, staleness=options.staleness)
    Slow.tasks = frozenset(task.id for task in load_splits(config.tasks, config.agent).train)
    setattr(collector, "ToolLoopAgent", Slow)  # noqa: B010  # everything else is the real loop
    first, *rows = steps_of(config, folder / "run")
    start, end = first["time"], rows[-1]["time"]
    with Pool(pool_file(folder / "run")) as pool:
        episodes = list(pool.episodes(channel="train"))
        dropped = pool.stats()["channels"]["train"]["groups"].get("dropped", 0)
    busy = sum(max(0.0, min(end, e.closed_at or end) - max(start, e.opened_at)) for e in episodes)
    idle = sum(row["timing/rollouts_idle_seconds"] for row in rows)
    said = {
        "seconds": (end - start) / len(rows),
        "trainer_idle": sum(row["timing/wait_for_batch"] for row in rows) / (end - start),
        "rollouts_idle": idle / (end - start),
        "places": busy / (end - start) / places,
        "staleness": statistics.fmean(row["staleness/mean"] for row in rows),
        "dropped": dropped,
    }
    print(json.dumps(said), flush=True)


def compare_ahead(options: argparse.Namespace) -> None:
    head = (
        "staleness",
        "s/step",
        "ratio",
        "trainer idle",
        "rollouts idle",
        "places in use",
        "mean staleness",
        "dropped",
    )
    line(*head, widths=AHEAD)
    alone = None
    for staleness in (0, 1, 2):
        found = json.loads(in_a_process(options, "ahead", f"--staleness={staleness}"))
        alone = alone or found["seconds"]
        line(
            str(staleness),
            f"{found['seconds']:.2f}",
            f"{alone / found['seconds']:.2f}",
            *(f"{found[name]:.0%}" for name in ("trainer_idle", "rollouts_idle", "places")),
            f"{found['staleness']:.2f}",
            str(found["dropped"]),
            widths=AHEAD,
        )


# --- memory ---------------------------------------------------------------------------------------------------------

LENGTHS = {
    "equal: 64 rows of 256": [256] * 64,
    "one long: 54 of 256, one of 2,560": [256] * 54 + [2560],
    "twice: 128 rows of 256": [256] * 128,
}


def resident(name: str) -> float:
    """``VmRSS`` or its highest mark, ``VmHWM``, of this process in MiB."""
    for text in Path("/proc/self/status").read_text().splitlines():
        if text.startswith(f"{name}:"):
            return int(text.split()[1]) / 1024
    raise SystemExit(f"/proc/self/status has no {name}: this part needs Linux")


def unrelated(lengths: Sequence[int], vocab: int) -> Groups:
    """Rows that have no beginning in common, half of each trained."""
    rng = random.Random(0)

    def row(length: int, reward: float) -> Row:
        ids = tuple(rng.randrange(9, vocab) for _ in range(length))
        half = length // 2
        return Row(ids[:half], ids[half:], (-6.5,) * (length - half), reward)

    return [[row(length, float(n % 2)) for n, length in enumerate(lengths)]]


def peak(case: tuple[Path, str, int]) -> float:
    """MiB that one update adds; for a process that ends with it."""
    folder, name, micro_tokens = case
    config = TrainConfig.model_validate(
        {"algorithm": {"old": "rollout"}, "optimizer": {"lr": LR}, "compute": {"micro_tokens": micro_tokens}}
    )
    learner = Learner(load_policy(config.model, folder, config.compute), config)

    def step(lengths: Sequence[int]) -> None:
        learner.train_step(make_batch(batch_of(unrelated(lengths, 700)), config, seed=0), seed=0)

    step([16, 16])  # gradients, and what the optimizer keeps
    Path("/proc/self/clear_refs").write_text("5")  # the highest mark is now what is resident
    before = resident("VmRSS")
    step(LENGTHS[name])
    return resident("VmHWM") - before


def measure_memory(options: argparse.Namespace, folder: Path) -> None:
    head = ("", "tokens", "filled up", "peak, MiB", "all at once, MiB", "KiB a token, at once", "filled up, MiB")
    line(*head, widths=MEMORY)
    # This process has made the model and computes nothing more, so its forks are alike.
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        for name, lengths in LENGTHS.items():
            tokens, filled = sum(lengths), max(lengths) * len(lengths)
            bounded, whole = pool.map(peak, [(folder, name, 8192), (folder, name, 10**9)], chunksize=1)
            each = whole / tokens
            line(
                name,
                f"{tokens:,}",
                f"{filled:,}",
                f"{bounded:,.0f}",
                f"{whole:,.0f}",
                f"{1024 * each:.1f}",
                f"{each * filled:,.0f} (reckoned)",
                widths=MEMORY,
            )


# --- batches and teachers -------------------------------------------------------------------------------------------


def fastest(rounds: int, *works: Callable[[], object]) -> list[float]:
    """CPU milliseconds of the fastest of ``rounds`` calls of each work; in turns, so that all meet the same machine."""
    took: list[list[float]] = [[] for _ in works]
    for _ in range(rounds):
        for place, work in enumerate(works):
            started = time.process_time()
            work()
            took[place].append(1000 * (time.process_time() - started))
    return [min(some) for some in took]


def measure_batch(options: argparse.Namespace, folder: Path) -> None:
    config = TrainConfig()
    for count, length in ((64, 256), (256, 2048)):
        batch = batch_of(unrelated([length] * count, 700))
        (took,) = fastest(options.rounds, partial(make_batch, batch, config, seed=0))
        print(f"{count} rows of {length:,}: {took:.1f} ms", flush=True)


def scores(model: torch.nn.Module, asked: Sequence[ScoreRequest], tokens: int) -> None:
    asyncio.run(TorchScorer(model, tokens=tokens).score(asked))


def measure_score(options: argparse.Namespace, folder: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rng = random.Random(0)

    def some(low: int, high: int) -> tuple[int, ...]:
        return tuple(rng.randrange(9, 700) for _ in range(rng.randint(low, high)))

    chats = [ScoreRequest(some(40, 160), some(8, 96), 20) for _ in range(40)]
    agents = []
    for _ in range(16):  # turns of a tool loop with two hints each, and the student
        prompt, sample = some(200, 800), some(8, 48)
        agents += [ScoreRequest((*prompt, *some(*hint)), sample, 20) for hint in ((10, 30), (10, 30), (0, 0))]
    sizes = (1, 1024, 4096)  # 1: each request alone
    line("milliseconds", "alone", "1,024 tokens", "4,096 tokens", widths=SCORE)
    for name, asked in (("40 turns of conversations, one hint", chats), ("16 turns of a tool loop, two hints", agents)):
        found = fastest(options.rounds, *(partial(scores, model, asked, tokens) for tokens in sizes))
        line(name, *(f"{took:.0f} ({found[0] / took:.2f})" for took in found), widths=SCORE)


# --- the program ----------------------------------------------------------------------------------------------------


def line(*cells: str, widths: Sequence[int]) -> None:
    print("".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip(), flush=True)


def in_a_process(options: argparse.Namespace, part: str, *more: str) -> str:
    """The last line that ``part`` prints in a process of its own."""
    shape = (f"--{name}={getattr(options, name)}" for name in ("hidden", "layers", "threads", "steps"))
    done = subprocess.run(
        [sys.executable, __file__, "--alone", part, *shape, *more],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": str(options.threads), "TQDM_DISABLE": "1"},
    )
    return done.stdout.splitlines()[-1]


def alone(options: argparse.Namespace) -> None:
    """One measurement."""
    torch.set_num_threads(options.threads)
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        if options.alone in ("update", "memory", "score"):
            heads = max(2, options.hidden // 64)
            make_tiny_model(
                folder, hidden=options.hidden, layers=options.layers, heads=2 * heads, kv_heads=heads, spread=0.05
            )
        measure = {
            "run": measure_run,
            "update": measure_update,
            "ahead": measure_ahead,
            "memory": measure_memory,
            "batch": measure_batch,
            "score": measure_score,
        }[options.alone]
        measure(options, folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="all, unless named")
    parser.add_argument("--trl-python", help="a Python that has trl, for the part 'update'")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7, help="of 'update', 'batch' and 'score' (default: 7)")
    parser.add_argument("--steps", type=int, default=8, help="of 'run' and 'ahead' (default: 8)")
    for name, kind in (("alone", str), ("staleness", int)):
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.alone:
        alone(options)
        return 0
    print(
        f"hidden {options.hidden}, {options.layers} layers, float32, {options.threads} thread(s) of {os.cpu_count()} "
        f"cores, torch {torch.__version__}, transformers {transformers.__version__}"
    )
    for part in options.parts or PARTS:
        print(f"\n{part}", flush=True)
        if part == "ahead":
            compare_ahead(options)
        else:
            argv = [sys.executable, __file__, *sys.argv[1:], "--alone", part]
            subprocess.run(argv, check=True, env=os.environ | {"OMP_NUM_THREADS": str(options.threads)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
