"""Training on episodes of agents that run in the sandbox."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from clawgym.agents.blackbox.protocol import ModelLink
from clawgym.agents.openclaw.claw import OpenClaw
from clawgym.errors import AgentError, InfraError, TrainingError
from clawgym.gateway.server import Gateway
from clawgym.pool import Pool
from clawgym.pool.states import PooledEpisode
from clawgym.records import Episode, Outcome
from clawgym.rewards.rules import RuleJudge
from clawgym.sandbox import Backend
from clawgym.trainers.common.batch import make_batch
from clawgym.trainers.common.collector import Collector, GroupPlayer, Player
from clawgym.trainers.common.judging import Judging
from clawgym.trainers.common.policy import load_policy
from clawgym.trainers.common.services import open_services
from clawgym.trainers.common.splits import load_splits
from clawgym.trainers.common.start_model import base_folder
from clawgym.trainers.config import TrainConfig
from clawgym.trainers.local.learner import Learner
from clawgym.trainers.local.main import train

from ...agents.blackbox.conftest import bash, task
from ...agents.blackbox.hands import hands_module
from ...gateway.scripted import ScriptedEngine, refused
from ..runs import Said, small

SAID = [bash("cat no-such-file"), bash("mkdir output; echo 6 > output/sum.txt"), "The sum is there."]


def played_by(name: str, **parts: Any) -> TrainConfig:
    """One task, two episodes, a random model with a context window large enough for OpenClaw."""
    agent = {"name": name, "max_steps": 3, "max_tokens": 16, **parts.pop("agent", {})}
    about = {
        "model": {"scratch": {"hidden": 16, "layers": 1, "heads": 2, "kv_heads": 1, "context_window": 32768}},
        "tasks": {
            "generators": ["write-word"],
            "demonstrations": {"count": 4},
            "train": {"first": 100, "count": 1},
            "validation": {"count": 1},
            "heldout": {"first": 100, "count": 1},
        },
        "agent": agent,
        "rollout": {"groups": 1, "group_size": 2, "concurrency": 3},
        "evaluation": {"every": 10},
        "budget": {"steps": 2},
        "checkpoint_every": 10,
    }
    return small(**{**about, **parts})


class OneStep(Said):
    """Stops a run after its first step."""

    def __init__(self) -> None:
        super().__init__()
        self.stop = asyncio.Event()
        self.metrics: Any = {}

    def step(self, step: int, metrics: Any) -> None:
        super().step(step, metrics)
        self.metrics = metrics
        self.stop.set()


def exact_turns(pool: Pool, episode: PooledEpisode) -> int:
    """The number of an episode's turns, all of which can be trained on."""
    turns = pool.turns(episode.id)
    for turn in turns:
        assert (turn.flaw, turn.policy_version) == (None, 0)
        assert 0 < len(turn.sampled_ids) <= 16
        assert len(turn.sampled_ids) == len(turn.logprobs)
    return len(turns)


@pytest.mark.usefixtures("openclaw")
async def test_training_step_with_real_openclaw(tmp_path: Path) -> None:
    """A training step without evaluation, because each would start OpenClaw once more."""
    config = played_by("openclaw", agent={"options": {"prompt": "slim"}})
    policy = load_policy(config.model, base_folder(config, tmp_path, (), ()), config.compute)
    learner = Learner(policy, config)
    with Pool(tmp_path / "pool.db") as pool:
        async with open_services(config, policy, tmp_path, pool) as setting:
            tasks = load_splits(config.tasks, config.agent).train
            groups = GroupPlayer(config, tasks, pool, setting.player)
            collector = Collector(config, groups)
            collecting = asyncio.create_task(collector.run())
            while (batch := pool.fetch("trainer", 0, groups=1, policy_version=0, max_staleness=0)) is None:
                assert not collecting.done(), collecting.result()
                await asyncio.sleep(0.2)
            collecting.cancel()
            await asyncio.gather(collecting, return_exceptions=True)
            metrics = learner.train_step(make_batch(batch, config, seed=0), seed=0)
            await policy.publish(setting.engine, 1)
        assert metrics["training/rollout_probs_diff"] < 1e-4  # trainer and engine agree
        members = batch.groups[0].episodes
        ended = sorted((e.episode.sample, e.episode.agent.split()[0]) for e in members)  # in any order
        assert ended == [(0, "openclaw"), (1, "openclaw")]
        assert all(exact_turns(pool, e.episode) for e in members)
        assert groups.infra == 0


@pytest.mark.usefixtures("openclaw")
async def test_run_with_real_pi(tmp_path: Path) -> None:
    view, out = OneStep(), tmp_path / "run"
    progress = await train(played_by("pi"), out, view=view, stop=view.stop)
    assert progress.step == 1
    assert view.metrics["rollout/submitted_trajectories"] == 2
    assert view.metrics["training/rollout_probs_diff"] < 1e-4
    with Pool(out / "pool.db") as pool:
        delivered = [e for e in pool.episodes(channel="train") if e.fate == "delivered"]
        assert sorted((e.sample, e.agent) for e in delivered) == [(0, "pi 0.64.0"), (1, "pi 0.64.0")]
        assert all(exact_turns(pool, e) for e in delivered)
        assert {e.channel for e in pool.episodes()} == {"train", "validation", "heldout", "canary"}


Hands: Any = hands_module().Hands


