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
from clawgym.trainers.common import policy
from clawgym.trainers.common.batch import make_batch
from clawgym.trainers.local.main import train

from ..batches import some_batch, teacher_of
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
            spoken[member.episode.id, 0] = teacher_of((own + gap).tolist())
    batch = dataclasses.replace(
        make_batch(made, about, seed=0, teachers=spoken), rollout_logp=plain.rollout_logp, advantages=plain.advantages
    )
    assert batch.teacher_logp.isfinite().sum() == sum(len(teacher.logprobs) for teacher in spoken.values())
    metrics = learner.train_step(batch, seed=0)
    assert 0 < metrics["opd/tokens_taught_frac"] < 1
    moved = on_policy(plain, learner.policy).rollout_logp - plain.rollout_logp
    assert moved[plain.episode == 0].mean() > 0 > moved[plain.episode == 5].mean()


def test_nothing_is_added_without_teacher(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", spread=0.05)
    weights = []
    judge = {"reward": {"judge": "policy"}}
    for about in (
        config(),
        config(distillation={"hints": 2}, **judge),
        config(distillation={"hints": 2, "loss": "topk"}, **judge),
    ):
        learner = start(folder, about)
        learner.train_step(on_policy(make_batch(some_batch(), about, seed=0), learner.policy), seed=0)
        weights.append(torch.cat([p.detach().flatten() for p in learner.parameters]))
    assert torch.equal(weights[0], weights[1])
    assert torch.equal(weights[0], weights[2])


class TopK:
    """A batch with teachers that know the likeliest ids of some turns, and a learner for it."""

    def __init__(self, folder: Path, k: int, **parts: Any) -> None:
        judge = {
            "reward": {"judge": "policy"},
            "rollout": {"temperature": 0.7},
            "guards": {"max_kl": 1e9},
            "optimizer": {"lr": 1e-3, "grad_clip": 1e9},
        }
        self.config = config(distillation={"hints": 1, "loss": "topk", "w_rl": 0.7, "w_opd": 0.9}, **judge, **parts)
        self.learner = start(folder, self.config)
        made, draw = some_batch(), torch.Generator().manual_seed(k)
        self.teachers: dict[tuple[str, int], Any] = {}
        for member in (m for g in made.groups for m in g.episodes):
            for turn, sample in enumerate(member.sequences):
                if (member.episode.sample + turn) % 3:
                    logp = torch.randn(len(sample.logprobs), 600, generator=draw).log_softmax(-1).topk(k)
                    top = logp.indices.numpy(), logp.values.numpy()
                    self.teachers[member.episode.id, turn] = teacher_of(sample.logprobs, top)
        self.batch = make_batch(made, self.config, seed=0, teachers=self.teachers)

    def gradient(self) -> torch.Tensor:
        """Of the learner's update."""
        found: list[torch.Tensor] = []
        keep = self.learner.optimizer.register_step_pre_hook(
            lambda *_: found.extend(p.grad.flatten() for p in self.learner.parameters if p.grad is not None)
        )
        self.metrics = self.learner.train_step(self.batch, seed=0)
        keep.remove()
        return torch.cat(found)

    def expected(self) -> torch.Tensor:
        """The same from the definitions, one training sequence and one token at a time."""
        about, module = self.config.algorithm, self.learner.policy.module
        lengths: dict[int, int] = {}
        for episode in self.batch.episode.tolist():
            lengths[episode] = lengths.get(episode, 0) + 1
        total, place = torch.zeros((), dtype=torch.float64), 0
        for number, row in enumerate(self.batch.sequences):
            logits = module(torch.tensor([row.ids])).logits[0].double()
            logp = (logits / self.config.rollout.temperature).log_softmax(-1)
            member = self.batch.episodes[int(self.batch.episode[place])]
            sample = next(s for s in member.sequences if s.ids == row.ids)
            for index, (at, turn) in enumerate(
                zip([n for n, wanted in enumerate(row.mask) if wanted], sample.turn_of, strict=True)
            ):
                weight = 1 / (len(lengths) * lengths[int(self.batch.episode[place])])
                own = logp[at - 1, row.ids[at]]
                factor = min(math.exp(own.item() - sample.logprobs[index]), about.importance_cap)
                gain = 0.7 * self.batch.advantages[place].item()
                total = total - weight * factor * gain * (own - own.detach()).exp()
                if teacher := self.teachers.get((member.episode.id, turn)):
                    p, q = 0.0, 0.0
                    for id, log_q in zip(teacher.top_ids[index], teacher.top_logprobs[index], strict=True):
                        log_p = logp[at - 1, int(id)]
                        total = total + 0.9 * weight * log_p.exp() * (log_p - float(log_q))
                        p, q = p + log_p.exp(), q + math.exp(float(log_q))
                    total = total + 0.9 * weight * (1 - p) * ((1 - p).log() - math.log(1 - q))
                place += 1
            assert number == self.batch.row[place - 1]
        parameters = [p for p in module.parameters() if p.requires_grad]
        return torch.cat([g.flatten() for g in torch.autograd.grad(total, parameters)])


@pytest.mark.parametrize(("k", "micro_tokens"), [(1, 4096), (5, 4096), (5, 24)])
def test_gradient_of_topk_loss(k: int, micro_tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole gradient of an update is that of the definition, however the batch is cut."""
    if micro_tokens < 100:
        monkeypatch.setattr(policy, "MAX_LOGITS", 2000)  # a few tokens at a time, computed again for the gradient
    folder = make_tiny_model(tmp_path / "model", spread=0.05)
    some = TopK(folder, k, compute={"micro_tokens": micro_tokens, "row_tokens": 24 if micro_tokens < 100 else 512})
    expected = some.expected()
    found = some.gradient()
    assert expected.norm() > 0.01
    torch.testing.assert_close(found, expected.to(found.dtype), rtol=1e-4, atol=1e-5 * float(expected.abs().max()))
    assert some.metrics["opd/reverse_kl"] > 0


def test_topk_loss_without_advantages_moves_policy_to_teacher(tmp_path: Path) -> None:
    """Groups without variance are trained on where they have a teacher."""
    folder = make_tiny_model(tmp_path / "model", spread=0.05)
    some = TopK(folder, 8)
    some.batch = dataclasses.replace(some.batch, advantages=torch.zeros_like(some.batch.advantages))
    first, *_, last = [some.learner.train_step(some.batch, seed=0)["opd/reverse_kl"] for _ in range(6)]
    assert last < 0.9 * first


def test_topk_loss_needs_no_more_than_k_values_of_a_token(tmp_path: Path) -> None:
    some = TopK(make_tiny_model(tmp_path / "model", spread=0.05), 5)
    assert some.batch.teacher_ids is not None
    assert some.batch.teacher_ids.shape == (len(some.batch.row), 5)
    plain = config(reward={"judge": "policy"}, distillation={"hints": 1})
    assert make_batch(some_batch(), plain, seed=0, teachers=some.teachers).teacher_ids is None


def test_teacher_of_wrong_length_raises() -> None:
    about = config()
    with pytest.raises(ValueError, match=r"2 teacher log-probs for"):
        make_batch(some_batch(), about, seed=0, teachers={("e0", 0): teacher_of([-1.0, -1.0])})
    assert all(map(math.isnan, make_batch(some_batch(), about, seed=0).teacher_logp.tolist()))


def test_hints_need_a_judge_that_gives_them() -> None:
    with pytest.raises(ValidationError, match="the judges rule and prm give no hints"):
        small(reward={"judge": "rule"}, distillation={"hints": 1})


@pytest_asyncio.fixture(loop_scope="module")
async def judge() -> AsyncIterator[str]:
    async with judge_endpoint() as at:
        yield at(True)


@pytest.mark.parametrize("loss", ["advantage", "topk"])
@pytest.mark.asyncio(loop_scope="module")
async def test_hints_of_judge_change_the_policy(
    loss: str, judge: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    about: dict[str, Any] = {"judge": "model", "model": "j", "base_url": judge, "votes": 1}
    run = small(reward=about, distillation={"hints": 1, "loss": loss}, budget={"steps": 1}, evaluation={"every": 9})
    await train(run, tmp_path / "run", view=Said())
    (row,) = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert row["reward/process_mean"] == 1
    assert row["opd/turns_taught"] > 0
    assert row["opd/tokens_taught_frac"] > 0
    assert ("opd/reverse_kl" in row) == (loss == "topk")
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
