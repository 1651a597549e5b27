"""White box: your own loop samples, and hands in turns that are exact to the token.

python examples/white_box.py
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from clawgym.engines import GenerateRequest, Sampling
from clawgym.engines.tiny import make_tiny_model
from clawgym.engines.transformers import TransformersEngine
from clawgym.gateway.render import Renderer
from clawgym.pool import EpisodeEnd, Pool
from clawgym.records import Turn


async def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="clawgym-example-"))
    model = make_tiny_model(folder / "model")  # random weights: it speaks nonsense
    engine, renderer = TransformersEngine(model), Renderer(model)
    with Pool(folder / "pool.db") as pool:
        group = pool.open_group(task_id="greet", size=2)
        for sample in range(2):
            episode = pool.open_episode(group=group, task_id="greet", sample=sample)
            context = renderer.prompt([{"role": "user", "content": "Say hello."}], [])
            prompt = context
            for index in range(2):
                ids, logprobs, version = [], [], None
                sampling = Sampling(temperature=1.0, max_tokens=12, seed=10 * sample + index)
                async for tokens in engine.generate(GenerateRequest(prompt, sampling, stop_ids=renderer.stop_ids)):
                    ids += tokens.ids
                    logprobs += tokens.logprobs
                    version = tokens.policy_version
                turn = Turn(
                    context_ids=tuple(context),
                    sampled_ids=tuple(ids),
                    logprobs=tuple(logprobs),
                    policy_version=version,
                    parent=index - 1 if index else None,
                )
                pool.append([(episode, index, turn)])
                # The next prompt: everything so far, then only the ids of what is new.
                context = renderer.increment(ids, [{"role": "user", "content": "Again."}], [])
                prompt = (*prompt, *ids, *context)
            pool.close_episode(episode, EpisodeEnd(outcome="solved" if sample else "failed", reward=float(sample)))

        batch = pool.fetch("trainer", step=0)
        assert batch is not None
        for member in batch.groups[0].episodes:
            (row,) = member.sequences
            print(f"reward {member.episode.reward}: {len(row.ids)} ids, {sum(row.mask)} of them trained, one row")
        pool.ack("trainer", step=0)
    await engine.aclose()


asyncio.run(main())
