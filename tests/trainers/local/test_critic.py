"""Advantages from values: what the critic sees, what it learns, and that it survives a restart."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from clawgym.engines.tiny import make_tiny_model
from clawgym.errors import TrainingError
from clawgym.pool.states import Batch
from clawgym.trainers.common.batch import make_batch
from clawgym.trainers.config import Critic, TrainConfig
from clawgym.trainers.local.critic import ValueHead
from clawgym.trainers.local.main import train
from clawgym.trainers.local.training_state import TrainingState
from clawgym.trainers.traits import traits

from ..batches import batch_of, episode_of, sample_of, some_batch
from ..runs import Said, small
from .test_learner import config, on_policy, start, weights

LONG = {"guards": {"max_kl": 1e9}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("m") / "model", spread=0.05)


def of_gae(**parts: Any) -> TrainConfig:
    about = {"algorithm": {"advantage": "gae", **parts.pop("algorithm", {})}}
    return config(**about, **LONG, **parts)


def conversation() -> Batch:
    """Two turns in one sequence, judged; two turns in two sequences; one turn. All solved or none: no variance."""
    both = sample_of([20, 21, 30, 31, 22, 40, 41], [0, 0, 1, 1, 0, 1, 1], [-1.0] * 4, [0, 0, 1, 1])
    apart = [sample_of([20, 21, 50], [0, 0, 1], [-1.0], [0]), sample_of([9, 8, 7, 6], [0, 0, 1, 1], [-1.0] * 2, [3, 3])]
    one = sample_of([20, 21, 30, 61], [0, 0, 1, 1], [-1.0] * 2)
    return batch_of(
        [
            [episode_of(0, 1.0, [both], {0: -1.0, 1: 0.5}), episode_of(1, 1.0, apart, {3: 1.0})],
            [episode_of(2, 0.0, [one]), episode_of(3, 0.0, [one])],
        ]
    )


# (episode, turn) -> index of the training sequence, and of the token before the turn's first sampled one
BEFORE = {(0, 0): (0, 1), (0, 1): (0, 4), (1, 0): (1, 1), (1, 3): (2, 1), (2, 0): (3, 1), (3, 0): (4, 1)}


def test_rewards_of_turns(folder: Path) -> None:
    about = of_gae(reward={"judge": "rule", "coefficient": 0.5})
    made = make_batch(conversation(), about, seed=0, process_weight=0.8)
    assert made.turns is not None
    # 0.4 of the vote; the outcome of +1 or -1 at the last turn of each episode
    assert made.turns.rewards.tolist() == pytest.approx([-0.4, 0.2 + 1, 0, 0.4 + 1, -1, -1])
    assert made.turns.episode.tolist() == [0, 0, 1, 1, 2, 3]
    assert made.turns.turn.tolist() == [0, 0, 1, 1, 2, 3, 3, 4, 4, 5, 5]
    assert made.turns.first.tolist() == [0, 2, 4, 5, 7, 9]
    assert made.trained == (0, 1, 2, 3)  # groups without variance have a gradient too
    assert make_batch(conversation(), config(), seed=0).turns is None


@pytest.mark.parametrize("old", ["recompute", "rollout"])
@pytest.mark.parametrize("row_tokens", [4, 512])
def test_states_are_those_before_the_first_token_of_a_turn(folder: Path, old: str, row_tokens: int) -> None:
    about = of_gae(algorithm={"old": old}, compute={"row_tokens": row_tokens, "micro_tokens": 16})
    learner = start(folder, about)
    batch = make_batch(conversation(), about, seed=0)
    _, states = learner._old(batch)
    assert states is not None
    for state, (row, at) in zip(states, BEFORE.values(), strict=True):
        with torch.no_grad():
            hidden: Any = learner.policy.module.model(torch.tensor([batch.sequences[row].ids])).last_hidden_state
        torch.testing.assert_close(state, hidden[0, at], rtol=1e-4, atol=1e-4)


CALLS: list[torch.Tensor] = []


def recorded(
    logp: Any, old_logp: Any, advantages: Any, weights: Any, importance: Any = None, sequences: Any = None
) -> Any:
    """REINFORCE; keeps the advantages that it was called with."""
    CALLS.append(advantages)
    return -(weights * advantages * logp).sum(), {}


def test_tokens_have_the_advantages_of_gae(folder: Path) -> None:
    """In two steps, the second with values other than 0; against the definition, turn by turn."""
    options = {"gamma": 0.9, "lam": 0.7}
    about = of_gae(
        algorithm={"loss": f"{__name__}:recorded", "advantage_options": options}, critic={"lr": 0.1, "clip": None}
    )
    learner = start(folder, about)
    assert learner.critic is not None
    for step in range(2):
        batch = make_batch(conversation(), about, seed=0)
        assert batch.turns is not None
        states = learner._old(batch)[1]
        assert states is not None
        values = learner.critic.values(states).tolist()
        assert any(values) == (step > 0)
        rewards, of = batch.turns.rewards.tolist(), batch.turns.episode.tolist()
        gains = []
        for t in range(len(of)):
            gain, last = 0.0, max(n for n, one in enumerate(of) if one == of[t])
            for k in range(t, last + 1):
                after = values[k + 1] if k < last else 0.0
                gain += (0.9 * 0.7) ** (k - t) * (rewards[k] + 0.9 * after - values[k])
            gains.append(gain)
        share = [1 / (4 * of.count(one)) for one in of]  # of four episodes
        mean = sum(s * g for s, g in zip(share, gains, strict=True))
        var = sum(s * (g - mean) ** 2 for s, g in zip(share, gains, strict=True)) / (1 - sum(s * s for s in share))
        wanted = [(gains[t] - mean) / math.sqrt(var) for t in batch.turns.turn.tolist()]
        CALLS.clear()
        learner.train_step(batch, seed=0)
        assert sorted(torch.cat(CALLS).tolist()) == pytest.approx(sorted(wanted), abs=1e-4)


def test_critic_does_not_change_the_update_of_the_policy(folder: Path) -> None:
    """Its gradient stays in the head, and the values are those before its updates."""
    found, heads = [], []
    for about in ({"lr": 1e-6}, {"lr": 1.0, "updates": 50}):
        learner = start(folder, of_gae(critic=about))
        learner.train_step(make_batch(some_batch(), of_gae(), seed=0), seed=0)
        assert learner.critic is not None
        found.append(weights(learner))
        heads.append(learner.critic.weight.detach())
    assert torch.equal(*found)
    assert not torch.equal(*heads)


def test_policy_and_critic_learn_together(folder: Path) -> None:
    """One id is sampled after each prompt. Half of the prompts reward ids below 300; the others never do."""
    about = of_gae(algorithm={"epochs": 2}, optimizer={"lr": 5e-3})
    learner, draw = start(folder, about), torch.Generator().manual_seed(0)
    prompts = [(20, 30 + n % 2, 40 + n % 8) for n in range(64)]
    solved, explained = [], []
    for step in range(16):
        with torch.no_grad():
            logits: Any = learner.policy.module(torch.tensor(prompts)).logits[:, -1]
        ids = torch.multinomial(logits.softmax(-1), 1, generator=draw)[:, 0]
        logp = logits.log_softmax(-1).gather(1, ids[:, None])[:, 0].tolist()
        rewards = [float(id < 300 and prompt[1] == 30) for prompt, id in zip(prompts, ids.tolist(), strict=True)]
        members = [
            episode_of(n, rewards[n], [sample_of([*prompt, int(ids[n])], [0, 0, 0, 1], [logp[n]])])
            for n, prompt in enumerate(prompts)
        ]
        groups = [members[n : n + 2] for n in range(0, len(members), 2)]  # each has one prompt of both kinds
        metrics = learner.train_step(make_batch(batch_of(groups), about, seed=step), seed=step)
        solved.append(sum(rewards) / 32)
        explained.append(metrics["critic/vf_explained_var"])
    assert sum(solved[:3]) / 3 < 0.5 < 0.7 < sum(solved[-3:]) / 3
    assert explained[0] == 0
    assert sum(explained[-3:]) / 3 > 0.4


def test_first_update_of_the_head() -> None:
    """AdamW's first step is the learning rate in the direction of the sign of each gradient, here by loops."""
    states = torch.tensor([[1.0, 3.0, -2.0], [0.5, -1.0, 4.0], [2.0, 2.0, -5.0]])
    returns, episodes = [1.0, -0.5, 0.25], [0, 0, 1]
    critic = ValueHead(3, Critic(lr=0.01, updates=1))
    metrics = critic.train_step(states, torch.tensor(returns), torch.tensor(episodes))
    slope, offset, loss = [0.0] * 3, 0.0, 0.0
    for row, wanted, share in zip(states.tolist(), returns, (1 / 4, 1 / 4, 1 / 2), strict=True):
        mean = sum(row) / 3
        std = math.sqrt(sum((x - mean) ** 2 for x in row) / 3 + 1e-5)
        for n, x in enumerate(row):
            slope[n] += share * (0 - wanted) * (x - mean) / std / math.sqrt(3)
        offset += share * (0 - wanted)
        loss += share * wanted**2 / 2
    assert critic.weight.tolist() == pytest.approx([-0.01 * math.copysign(1, g) for g in slope], rel=1e-4)
    assert critic.bias.item() == pytest.approx(-0.01 * math.copysign(1, offset), rel=1e-4)
    assert metrics["critic/vf_loss"] == pytest.approx(loss)
    assert metrics["critic/vf_explained_var"] == 0
    assert metrics["critic/vpred_mean"] == 0


