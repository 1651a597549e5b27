"""Does a service lose anything when its processes are killed? (docs/results/online.md)

    python benchmarks/survival.py --kills 50

Clients talk to ``clawgym serve``, rate replies and end conversations, while one of its processes is killed with SIGKILL
at random times: the service itself, or its loop that judges or trains. A killed service is started again with the same
command. In the end:

- every reply that a client got, with its end, is in the pool, in one conversation;
- no conversation was trained on twice, and none that was held out or private at all;
- the version that answers is the one that was promoted last.

Prints how long the service took to answer again. The model is a tiny one with random weights, without a gate, so that
there are many versions.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import openai

from clawgym.engines.tiny import make_tiny_model
from clawgym.online.config import ServiceFolder
from clawgym.online.versions import Versions
from clawgym.pool import Pool

_SETTINGS = (
    "idle=2", "held_out=0.2", "redact=false", "gate.on=false", "training.rollout.groups=4",
    "training.rollout.staleness=1000", "training.reward.judge=complaints", "training.optimizer.lr=0.001",
)  # fmt: skip
_LOOPS = ("service", "judge", "train")


class Running:
    """``clawgym serve`` as a process, which may be killed and started again."""

    def __init__(self, folder: Path, model: str | Path, settings: Sequence[str] = ()) -> None:
        self.folder = ServiceFolder(folder)
        self._command = [
            str(Path(sys.executable).with_name("clawgym")),
            "serve",
            "--dir",
            str(folder),
            "--model",
            str(model),
        ]
        self._command += [part for setting in (*_SETTINGS, *settings) for part in ("--set", setting)]
        self.process: asyncio.subprocess.Process | None = None
        self.base_url, self.key = "", ""
        self.back: list[float] = []
        """Seconds from each start to the line with the address."""

    async def start(self) -> None:
        began = time.monotonic()
        self.process = await asyncio.create_subprocess_exec(
            *self._command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
        )
        assert self.process.stdout is not None
        while line := (await self.process.stdout.readline()).decode():
            if found := re.match(r"(base_url|api_key): +(\S+)", line):
                self.__dict__["base_url" if found[1] == "base_url" else "key"] = found[2]
            if line.startswith("folder:"):
                self.back.append(time.monotonic() - began)
                return
        raise RuntimeError("the service did not start: run its command by hand")

    def kill(self, what: str) -> bool:
        """Kill the service or one of its loops; False if that does not run now."""
        assert self.process is not None
        for pid in [self.process.pid] if what == "service" else _children(self.process.pid):
            if what == "service" or what in _command_of(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    return True
        return False

    async def stop(self) -> None:
        assert self.process is not None
        if self.process.returncode is None:
            self.process.terminate()
        await self.process.wait()


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _command_of(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return []


async def client(service: Running, rng: random.Random, acknowledged: list[str], stop: asyncio.Event) -> None:
    """Conversations of one to three replies, until ``stop``; what failed is given up."""
    while not stop.is_set():
        messages: list[Any] = []
        api = openai.AsyncOpenAI(base_url=service.base_url, api_key=service.key, max_retries=0, timeout=30)
        try:
            async with api:
                for turn in range(rng.randint(1, 3)):
                    messages.append({"role": "user", "content": f"Question {rng.random()} {turn}"})
                    got = await api.chat.completions.create(model="any", messages=messages, max_tokens=8)
                    acknowledged.append(got.id)
                    messages.append({"role": "assistant", "content": got.choices[0].message.content or ""})
                    await api.post("/feedback", body={"id": got.id, "score": rng.choice((-1, 1))}, cast_to=object)
                await api.post("/end", body={"id": acknowledged[-1]}, cast_to=object)
        except (openai.APIError, httpx.HTTPError):
            await asyncio.sleep(0.2)


def check(folder: ServiceFolder, acknowledged: Sequence[str]) -> list[str]:
    """What was lost or done twice."""
    wrong = []
    with Pool(folder.pool) as pool:
        channels = {episode.id: episode.channel for episode in pool.episodes()}
        stored = Counter(turn.id for id in channels for turn in pool.turns(id))
    lost = [reply for reply in acknowledged if stored[reply] != 1]
    if lost:
        wrong.append(f"{len(lost)} of {len(acknowledged)} acknowledged replies are not stored once")
    versions = Versions(folder.versions)
    lineage = versions.lineage(versions.serving.number)
    trained = Counter(session for version in lineage for session in version.sessions)
    if twice := [session for session, count in trained.items() if count > 1]:
        wrong.append(f"{len(twice)} conversations were trained on twice")
    if held_out := [s for s in trained if not channels.get(s, "live:").startswith("live:")]:
        wrong.append(f"{len(held_out)} held-out conversations were trained on")
    promoted = max((v.number for v in versions.all() if v.state == "promoted"), default=0)
    if versions.serving.number != promoted:
        wrong.append(f"version {versions.serving.number} answers, not {promoted}")
    return wrong


async def run(kills: int, clients: int, seed: int) -> int:
    """Exit status: 0, or 1 if something was lost or done twice."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as where:
        service = Running(Path(where, "service"), make_tiny_model(Path(where, "model"), spread=0.05))
        await service.start()
        stop, acknowledged = asyncio.Event(), list[str]()
        talking = [asyncio.create_task(client(service, random.Random(n), acknowledged, stop)) for n in range(clients)]
        done = Counter[str]()
        while sum(done.values()) < kills:
            await asyncio.sleep(rng.uniform(0.5, 6))
            what = rng.choice(_LOOPS)
            if service.kill(what):
                done[what] += 1
                if what == "service":
                    assert service.process is not None
                    await service.process.wait()
                    await service.start()
        await asyncio.sleep(5)
        stop.set()
        await asyncio.gather(*talking)
        await service.stop()
        wrong = check(service.folder, acknowledged)
        versions = len(Versions(service.folder.versions).all()) - 1
    print(f"killed: {dict(done)}; replies acknowledged: {len(acknowledged)}; versions made: {versions}")
    print(f"start to address: median {median(service.back):.1f} s, at most {max(service.back):.1f} s")
    print("\n".join(wrong) or "nothing lost, nothing trained on twice")
    return 1 if wrong else 0


def main(argv: Sequence[str] | None = None) -> int:
    """See :func:`run`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    return asyncio.run(run(options.kills, options.clients, options.seed))


if __name__ == "__main__":
    sys.exit(main())