class Held(Hands):
    """An agent whose start is controlled by the test."""

    asked, may = asyncio.Event(), asyncio.Event()
    error: Exception | None = None

    async def start(self, box: Any, link: Any) -> Any:
        self.asked.set()
        await self.may.wait()
        if self.error is not None:
            raise self.error
        return await super().start(box, link)


class Desk:
    """Episodes of one task with :class:`Held` and a scripted model."""

    def __init__(self, backend: Backend, gateway: Gateway) -> None:
        self.pool = gateway.pool
        self.config = played_by(f"{__name__}:Held", reward={"judge": "rule"}, agent={"max_tokens": 512})
        self.judging = Judging(gateway, RuleJudge())
        self.player = Player(self.config, gateway, backend, judging=self.judging)
        self.task = task(max_steps=6)
        self.group = self.pool.open_group(task_id=self.task.id, size=2)

    async def play(self, sample: int, **more: Any) -> Episode:
        return await self.player.play(self.task, seed=sample, sample=sample, group=self.group, **more)

    def state(self) -> str:
        return self.pool.group_states()[self.group]


@pytest.fixture
async def desk(backend: Backend, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``await desk(say)``."""
    for name in ("asked", "may"):
        monkeypatch.setattr(Held, name, asyncio.Event())
    Held.may.set()
    async with contextlib.AsyncExitStack() as stack:

        async def make(say: Any) -> Desk:
            pool = stack.enter_context(contextlib.closing(Pool(tmp_path / "pool.db")))
            engine = ScriptedEngine(model_folder, say, at_once=64, context_window=16384)
            made = Desk(backend, await stack.enter_async_context(Gateway(engine, pool)))
            stack.push_async_callback(made.player.aclose)
            await stack.enter_async_context(made.judging.pool)
            return made

        yield make


def said(prompt: str, _: int) -> str:
    return SAID[prompt.count("<|im_start|>assistant") - 1]


async def test_program_turns_are_judged_and_trained_on(desk: Any) -> None:
    it = await desk(said)
    episodes = await asyncio.gather(it.play(0), it.play(1))
    assert {e.outcome for e in episodes} == {Outcome.SOLVED}
    batch = it.pool.fetch("t", 0)
    assert [e.process_rewards for e in batch.groups[0].episodes] == [
        {0: 0.0, 1: 0.0}
    ] * 2  # there is no state after turn 2
    rows = make_batch(batch, it.config, seed=0)
    turns = it.pool.turns(batch.groups[0].episodes[0].episode.id)
    assert len(rows.sequences) == 2  # three turns are one sequence
    assert [i for i, own in zip(rows.sequences[0].ids, rows.sequences[0].mask, strict=True) if own] == [
        i for turn in turns for i in turn.sampled_ids
    ]


async def test_failed_model_calls_are_not_trained_on(desk: Any) -> None:
    dead: list[Any] = [refused(500)]
    it = await desk(lambda prompt, n: dead.pop() if dead else said(prompt, n))
    failed = await it.play(0)
    again, other = await it.play(0), await it.play(1)
    assert [e.outcome for e in (failed, again, other)] == [Outcome.INFRA, Outcome.SOLVED, Outcome.SOLVED]
    (group,) = it.pool.fetch("t", 0).groups
    assert sorted(e.episode.sample for e in group.episodes) == [0, 1]
    assert len({e.episode.id for e in group.episodes}) == 2


async def test_group_does_not_wait_for_program_that_fails_to_start(desk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    it = await desk(said)
    await it.play(0)
    monkeypatch.setattr(Held, "error", InfraError("no room: make some"))
    failed = await it.play(1)
    assert (failed.outcome, "no room" in failed.error) == (Outcome.INFRA, True)
    assert it.state() == "ready"
    (group,) = it.pool.fetch("t", 0, min_episodes=1).groups
    assert [e.episode.sample for e in group.episodes] == [0]


async def test_group_is_incomplete_while_program_starts(desk: Any) -> None:
    """An open episode of a killed run is closed when its replacement starts, and not before."""
    it = await desk(said)
    left = it.pool.open_episode(group=it.group, channel="train", task_id=it.task.id, sample=1)
    await it.play(0)
    Held.may.clear()
    Held.asked.clear()
    playing = asyncio.create_task(it.play(1, replaces=[left]))
    await Held.asked.wait()
    assert it.state() == "open"
    assert it.pool.fetch("t", 0) is None
    Held.may.set()
    assert (await playing).outcome is Outcome.SOLVED
    (group,) = it.pool.fetch("t", 0).groups
    assert sorted(e.episode.sample for e in group.episodes) == [0, 1]


async def test_unsupported_agents_raise(tmp_path: Path) -> None:
    with pytest.raises(AgentError, match=r"agent 'noop' does not take gateway"):
        await train(played_by("noop"), tmp_path / "noop", view=Said())
    with pytest.raises(TrainingError, match="demonstrations cannot be made with the agent"):
        await train(played_by("openclaw"), tmp_path / "sft", "sft", view=Said())
    for agent, why in (
        ({"name": "pi", "system_prompt": "Work."}, "leave them out for pi"),
        ({"name": "tool-loop", "options": {"prompt": "slim"}}, "options are for other agents"),
    ):
        with pytest.raises(ValidationError, match=why):
            TrainConfig.model_validate({"agent": agent})
    whole = played_by("openclaw").model_dump_json()
    assert TrainConfig.model_validate_json(whole) == played_by("openclaw")
    with pytest.raises(AgentError, match="at least 16000 tokens, and this model has 512"):
        await OpenClaw.start(None, None, ModelLink("", "", context_window=512))  # type: ignore[arg-type]