def test_critic_learns_what_its_states_tell() -> None:
    draw = torch.Generator().manual_seed(0)
    states = 5 + torch.randn(64, 16, generator=draw)
    returns = torch.where(states[:, 3] > states[:, 5], 1.0, -1.0)
    critic = ValueHead(16, Critic())
    explained = [critic.train_step(states, returns, torch.arange(64))["critic/vf_explained_var"] for _ in range(60)]
    assert explained[0] == 0
    assert explained[-1] > 0.5
    assert critic.train_step(states, torch.ones(64), torch.arange(64))["critic/vf_explained_var"] == 0


def test_clip_ends_the_update_of_a_value() -> None:
    """Only the momentum of AdamW carries it further."""
    state, one, found = torch.tensor([[1.0, -1.0]]), torch.tensor([0]), []
    for clip in (0.2, None):
        critic = ValueHead(2, Critic(lr=1e-3, updates=2000, clip=clip))
        metrics = critic.train_step(state, torch.tensor([1.0]), one)
        found.append(critic.values(state).item())
        assert metrics["critic/vf_clipfrac"] == (clip is not None)
    assert 0.2 < found[0] < 0.25 < 0.99 < found[1] < 1.01


def test_nan_loss_of_the_critic_raises() -> None:
    with pytest.raises(TrainingError, match=r"loss of the critic is NaN or infinite: .* lower critic\.lr"):
        ValueHead(2, Critic()).train_step(torch.ones(1, 2), torch.tensor([math.nan]), torch.tensor([0]))


