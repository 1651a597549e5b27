"""Binary RL: the majority vote on a turn is its advantage."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from clawgym.engines.tiny import make_tiny_model
from clawgym.pool.states import Batch
from clawgym.records.judge import Judgement
from clawgym.rewards.votes import rewards_of
from clawgym.trainers.common.batch import make_batch

from ..batches import batch_of, episode_of, sample_of
from .test_learner import config, on_policy, start

BINARY = {"algorithm": {"advantage": "binary"}, "reward": {"judge": "rule", "coefficient": 0.1}}


def batch() -> Batch:
    """Three episodes in separate groups: two turns in one sequence; one turn; one without judgement."""
    both = sample_of([20, 21, 30, 31, 22, 40, 41], [0, 0, 1, 1, 0, 1, 1], [-1.0] * 4, [0, 0, 1, 1])
    one = sample_of([20, 21, 50, 51], [0, 0, 1, 1], [-1.0] * 2)
    judged, doubted, alone = (
        episode_of(0, 1.0, [both], {0: -1.0, 1: 1.0}),
        episode_of(1, 0.0, [one], {0: 0.0}),
        episode_of(2, 1.0, [one]),
    )
    return batch_of([[judged], [doubted], [alone]])


def test_binary_advantage_is_the_vote() -> None:
    made = make_batch(batch(), config(**BINARY), seed=0, process_weight=0.5)
    assert made.advantages.tolist() == [-1, -1, 1, 1, 0, 0, 0, 0]
    assert made.metrics["reward/process_scored_frac"] == 0.75
    normalised = make_batch(batch(), config(reward={"judge": "rule"}), seed=0)
    assert normalised.advantages[:4].tolist() != [-1, -1, 1, 1]


def test_binary_training_follows_votes(tmp_path: Path) -> None:
    about = config(**BINARY, optimizer={"lr": 1e-3})
    learner = start(make_tiny_model(tmp_path / "model", spread=0.05), about)
    plain = on_policy(make_batch(batch(), about, seed=0), learner.policy)
    learner.train_step(plain, seed=0)
    moved = on_policy(plain, learner.policy).rollout_logp - plain.rollout_logp
    assert moved[:2].mean() < 0 < moved[2:4].mean()
    assert torch.isfinite(moved).all()


def test_binary_reward_is_majority_vote() -> None:
    said = {n: Judgement(votes, ("",) * len(votes), "j", "v") for n, votes in enumerate([(1, 0, 0), (1, -1), (None,)])}
    assert rewards_of(said, by_majority=True)[0] == {0: 0, 1: 0}
    assert rewards_of({7: Judgement((-1, -1, 1), ("",) * 3, "j", "v")}, by_majority=True)[0] == {7: -1}
    assert rewards_of(said)[0] == {0: pytest.approx(1 / 3), 1: 0}


def test_binary_needs_a_judge() -> None:
    with pytest.raises(ValidationError, match="binary trains on a judge's votes only"):
        config(algorithm={"advantage": "binary"})
