"""Training of a vision model."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from clawgym.agents.tool_loop import ToolLoopAgent
from clawgym.engines import Completion, GenerateRequest
from clawgym.engines.protocol import Engine, Image, Sampling
from clawgym.engines.tiny import make_tiny_model
from clawgym.errors import TrainingError
from clawgym.gateway.request import SessionRequest
from clawgym.pool import Pool
from clawgym.pool.states import Batch
from clawgym.records import Desktop, Episode, Limits, Task, ToolCall, TrainingSequence
from clawgym.rollout import EpisodeRequest
from clawgym.rollout.collect import collect_episode, in_process
from clawgym.trainers.batching import MaskedSequence, micro_batches, pack
from clawgym.trainers.common.batch import images_of, make_batch
from clawgym.trainers.common.collector import Collector, GroupPlayer, Player
from clawgym.trainers.common.policy import Policy, load_policy
from clawgym.trainers.common.services import Services, open_services
from clawgym.trainers.config import TrainConfig
from clawgym.trainers.local.learner import Learner

from ...desktop.conftest import programs
from ...engines.test_vision import ONE, OTHER, PROMPT, SHOWN
from ...verifiers.tasks_for_tests import task
from ..batches import batch_of, episode_of
from ..runs import small

torch = pytest.importorskip("torch")
pytest.importorskip("PIL.Image")

__all__ = ["programs"]

IMAGES = {image.sha256: image for image in (ONE, OTHER)}
SAID_WELL = b"""
import json, os
path = os.environ.get("OPENCLAW_REWARD_PAYLOAD", "/payload/openclaw_reward_payload.json")
print(json.dumps({"well": float(json.load(open(path))["final_message"] == "well")}))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("m") / "sees", vision=True, spread=0.1)


def config(folder: Path, **model: Any) -> TrainConfig:
    return small(
        model={"path": str(folder), **model},
        agent={"max_steps": 6, "max_tokens": 8},
        rollout={"groups": 1, "group_size": 2, "concurrency": 2},
        optimizer={"lr": 1e-2},
        guards={"max_kl": 1e9},
    )


async def sampled(engine: Any, ids: Sequence[int], images: Sequence[Image], seed: int) -> TrainingSequence:
    """A reply of the engine as a training sequence."""
    given = Sampling(max_tokens=6, seed=seed)
    said = [tokens async for tokens in engine.generate(GenerateRequest(ids, given, images=images))]
    new = [token for tokens in said for token in tokens.ids]
    count, logprobs = len(new), tuple(value for tokens in said for value in tokens.logprobs)
    versions = tuple(tokens.policy_version for tokens in said)
    mask = (*[0] * len(ids), *[1] * count)
    shown = tuple(image.sha256 for image in images)
    return TrainingSequence((0,), (*ids, *new), mask, logprobs, versions, (0,) * count, shown)


async def rolled_out(engine: Any, seed: int = 0) -> Batch:
    """Two images in both orders, one image, and none."""
    asked = ((PROMPT, (ONE, OTHER)), (PROMPT, (OTHER, ONE)), ((1, 300, *SHOWN, 303), (OTHER,)), ((1, 300, 303), ()))
    rows = [await sampled(engine, ids, images, seed + n) for n, (ids, images) in enumerate(asked)]
    return batch_of([[episode_of(n, float(n % 2), [row]) for n, row in enumerate(rows)]])


@pytest.mark.parametrize("model", [{}, {"lora": {"rank": 4}}])
async def test_vision_policy_is_trained_and_sampled(folder: Path, model: dict[str, Any]) -> None:
    about = config(folder, **model)
    policy = load_policy(about.model, folder, about.compute)
    learner = Learner(policy, about)
    engine = policy.engine(policy_version=0)
    assert policy.adapter is None
    before: dict[str, Any] = {}
    for step in range(2):
        await policy.publish(engine, step)
        fetched = await rolled_out(engine, seed=10 * step)
        assert {v for e in fetched.groups[0].episodes for s in e.sequences for v in s.policy_versions} == {step}
        batch = make_batch(fetched, about, seed=0, images=IMAGES)
        before = {name: tensor.clone() for name, tensor in policy.trained().items()}
        metrics = await asyncio.to_thread(learner.train_step, batch, seed=0)
        assert metrics["training/rollout_probs_diff"] < 1e-5
    assert sum(not torch.equal(before[name], now) for name, now in policy.trained().items()) > len(before) // 2
    stale = make_batch(await rolled_out(engine), about, seed=0, images=IMAGES)  # sampled before the last step
    assert learner.train_step(stale, seed=0)["training/rollout_probs_diff"] > 1e-4
    await engine.aclose()


async def test_forward_pass_needs_sampled_images(folder: Path) -> None:
    about = config(folder)
    learner = Learner(load_policy(about.model, folder, about.compute), about)
    engine = learner.policy.engine()
    fetched = await rolled_out(engine)
    await engine.aclose()
    other = make_batch(fetched, about, seed=0, images={ONE.sha256: OTHER, OTHER.sha256: ONE})
    assert learner.train_step(other, seed=0)["training/rollout_probs_diff"] > 1e-5
    with pytest.raises(TrainingError, match="3 image placeholders and 0 images"):
        learner.imitate([MaskedSequence((1, *SHOWN, *SHOWN, *SHOWN, 9), (*[0] * 10, 1))], step=0, steps=1)


