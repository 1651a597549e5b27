"""Hindsight distillation: a teacher changes only the tokens that it scores."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from pydantic import ValidationError

from clawgym.engines.tiny import make_tiny_model
from clawgym.pool import Pool
from clawgym.trainers.common.batch import make_batch
from clawgym.trainers.local.main import train

from ..batches import some_batch
from ..endpoint import judge_endpoint
from ..local.test_learner import config, on_policy, start
from ..runs import Said, small


def test_token_moves_towards_teacher_and_others_do_not(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", spread=0.05)
    taught = {("e0", 0): "up", ("e5", 0): "down"}
    about = config(
        reward={"judge": "policy"}, distillation={"hints": 1, "w_rl": 0.0, "w_opd": 1.0}, optimizer={"lr": 3e-4}
    )
    learner = start(folder, about)
    made = some_batch()
    plain = on_policy(make_batch(made, about, seed=0), learner.policy)
    spoken = {}
    for number, member in enumerate(plain.episodes):
        if (member.episode.id, 0) in taught:
            own = plain.rollout_logp[plain.episode == number]
            gap = 0.5 if taught[member.episode.id, 0] == "up" else -0.5
            spoken[member.episode.id, 0] = (own + gap).tolist()
    batch = dataclasses.replace(
        make_batch(made, about, seed=0, teachers=spoken), rollout_logp=plain.rollout_logp, advantages=plain.advantages
    )
    assert batch.teacher_logp.isfinite().sum() == sum(map(len, spoken.values()))
    metrics = learner.train_step(batch, seed=0)
    assert 0 < metrics["opd/tokens_taught_frac"] < 1
    moved = on_policy(plain, learner.policy).rollout_logp - plain.rollout_logp
    assert moved[plain.episode == 0].mean() > 0 > moved[plain.episode == 5].mean()


def test_nothing_is_added_without_teacher(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", spread=0.05)
    weights = []
    for about in (config(), config(reward={"judge": "policy"}, distillation={"hints": 2})):
        learner = start(folder, about)
        learner.train_step(on_policy(make_batch(some_batch(), about, seed=0), learner.policy), seed=0)
        weights.append(torch.cat([p.detach().flatten() for p in learner.parameters]))
    assert torch.equal(*weights)


def test_teacher_of_wrong_length_raises() -> None:
    about = config()
    with pytest.raises(ValueError, match=r"2 teacher log-probs for"):
        make_batch(some_batch(), about, seed=0, teachers={("e0", 0): [-1.0, -1.0]})
    assert all(map(math.isnan, make_batch(some_batch(), about, seed=0).teacher_logp.tolist()))


def test_hints_need_a_judge_that_gives_them() -> None:
    with pytest.raises(ValidationError, match="the judges rule and head give no hints"):
        small(reward={"judge": "rule"}, distillation={"hints": 1})


@pytest_asyncio.fixture(loop_scope="module")
async def judge() -> AsyncIterator[str]:
    async with judge_endpoint() as at:
        yield at(True)


@pytest.mark.asyncio(loop_scope="module")
async def test_hints_of_judge_change_the_policy(judge: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    about: dict[str, Any] = {"judge": "model", "model": "j", "base_url": judge, "votes": 1}
    run = small(reward=about, distillation={"hints": 1}, budget={"steps": 1}, evaluation={"every": 9})
    await train(run, tmp_path / "run", view=Said())
    (row,) = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert row["reward/process_mean"] == 1
    assert row["opd/turns_taught"] > 0
    assert row["opd/tokens_taught_frac"] > 0
    with Pool(tmp_path / "run/pool.db") as pool:
        hints = [
            said["hints"]
            for episode in pool.episodes(channel="train")
            for said in pool.about_turn_rewards(episode.id).get("judge", {}).values()
        ]
    assert ["Write the word with echo."] in hints


_HINTING = """
from clawgym.records.judge import Judgement

class Hints:
    name, version = "hints", "0"

    async def judge(self, asked):
        return Judgement((None,), ("no verdict",), "hints", "0", hints=("Write the word with echo.",))
"""


@pytest.mark.asyncio(loop_scope="module")
async def test_hints_are_used_without_valid_vote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hinting_judges.py").write_text(_HINTING)
    monkeypatch.syspath_prepend(str(tmp_path))
    run = small(
        reward={"judge": "hinting_judges:Hints"},
        distillation={"hints": 1, "w_rl": 0.0},
        budget={"steps": 1},
        evaluation={"every": 9, "canary": 0},
    )
    await train(run, tmp_path / "run", view=Said())
    (row,) = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert row["reward/process_scored_frac"] == 0
    assert row["opd/turns_taught"] > 0
    assert row["actor/grad_norm"] > 0
