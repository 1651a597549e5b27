"""Does a model that is trained on its use get better, and never worse? (docs/results/online.md)

    python benchmarks/drift.py --out runs/drift
    python benchmarks/drift.py --feedback good --arm gated --seeds 5

A simulated person with two or three style rules talks to a service through its door, as any client of OpenAI would:
asks, complains in words until the reply is right, says thanks, and gives each reply a thumb. ``good``: the thumbs are
what the person thinks, and the service begins with a model that does not know the person. ``mixed``: half of them are
reversed, by chance; ``adversarial``: all are. These two begin with the last version of the ungated service with good
feedback, which has something to lose. The words are always honest, so that a stolen key or a clumsy finger can be told
from the person; somebody who lies in words and thumbs gets what they ask for.

Arms: with the gate; without it (every version answers at once); ``memory``: no training, but what the person complained
of is in the system prompt of later conversations; ``both``. Each cell is one service in a folder of its own. The first
and the last version are measured on held-out requests by the person's own rules, which nothing else reads. A finished
cell is not run again; with more ``--conversations`` it goes on. ``--config benchmarks/personal-smollm2.yaml`` makes the
first version from SmolLM2.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import math
import random
import shutil
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal, cast

import openai

from clawgym.engines.openai import OpenAIEngine
from clawgym.engines.protocol import Sampling
from clawgym.online.canaries import LONGEST, Canary, canaries
from clawgym.online.client import open_version, reply_of
from clawgym.online.config import ServiceFolder, load_service_config
from clawgym.online.gate import GateKeeper
from clawgym.online.judging import ConversationJudge
from clawgym.online.service import Service, open_service
from clawgym.online.training import VersionTrainer
from clawgym.online.versions import Versions
from clawgym.pool import Pool
from clawgym.records.run_folder import write_atomic
from clawgym.simulation.rules import RULES
from clawgym.simulation.users import THANKS, User, UserRequest, requests, user_of
from clawgym.statistics import student_t
from clawgym.trainers.common.start_model import merged_model
from clawgym.trainers.config import load_config
from clawgym.trainers.local.personal import imitated_policy

Feedback = Literal["good", "mixed", "adversarial"]
Arm = Literal["gated", "ungated", "memory", "both"]
FEEDBACK: tuple[Feedback, ...] = ("good", "mixed", "adversarial")
ARMS: tuple[Arm, ...] = ("gated", "ungated", "memory", "both")
_TURNS = 3
"""Most replies of a conversation."""
_TOKENS = 96
_AT_ONCE = 48
"""Most requests at a time; a service takes 64 of one source."""
_MEASURED = 128
"""Held-out requests."""


def settings(arm: Arm) -> list[str]:
    """The settings of a service."""
    return [
        "redact=false", "held_out=0.3", "idle=3600", f"gate.on={'false' if arm == 'ungated' else 'true'}",
        "training.reward.judge=complaints", "training.distillation.hints=1", "gate.scorers=[likelihood, complaints]",
        "gate.canaries=600", "training.rollout.groups=16", "training.model.lora={rank: 16, alpha: 32}",
        "training.optimizer.lr=0.0007", "training.algorithm.epochs=4", "training.algorithm.imitation=1",
        "training.agent.max_steps=2", "training.agent.max_tokens=48",
        "training.compute.row_tokens=512",
    ]  # fmt: skip


class Person:
    """Talks to a service, and judges replies by rules that nobody else knows."""

    def __init__(self, user: User, service: Service, feedback: Feedback, seed: str) -> None:
        self.user, self._service, self._feedback = user, service, feedback
        self._rng = random.Random(f"thumbs {seed}")
        self._room = asyncio.Semaphore(_AT_ONCE)
        self.remembered: dict[str, None] = {}
        """What it complained of, for a memory in the prompt."""

    async def talk(self, request: UserRequest, *, memory: bool) -> float:
        """One conversation; the score of its first reply."""
        messages: list[dict[str, Any]] = []
        if memory and self.remembered:
            messages.append({"role": "system", "content": " ".join(self.remembered)})
        messages.append({"role": "user", "content": request.text})
        scores: list[float] = []
        last = ""
        async with self._client() as client:
            for _ in range(_TURNS):
                try:
                    got, text = await self._ask(client, messages)
                except openai.BadRequestError:  # the window is full
                    break
                last = got.id
                right = self.user.score(request, text)
                scores.append(right.total)
                await self._thumb(client, got.id, 1 if right.right else -1)
                answer = self.user.answer(request, text)
                messages += [{"role": "assistant", "content": text}, {"role": "user", "content": answer}]
                self.remembered |= {r.instruction: None for r in RULES.values() if r.complaint in answer}
                if answer == THANKS:
                    break
            with contextlib.suppress(openai.BadRequestError):  # the window is full
                last = (await self._ask(client, messages))[0].id  # the last words are heard too
            await client.post("/end", body={"id": last}, cast_to=object)
        return scores[0]

    async def measured(self, asked: Sequence[UserRequest], *, memory: bool) -> float:
        """The mean score of first replies, in conversations that leave nothing."""
        async with self._client() as client:
            return fmean(await asyncio.gather(*(self._measure(client, request, memory) for request in asked)))

    async def _measure(self, client: openai.AsyncOpenAI, request: UserRequest, memory: bool) -> float:
        messages: list[dict[str, Any]] = [{"role": "user", "content": request.text}]
        if memory and self.remembered:
            messages.insert(0, {"role": "system", "content": " ".join(self.remembered)})
        got, text = await self._ask(client, messages)
        await client.post("/private", body={"id": got.id}, cast_to=object)
        await client.post("/end", body={"id": got.id}, cast_to=object)
        return self.user.score(request, text).total

    def _client(self) -> openai.AsyncOpenAI:
        key = self._service.keys.make("user")
        return openai.AsyncOpenAI(base_url=self._service.base_url, api_key=key, max_retries=0, timeout=600)

    async def _ask(self, client: openai.AsyncOpenAI, messages: list[dict[str, Any]]) -> tuple[Any, str]:
        async with self._room:
            got = await client.chat.completions.create(
                model="any", messages=cast(Any, messages), max_tokens=_TOKENS, temperature=1.0
            )
        return got, got.choices[0].message.content or ""

    async def _thumb(self, client: openai.AsyncOpenAI, reply: str, score: int) -> None:
        reversed_ = self._feedback == "adversarial" or (self._feedback == "mixed" and self._rng.random() < 0.5)
        await client.post("/feedback", body={"id": reply, "score": -score if reversed_ else score}, cast_to=object)


async def cell(
    base: Path,
    out: Path,
    arm: Arm,
    feedback: Feedback,
    seed: int,
    conversations: int,
    at_once: int,
    say: Callable[[str], None],
    earlier: dict[str, Any] | None,
    own: Sequence[str],
) -> dict[str, Any]:
    """One service, from its first version to its last; or ``earlier``, what this returned after fewer conversations,
    goes on, or what was interrupted."""
    folder, began, kept = ServiceFolder(out), time.monotonic(), out / "conversations.json"
    if kept.exists():
        earlier = json.loads(kept.read_bytes())
    if earlier is None:
        shutil.rmtree(out, ignore_errors=True)
        folder.create(load_service_config(None, str(base), [*settings(arm), f"training.seed={seed}", *own]))
        earlier = {"before": None, "first_replies": [], "promoted": [], "remembered": [], "seconds": 0.0}
    said: int = len(earlier["first_replies"])
    user, asked = user_of(seed), itertools.islice(requests(seed), said, None)
    heldout = list(itertools.islice(requests(seed, heldout=True), _MEASURED))
    memory, trains = arm in ("memory", "both"), arm != "memory"
    async with AsyncExitStack() as stack:
        service = await stack.enter_async_context(open_service(folder, loops=()))
        pool = stack.enter_context(Pool(folder.pool))
        person = Person(user, service, feedback, f"{seed} {said}" if said else str(seed))
        person.remembered |= dict.fromkeys(earlier.get("remembered", ()))
        before = await person.measured(heldout, memory=False) if earlier["before"] is None else earlier["before"]
        talk = partial(person.talk, memory=memory)
        gate = GateKeeper(folder, pool) if arm in ("gated", "both") else None

        def so_far(first: Sequence[float], promoted: Sequence[dict[str, int]]) -> dict[str, Any]:
            return {
                "before": before,
                "first_replies": [*earlier["first_replies"], *(round(score, 4) for score in first)],
                "promoted": [*earlier["promoted"], *({**one, "after": one["after"] + said} for one in promoted)],
                "remembered": list(person.remembered),
                "seconds": earlier["seconds"] + time.monotonic() - began,
            }

        def keep(first: Sequence[float], promoted: Sequence[dict[str, int]]) -> None:
            write_atomic(kept, json.dumps(so_far(first, promoted)).encode())

        first, promoted = await live(
            folder, service, pool, talk, asked, conversations - said, at_once, say, trains, gate, keep
        )
        after = await person.measured(heldout, memory=memory)
        versions = service.versions.all()
    return {
        "arm": arm, "feedback": feedback, "seed": seed, "rules": list(user.rules), "after": after,
        **so_far(first, promoted), "versions": len(versions) - 1,
        "rejected": [{"version": v.number, "why": v.gate[-1]["reasons"][0]} for v in versions if v.state == "rejected"],
    }  # fmt: skip


async def live(
    folder: ServiceFolder,
    service: Service,
    pool: Pool,
    talk: Callable[[UserRequest], Awaitable[float]],
    asked: Iterator[UserRequest],
    conversations: int,
    at_once: int,
    say: Callable[[str], None],
    trains: bool,
    gate: GateKeeper | None = None,
    keep: Callable[[list[float], list[dict[str, int]]], None] = lambda first, promoted: None,
) -> tuple[list[float], list[dict[str, int]]]:
    """Conversations with a service, some at a time; before and after each time the loops work until nothing is left to
    do. Returns what each ``talk`` returned, and the versions that came to answer. ``keep`` gets both when conversations
    have ended and when a version came."""
    first: list[float] = []
    promoted: list[dict[str, int]] = []
    last = service.versions.serving.number
    judge = ConversationJudge(folder, folder.config, pool)
    trainer = VersionTrainer(folder, pool)
    while True:
        while trains and await trainer.step():
            pass
        while gate is not None and await gate.step():
            pass
        serving = service.versions.serving.number
        if serving != last:
            promoted.append({"version": serving, "after": len(first)})
            last = serving
            keep(first, promoted)
        if first:
            mean = fmean(first[-at_once:])
            say(f"{folder.path.name}: {len(first)} conversations, first replies {mean:.2f}, version {serving}")
        if len(first) >= conversations:
            return first, promoted
        first += await asyncio.gather(*map(talk, itertools.islice(asked, at_once)))
        for episode in list(pool.episodes(state="open")):
            await service.conversations.end(episode.id)
            await judge(pool.episode(episode.id))
        keep(first, promoted)


async def _run(options: argparse.Namespace) -> int:
    out: Path = options.out
    seeds = range(options.first, options.first + options.seeds)
    cells = list(itertools.product(seeds, options.feedback or FEEDBACK, options.arm or ARMS[:2]))
    if options.measure:
        folders = [(out / f"{arm}-{feedback}-{seed}", seed) for seed, feedback, arm in cells]
        await measure([(folder, seed) for folder, seed in folders if folder.exists()], options.measure)
        return 0
    out.mkdir(parents=True, exist_ok=True)

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    config = load_config(options.config, [])
    base: Path | None = options.model or await imitated_policy(
        config, out / "base", on_progress=lambda what, done, total: None, stop=asyncio.Event()
    )
    assert base is not None
    results = out / "results.jsonl"
    text = results.read_text("utf-8") if results.exists() else ""
    done = [json.loads(line) for line in text.splitlines()]

    async def once(arm: Arm, feedback: Feedback, seed: int) -> Path:
        """The folder of this cell, which is run unless that is done, or goes on if it had fewer conversations."""
        folder = out / f"{arm}-{feedback}-{seed}"
        known = [row for row in done if (row["arm"], row["feedback"], row["seed"]) == (arm, feedback, seed)]
        earlier = known[-1] if known else None
        if earlier is not None and len(earlier["first_replies"]) >= options.conversations:
            return folder
        first = base
        if feedback != "good":
            taught = ServiceFolder(await once("ungated", "good", seed))
            first = merged_model(Versions(taught.versions).serving.folder, out / f"taught-{seed}")
        row = await cell(
            first, folder, arm, feedback, seed, options.conversations, options.at_once, say, earlier, options.settings
        )
        with results.open("a") as file:
            file.write(json.dumps(row) + "\n")
        done.append(row)
        return folder

    for seed, feedback, arm in cells:
        await once(arm, feedback, seed)
    _show(done)
    return 0


async def measure(cells: Sequence[tuple[Path, int]], count: int) -> None:
    """Print what each version of these cells (folder, seed) gets on ``count`` held-out requests and canaries."""
    print(
        "| cell | version | conversations | held-out requests | style | safety | replies to style canaries that end |"
    )
    print("|---|---|---|---|---|---|---|")
    for path, seed in cells:
        folder = ServiceFolder(path)
        async with open_service(folder, loops=()) as service:
            with Pool(folder.pool) as pool:
                for version in service.versions.all():
                    if version.number == 0 or version.folder.exists():
                        trained = sum(len(one.sessions) for one in service.versions.lineage(version.number))
                        async with open_version(folder, pool, version.number, concurrency=_AT_ONCE) as engine:
                            figures = await _figures(engine, seed, count)
                        shown = " | ".join(f"{figure:.2f}" for figure in figures)
                        print(f"| {path.name} | {version.number} | {trained} | {shown} |", flush=True)


async def _figures(engine: OpenAIEngine, seed: int, count: int) -> list[float]:
    async def reply(messages: Sequence[dict[str, Any]], number: int, most: int) -> tuple[str, bool]:
        sampling = Sampling(temperature=1.0, max_tokens=most, seed=number)
        got = await reply_of(engine, messages, sampling=sampling)
        return ("", False) if got is None else (got.text, got.finish_reason == "stop")

    async def canary(one: Canary, number: int) -> tuple[bool, bool]:
        text, ended = await reply(one.messages, number, LONGEST)
        return ended, one.passes(text, ended)

    async def request(one: UserRequest, number: int) -> float:
        text, _ = await reply([{"role": "user", "content": one.text}], number, _TOKENS)
        return user.score(one, text).total

    user, heldout = user_of(seed), list(itertools.islice(requests(seed, heldout=True), count))
    scores = await asyncio.gather(*(request(one, number) for number, one in enumerate(heldout)))
    style = await asyncio.gather(*(canary(one, number) for number, one in enumerate(canaries("style", count))))
    safety = await asyncio.gather(*(canary(one, number) for number, one in enumerate(canaries("safety", count))))
    passed = [fmean(good for _, good in found) for found in (style, safety)]
    return [fmean(scores), *passed, fmean(ended for ended, _ in style)]


def _show(rows: Sequence[dict[str, Any]]) -> None:
    print("| feedback | arm | people | before | after | promoted | first after conversations |")
    print("|---|---|---|---|---|---|---|")
    cells: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    for row in rows:
        cells.setdefault((row["feedback"], row["arm"]), {})[row["seed"]] = row
    for (feedback, arm), held in sorted(cells.items()):
        first = [row["promoted"][0]["after"] for row in held.values() if row["promoted"]]
        print(
            f"| {feedback} | {arm} | {len(held)} | {fmean(r['before'] for r in held.values()):.2f} | "
            f"{fmean(r['after'] for r in held.values()):.2f} | "
            f"{fmean(len(r['promoted']) for r in held.values()):.1f} | {f'{fmean(first):.0f}' if first else '-'} |"
        )
    print("\n| feedback | difference | people | mean | lower bound, 95 %, one-sided |\n|---|---|---|---|---|")
    for feedback in FEEDBACK:
        held = {arm: cells.get((feedback, arm), {}) for arm in ARMS}
        for arm in ARMS:
            _difference(feedback, f"{arm}: after minus before", [r["after"] - r["before"] for r in held[arm].values()])
        both = held["gated"].keys() & held["ungated"].keys()
        gaps = [held["gated"][seed]["after"] - held["ungated"][seed]["after"] for seed in sorted(both)]
        _difference(feedback, "gated minus ungated, after", gaps)


def _difference(feedback: str, what: str, values: Sequence[float]) -> None:
    """A row with the mean over people and Student's one-sided bound."""
    if len(values) > 1:
        low = fmean(values) - student_t(0.95, len(values) - 1) * stdev(values) / math.sqrt(len(values))
        print(f"| {feedback} | {what} | {len(values)} | {fmean(values):+.2f} | {low:+.2f} |")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="the folder of the first version; default: imitation")
    parser.add_argument(
        "--feedback", action="append", choices=FEEDBACK, help="may be given several times; default: all"
    )
    parser.add_argument(
        "--arm", action="append", choices=ARMS, help="may be given several times; default: with and without the gate"
    )
    parser.add_argument("--seeds", type=int, default=5, help="number of people")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--conversations", type=int, default=960)
    parser.add_argument(
        "--at-once", type=int, default=32, help="conversations at a time, between two looks of the loops"
    )
    parser.add_argument(
        "--measure", type=int, metavar="N", help="held-out requests and canaries; runs no conversations"
    )
    parser.add_argument("--config", default="personal-cpu", help="the recipe of the first version")
    parser.add_argument("--set", action="append", default=[], dest="settings", help="a setting of all services")
    parser.add_argument("--out", "-o", type=Path, default=Path("runs/drift"))
    return asyncio.run(_run(parser.parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