def test_critic_is_in_the_checkpoint(folder: Path, tmp_path: Path) -> None:
    """A restored critic goes on exactly as the one that was saved, with the moments of its optimizer."""
    about = small(model={"path": str(folder)}, algorithm={"advantage": "gae"}, **LONG)
    first = TrainingState.load(about, tmp_path, folder)
    batch = on_policy(make_batch(some_batch(), about, seed=0), first.policy)
    for seed in range(3):
        first.learner.train_step(batch, seed=seed)
    first.progress.step = 3
    first.save()
    again = TrainingState.load(about, tmp_path, folder)
    for state in (first, again):
        state.learner.train_step(batch, seed=9)
    one, other = first.learner.critic, again.learner.critic
    assert one is not None
    assert other is not None
    assert one.weight.any()
    assert torch.equal(one.weight, other.weight)
    assert torch.equal(one.bias, other.bias)
    assert torch.equal(weights(first.learner), weights(again.learner))
    (tmp_path / "checkpoints/000003/critic.safetensors").unlink()
    with pytest.raises(TrainingError, match=r"critic\.safetensors: cannot be read .*: restore this file"):
        TrainingState.load(about, tmp_path, folder)


@traits(uses_values=True)
def monte_carlo(rewards: Any, values: Any, episodes: Any, *, scale: float = 1.0) -> Any:
    """The sum of all rewards of the episode, less the value."""
    returns = ((episodes[:, None] == episodes[None, :]) * rewards).sum(1)
    return scale * (returns - values), returns


def test_own_advantage_with_values(folder: Path) -> None:
    own = {"advantage": f"{__name__}:monte_carlo", "advantage_options": {"scale": 2.0}}
    about = of_gae(algorithm={**own, "loss": f"{__name__}:recorded"})
    learner = start(folder, about)
    CALLS.clear()
    metrics = learner.train_step(make_batch(conversation(), about, seed=0), seed=0)
    assert set(torch.cat(CALLS).tolist()) == {2.0, -2.0}
    assert metrics["critic/returns_mean"] == pytest.approx(2 / 6)


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ({"reward": {"milestones": "return-to-go"}}, r"reward\.milestones: advantage gae sums .*: set it to turn"),
        ({"reward": {"judge": "rule", "by_step": True}}, r"reward\.by_step: advantage gae compares no steps"),
        ({"reward": {"judge": "rule", "combine": "sum"}}, r"reward\.combine: sum has a baseline of its own, not gae"),
        ({"algorithm": {"advantage_options": {"lam": 1.5}}}, "option lam=1.5: .* less than or equal to 1"),
        ({"algorithm": {"advantage_options": {"gamma": -1}}}, "option gamma=-1: .* greater than or equal to 0"),
        ({"critic": {"lr": 0}}, "greater than 0"),
    ],
)
def test_unsuitable_settings_are_refused(parts: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        of_gae(**parts)
    assert of_gae(reward={"milestones": "turn"}).reward.milestones == "turn"


@pytest.mark.asyncio
async def test_run_with_a_critic_resumes(tmp_path: Path) -> None:
    parts: dict[str, Any] = {
        "algorithm": {"advantage": "gae", "advantage_options": {"lam": 0.9}},
        "reward": {"judge": "rule"},
        "evaluation": {"every": 9, "canary": 0},
    }
    for steps in (1, 2):
        await train(small(**parts, budget={"steps": steps}), tmp_path / "run", view=Said())
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert rows[0]["critic/vpred_mean"] == 0 != rows[1]["critic/vpred_mean"]
    assert all(row["actor/grad_norm"] >= 0 and row["critic/vf_loss"] > 0 for row in rows)