def test_sequence_with_images_has_its_own_row() -> None:
    rows = [
        MaskedSequence((1, 2, 3), (0, 1, 1)),
        MaskedSequence((1, 2, 4), (0, 0, 1), (ONE,)),
        MaskedSequence((1, 2, 4), (0, 0, 1), (OTHER,)),
        MaskedSequence((1, 2, 5), (0, 0, 1)),
    ]
    made = list(micro_batches(pack(rows, row_tokens=64), tokens=64))
    assert [micro.images for micro in made if micro.images] == [(ONE,), (OTHER,)]
    assert sorted(int(place) for micro in made for place in micro.places) == [0, 1, 2, 3, 4]
    for micro in made:
        assert len(micro.images) == 0 or micro.ids.tolist() == [[1, 2, 4]]


def test_text_model_rejects_images(tmp_path: Path) -> None:
    reads = make_tiny_model(tmp_path / "reads")
    about = config(reads)
    policy = load_policy(about.model, reads, about.compute)
    (micro,) = micro_batches(pack([MaskedSequence((1, 2, 4), (0, 0, 1), (ONE,))], row_tokens=64), tokens=64)
    with pytest.raises(TrainingError, match="the model reads none"):
        policy.ready(micro)


class Led:
    """The policy with scripted calls, which lead it to two screens and the end."""

    name = "led"

    def __init__(self, engine: Engine, last: str) -> None:
        self._engine = engine
        self._calls: list[dict[str, Any] | None] = [
            {"action": "screenshot"},
            None,
            {"action": "mouse_move", "coordinate": [100, 100]},
            None,
            {"action": "done", "text": last},
        ]

    async def complete(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] = (), sampling: Sampling
    ) -> Completion:
        call = self._calls.pop(0)
        if call is None:
            return await self._engine.complete(messages, tools=tools, sampling=sampling)
        return Completion("", (ToolCall("led", "computer_use", call),))

    def identity(self) -> dict[str, Any]:
        return self._engine.identity()

    async def aclose(self) -> None:
        await self._engine.aclose()


class Leading(Player):
    """Runs episodes with :class:`Led`; the first episode of a group succeeds."""

    def __init__(self, about: TrainConfig, setting: Services) -> None:
        super().__init__(about, setting.gateway, setting.backend)
        self._about, self._setting = about, setting

    async def play(self, task: Task, *, seed: int, sample: int = 0, **session: Any) -> Episode:
        session.pop("replaces", None)
        if (placed := session.pop("placed", None)) is not None:
            await placed()
        sampling = Sampling(temperature=1.0, max_tokens=self._about.agent.max_tokens)
        request = EpisodeRequest(
            task=task, seed=seed, sample=sample, session=SessionRequest(sampling=sampling, **session)
        )
        agent = in_process(lambda engine: ToolLoopAgent(Led(engine, "badly" if sample else "well")))
        return (await collect_episode(request, agent, self._setting.backend, self._setting.gateway)).episode


async def fetched(pool: Pool, step: int, collecting: asyncio.Task[None]) -> Batch:
    """Waits for the batch of a step."""
    while not collecting.done():
        batch = await asyncio.to_thread(pool.fetch, "trainer", step, groups=1, policy_version=step, max_staleness=0)
        if batch is not None:
            return batch
        await asyncio.wait({collecting}, timeout=0.1)
    collecting.result()
    raise AssertionError("nothing more is collected")


@pytest.mark.usefixtures("programs")
async def test_vision_model_trains_on_desktop_task(folder: Path, tmp_path: Path) -> None:
    about = config(folder)
    limits = Limits(max_steps=6, memory_mb=1024, pids=256, setup_seconds=90)
    looks = task(
        SAID_WELL, id="look", inputs=(), limits=limits, desktop=Desktop(width=320, height=240), instruction="Look."
    )
    policy: Policy = load_policy(about.model, folder, about.compute)
    learner = Learner(policy, about)
    seeing = {name: p for name, p in policy.module.named_parameters() if ".visual." in name}
    largest: dict[str, float] = {}
    for name, parameter in seeing.items():  # gradients are freed after the step
        parameter.register_post_accumulate_grad_hook(
            lambda p, name=name: largest.update({name: float("nan" if p.grad is None else p.grad.abs().max())})
        )
    with Pool(tmp_path / "pool.db") as pool:
        async with open_services(about, policy, tmp_path, pool) as setting:
            collector = Collector(about, GroupPlayer(about, [looks], pool, Leading(about, setting)))
            collecting = asyncio.create_task(collector.run())
            try:
                for step in range(2):
                    ready = await fetched(pool, step, collecting)
                    members = ready.groups[0].episodes
                    assert sorted(str(member.episode.outcome) for member in members) == ["failed", "solved"]
                    samples = [sample for member in members for sample in member.sequences]
                    assert {v for sample in samples for v in sample.policy_versions} == {step}
                    assert all(sample.images for sample in samples)
                    assert max(len(sample.images) for sample in samples) == 2
                    batch = make_batch(ready, about, seed=0, images=images_of(ready, pool))
                    before = {name: tensor.clone() for name, tensor in policy.trained().items()}
                    metrics = await asyncio.to_thread(learner.train_step, batch, seed=0)
                    # Trainer and engine agree, in the second step with the weights of the first.
                    assert metrics["training/rollout_probs_diff"] < 1e-5
                    assert metrics["actor/grad_norm"] > 0
                    assert set(largest) == set(seeing)
                    assert all(math.isfinite(value) for value in largest.values())
                    assert sum(value > 0 for value in largest.values()) > len(seeing) / 2
                    changed = {name for name, now in policy.trained().items() if not torch.equal(now, before[name])}
                    assert any(".visual.patch_embed" in name for name in changed)
                    await policy.publish(setting.engine, step + 1)
                    collector.advance(step + 1, 0)
            finally:
                collecting.cancel()
                await asyncio.gather(collecting, return_exceptions=True)
