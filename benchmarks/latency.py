"""What does training in the background cost those who talk to a service? (docs/results/online.md)

    python benchmarks/latency.py --seconds 60

Two services with the same model and the same load: one trains all the time, the other never does. Both print the time
to the first token and to the end of a reply, p50 and p99, and the number of versions that were made meanwhile. Training
runs in a niced process on the same cores, so on two cores the figures say how well the scheduler shares them. Requests
that fail are counted; there must be none.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openai
from survival import Running

from clawgym.engines.packaged import PACKAGED
from clawgym.engines.tiny import make_tiny_model
from clawgym.online.versions import Versions

_TOKENS = 32


class Load:
    """Clients that talk, rate each reply and end their conversations; what they measured."""

    def __init__(self, service: Running) -> None:
        self._service = service
        self.first: list[float] = []
        self.whole: list[float] = []
        self.failed = 0

    async def talk(self, rng: random.Random, until: float) -> None:
        api = openai.AsyncOpenAI(base_url=self._service.base_url, api_key=self._service.key, max_retries=0)
        async with api:
            while time.monotonic() < until:
                messages: list[Any] = []
                for _ in range(2):
                    messages.append({"role": "user", "content": f"Question {rng.random()}"})
                    try:
                        reply, text = await self._reply(api, messages)
                    except openai.APIError:
                        self.failed += 1
                        break
                    messages.append({"role": "assistant", "content": text})
                    await api.post("/feedback", body={"id": reply, "score": rng.choice((-1, 1))}, cast_to=object)
                    await api.post("/end", body={"id": reply}, cast_to=object) if len(messages) > 2 else None

    async def _reply(self, api: openai.AsyncOpenAI, messages: list[Any]) -> tuple[str, str]:
        began, reply, text = time.monotonic(), "", ""
        stream = await api.chat.completions.create(model="any", messages=messages, max_tokens=_TOKENS, stream=True)
        async for chunk in stream:
            if not reply:
                self.first.append(time.monotonic() - began)
            reply = chunk.id
            text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
        self.whole.append(time.monotonic() - began)
        return reply, text


async def measure(model: str, trains: bool, clients: int, seconds: float) -> dict[str, float]:
    """One service under load."""
    with tempfile.TemporaryDirectory() as where:
        settings = ["training.rollout.groups=4" if trains else "training.rollout.groups=1000000"]
        service = Running(Path(where, "service"), model, settings)
        await service.start()
        try:
            load = Load(service)
            await Load(service).talk(random.Random(0), time.monotonic() + 10)  # until the loops have begun
            until = time.monotonic() + seconds
            await asyncio.gather(*(load.talk(random.Random(n), until) for n in range(clients)))
            versions = len(Versions(service.folder.versions).all()) - 1
        finally:
            await service.stop()
    found: dict[str, float] = {"replies": len(load.whole), "failed": load.failed, "versions": versions}
    for name, values in (("first token", load.first), ("whole reply", load.whole)):
        for percentile in (50, 99):
            found[f"{name}, p{percentile}"] = 1000 * float(np.percentile(values, percentile))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 1 if a request failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help=f"{', '.join(PACKAGED)} or a folder; default: a tiny one with random weights")
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=60)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as where:
        model = options.model or str(make_tiny_model(Path(where, "model"), spread=0.05))
        found = {
            name: asyncio.run(measure(model, trains, options.clients, options.seconds))
            for name, trains in (("without training", False), ("with training", True))
        }
    print("| | " + " | ".join(found) + " |\n|---|" + "---:|" * len(found))
    for figure in found["without training"]:
        unit = " (ms)" if ", p" in figure else ""
        print(f"| {figure}{unit} | " + " | ".join(f"{row[figure]:,.0f}" for row in found.values()) + " |")
    return int(any(row["failed"] for row in found.values()))


if __name__ == "__main__":
    sys.exit(main())
