"""Black box, offline: tasks in sandboxes, an agent that only knows an OpenAI endpoint, a verifier, groups for GRPO.

python examples/black_box_offline.py
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import clawgym
from clawgym.agents import Agent
from clawgym.engines import OpenAIEngine, Sampling
from clawgym.engines.tiny import make_tiny_model
from clawgym.engines.transformers import TransformersEngine
from clawgym.gateway.request import SessionRequest
from clawgym.gateway.server import Gateway
from clawgym.pool import Pool
from clawgym.rollout import EpisodeRequest
from clawgym.rollout.collect import collect_episode, over_http


def agent(base_url: str, api_key: str) -> Agent:
    """Any agent will do that takes a base_url and a key."""
    return clawgym.make_agent("tool-loop", engine=OpenAIEngine("policy", base_url=base_url, api_key=api_key))


def session(group: str) -> SessionRequest:
    return SessionRequest(group=group, sampling=Sampling(temperature=1.0, max_tokens=32))


async def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="clawgym-example-"))
    engine = TransformersEngine(make_tiny_model(folder / "model"))  # random weights: it will solve nothing
    tasks = clawgym.load("terminal-basic").tasks[:2]
    backend = clawgym.backend()
    with Pool(folder / "pool.db") as pool:
        async with Gateway(engine, pool) as gateway:
            await gateway.listen()
            work = []
            for task in tasks:
                group = pool.open_group(task_id=task.id, size=2, deadline=300)
                work += [
                    collect_episode(
                        EpisodeRequest(task=task, seed=sample, sample=sample, session=session(group)),
                        over_http(agent),
                        backend,
                        gateway,
                    )
                    for sample in range(2)
                ]
            for ended in await asyncio.gather(*work):
                episode = ended.episode
                print(f"{episode.key}: {episode.outcome}, {len(episode.turns)} turns")

        batch = pool.fetch("trainer", step=0, groups=2)
        assert batch is not None
        for group in batch.groups:
            for member in group.episodes:
                print(f"{group.task_id}: reward {member.episode.reward}, rows {len(member.sequences)}")
        pool.ack("trainer", step=0)
    await backend.aclose()
    await engine.aclose()


asyncio.run(main())
