"""A gateway that is killed: what an agent was told has ended is in the pool, once, and sessions go on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import sys
from pathlib import Path

import aiohttp
import pytest

from clawgym.engines.tiny import make_tiny_model
from clawgym.pool import Pool, sequences_of

KILLS = int(os.environ.get("CLAWGYM_SOAK", 0)) // 50 or 3  # each starts a gateway: seconds
AGENTS = 8

SERVER = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from scripted import ScriptedEngine
from clawgym.gateway.server import Gateway
from clawgym.pool import Pool

async def main():
    engine = ScriptedEngine(Path(sys.argv[2]), lambda prompt, n: "some words of an answer " * (1 + n % 3), pause=0.0005)
    async with Gateway(engine, Pool(sys.argv[3])) as gateway:
        address = await gateway.listen()
        if len(sys.argv) > 4:
            opened = [await gateway.open_session() for _ in range(int(sys.argv[4]))]
            print(*(f"{o.id}:{o.secret}" for o in opened))
        print(address.url, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


class Agent:
    """Works on, with the same session, whatever happens to the gateway."""

    def __init__(self, session: str) -> None:
        self.id, self.secret = session.split(":")
        self.history = [{"role": "user", "content": "begin"}]
        self.ended: list[str] = []
        """Ids of the answers whose end it has seen."""

    async def work(self, url: str) -> None:
        headers = {"Authorization": f"Bearer {self.secret}"}
        with contextlib.suppress(aiohttp.ClientError, OSError):
            async with aiohttp.ClientSession(headers=headers) as client:
                while True:
                    await self.turn(client, f"{url}/s/{self.id}/v1/chat/completions")

    async def turn(self, client: aiohttp.ClientSession, url: str) -> None:
        text, answer = "", ""
        body = {"messages": self.history, "stream": True}
        async with client.post(url, json=body) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                if line.startswith(b"data: [DONE]"):
                    self.ended.append(answer)
                    break
                if line.startswith(b"data: "):
                    chunk = json.loads(line[6:])
                    answer = chunk["id"]
                    text += chunk["choices"][0]["delta"].get("content") or ""
            else:
                raise aiohttp.ClientPayloadError("cut off")
        self.history += [
            {"role": "assistant", "content": text},
            {"role": "user", "content": f"go on {len(self.ended)}"},
        ]


@pytest.mark.timeout(0 if KILLS > 20 else 180)
async def test_what_has_ended_is_stored(tmp_path):
    model = make_tiny_model(tmp_path / "tiny")
    rng = random.Random(KILLS)
    rooms = str(Path(__file__).parent.parent / "gateway")
    agents: list[Agent] = []
    for kill in range(KILLS):
        more = [] if agents else [str(AGENTS)]
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            SERVER,
            rooms,
            str(model),
            str(tmp_path / "pool.db"),
            *more,
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        if not agents:
            agents = [Agent(session) for session in (await process.stdout.readline()).decode().split()]
        url = (await process.stdout.readline()).decode().strip()
        work = [asyncio.ensure_future(agent.work(url)) for agent in agents]
        async with asyncio.timeout(30):  # a busy machine has its first answers late
            while sum(len(agent.ended) for agent in agents) <= (kill + 1) * AGENTS:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await asyncio.sleep(rng.uniform(0.2, 1.0))
        process.send_signal(signal.SIGKILL)
        await process.wait()
        await asyncio.wait_for(asyncio.gather(*work), 10)
        with contextlib.closing(Pool(tmp_path / "pool.db")) as pool:
            for agent in agents:
                turns = pool.turns(agent.id)
                stored = [turn.id for turn in turns if turn.flaw is None]
                assert len(set(stored)) == len(stored)
                assert set(agent.ended) <= set(stored), f"lost after kill {kill}"
                # A turn that was stored, and whose end did not arrive, was asked for again: a sibling.
                assert len(stored) <= len(agent.ended) + kill + 1
                longest = max(sequences_of(turns), key=lambda row: len(row.turns), default=None)
                if agent.ended:
                    assert longest is not None
                    assert len(longest.turns) >= len(agent.ended), "histories go on where they were"
    assert sum(len(agent.ended) for agent in agents) > KILLS * AGENTS


async def test_gateways_share_a_pool_and_survive_one_another(tmp_path):
    model, rooms = make_tiny_model(tmp_path / "tiny"), str(Path(__file__).parent.parent / "gateway")
    pool_file = tmp_path / "pool.db"
    Pool(pool_file).close()
    started = [
        await asyncio.create_subprocess_exec(
            sys.executable, "-c", SERVER, rooms, str(model), str(pool_file), str(AGENTS), stdout=asyncio.subprocess.PIPE
        )
        for _ in range(2)
    ]
    try:
        groups: list[list[Agent]] = []
        work: list[list[asyncio.Future[None]]] = []
        for process in started:
            assert process.stdout is not None
            groups.append([Agent(session) for session in (await process.stdout.readline()).decode().split()])
            url = (await process.stdout.readline()).decode().strip()
            work.append([asyncio.ensure_future(agent.work(url)) for agent in groups[-1]])
        async with asyncio.timeout(60):
            while min(len(agent.ended) for group in groups for agent in group) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            started[0].send_signal(signal.SIGKILL)
            await asyncio.gather(*work[0])
            seen = [len(agent.ended) for agent in groups[1]]
            while min(len(a.ended) - n for a, n in zip(groups[1], seen, strict=True)) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    finally:
        for process in started:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    await asyncio.gather(*work[1])
    with contextlib.closing(Pool(pool_file)) as pool:
        for agent in (*groups[0], *groups[1]):
            stored = [turn.id for turn in pool.turns(agent.id) if turn.flaw is None]
            assert len(set(stored)) == len(stored)
            assert set(agent.ended) <= set(stored)
