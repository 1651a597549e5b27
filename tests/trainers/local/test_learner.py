"""Training steps of the local learner."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from clawgym.engines.tiny import make_tiny_model
from clawgym.errors import TrainingError
from clawgym.gateway.render import Renderer
from clawgym.trainers.batching import MaskedSequence
from clawgym.trainers.common.batch import TrainingBatch, make_batch
from clawgym.trainers.common.imitation import ImitationData
from clawgym.trainers.common.policy import Policy, load_policy
from clawgym.trainers.config import TrainConfig
from clawgym.trainers.local.learner import Learner

from ..batches import batch_of, episode_of, sample_of, some_batch


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("m") / "model", spread=0.05)


def config(**parts: Any) -> TrainConfig:
    return TrainConfig.model_validate({"optimizer": {"lr": 1e-3}, **parts})


def start(folder: Path, about: TrainConfig) -> Learner:
    reference = about.algorithm.kl > 0
    return Learner(load_policy(about.model, folder, about.compute, reference=reference), about)


def weights(learner: Learner) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in learner.parameters])


def on_policy(batch: TrainingBatch, policy: Policy) -> TrainingBatch:
    """The batch with the log-probs of this policy, as if it had sampled it."""
    from clawgym.trainers.batching import micro_batches
    from clawgym.trainers.common.policy import token_logprobs

    logp = torch.zeros_like(batch.rollout_logp)
    with torch.no_grad():
        for micro in micro_batches(batch.rows, tokens=10**6):
            logp[micro.places] = token_logprobs(policy.module, micro)[0]
    return dataclasses.replace(batch, rollout_logp=logp)


def test_rewarded_tokens_become_likelier(folder: Path) -> None:
    about = config()
    learner = start(folder, about)
    batch = on_policy(make_batch(some_batch(), about, seed=0), learner.policy)
    before = batch.rollout_logp
    metrics = learner.train_step(batch, seed=0)
    after = on_policy(batch, learner.policy).rollout_logp
    gain = after - before
    assert (gain[batch.advantages > 0]).mean() > 0 > (gain[batch.advantages < 0]).mean()
    assert metrics["training/rollout_probs_diff"] < 1e-6
    assert metrics["actor/grad_norm"] > 0
    assert metrics["actor/ratio_max"] == pytest.approx(1, abs=1e-4)


def test_learning_rate_warmup_and_decay(folder: Path) -> None:
    about = config(optimizer={"lr": 1e-3, "warmup": 2, "decay": True})
    learner, batch = start(folder, about), make_batch(some_batch(), about, seed=0)
    rates = [learner.train_step(batch, seed=0, done=done)["actor/lr"] for done in (0.0, 0.0, 0.5, 1.0)]
    assert rates == pytest.approx([5e-4, 1e-3, 5.5e-4, 1e-4])


@pytest.mark.parametrize("minibatches", [1, 3])
def test_micro_batching_does_not_change_update(folder: Path, minibatches: int) -> None:
    found = []
    for micro_tokens, row_tokens in ((64, 32), (4096, 2048), (200, 64)):
        about = config(
            compute={"micro_tokens": micro_tokens, "row_tokens": row_tokens},
            algorithm={"minibatches": minibatches, "epochs": 2, "old": "recompute"},
        )
        learner = start(folder, about)
        batch = on_policy(make_batch(some_batch(), about, seed=0), learner.policy)
        learner.train_step(batch, seed=3)
        found.append(weights(learner))
        assert learner.updates == 2 * minibatches
    assert (found[0] - found[1]).abs().max() < 2e-4 > (found[0] - found[2]).abs().max()


def test_ratio_max_is_over_all_micro_batches(folder: Path) -> None:
    found = []
    for micro_tokens, row_tokens in ((64, 32), (4096, 2048)):
        about = config(
            compute={"micro_tokens": micro_tokens, "row_tokens": row_tokens},
            algorithm={"old": "rollout"},
            guards={"max_kl": 1e9},
        )
        learner = start(folder, about)
        batch = on_policy(make_batch(some_batch(), about, seed=0), learner.policy)
        first = torch.where(batch.row == 0, batch.rollout_logp - 1, batch.rollout_logp)
        found.append(learner.train_step(dataclasses.replace(batch, rollout_logp=first), seed=0)["actor/ratio_max"])
    assert found == pytest.approx([math.e, math.e], abs=1e-2)


def test_zero_variance_groups_change_nothing(folder: Path) -> None:
    about = config()
    same = batch_of([[episode_of(n, 1.0, [sample_of((9, 20 + n), (0, 1), (-1.0,))]) for n in range(3)]])
    learner = start(folder, about)
    before = weights(learner)
    batch = make_batch(same, about, seed=0)
    assert batch.metrics["rollout/group_all_one_frac"] == 1
    learner.train_step(batch, seed=0)
    assert torch.equal(before, weights(learner))


@pytest.mark.parametrize("minibatches", [1, 2])
def test_zero_variance_groups_leave_the_batch(folder: Path, minibatches: int) -> None:
    """The update is that of a batch without them, and their sequences are not computed."""
    mixed = [episode_of(n, float(n % 2), [sample_of((9, 20 + n), (0, 1), (-1.0,))]) for n in range(4)]
    same = [episode_of(9 + n, 1.0, [sample_of((9, 30 + n), (0, 1), (-1.0,))]) for n in range(8)]
    # With a large eps an update is in proportion to the gradient.
    about = config(algorithm={"minibatches": minibatches, "aggregation": "token"}, optimizer={"lr": 1e-3, "eps": 1.0})
    found = []
    for groups in ([mixed], [mixed, same]):
        learner = start(folder, about)
        first = weights(learner).clone()
        batch = on_policy(make_batch(batch_of(groups), about, seed=0), learner.policy)
        learner.train_step(batch, seed=0)
        found.append(weights(learner) - first)
    assert float((found[0] - found[1]).norm()) < 1e-3 * float(found[0].norm())  # some CPUs round by the batch's shape
    assert batch.metrics["rollout/groups_trained"] == 1
    assert batch.metrics["rollout/group_all_one_frac"] == 0.5
    assert make_batch(batch_of([mixed, same]), config(algorithm={"kl": 0.1}), seed=0).trained == tuple(range(12))


def test_imitation_has_as_many_updates_without_a_group_to_train_on(folder: Path) -> None:
    about = config(algorithm={"minibatches": 3, "imitation": 1.0})
    same = batch_of([[episode_of(n, 1.0, [sample_of((9, 20 + n), (0, 1), (-1.0,))]) for n in range(3)]])
    learner = start(folder, about)
    data = ImitationData([MaskedSequence((9, 21, 22), (0, 1, 1))], about, Renderer(folder))
    learner.train_step(make_batch(same, about, seed=0), seed=0, imitation=data.batch)
    assert learner.updates == 3


def test_episodes_are_weighted_equally_with_several_sequences(folder: Path) -> None:
    whole = sample_of((9, 10, 21, 22, 23, 24), (0, 0, 1, 1, 1, 1), (-1.0,) * 4)
    halves = [sample_of((9, 10, 21, 22), (0, 0, 1, 1), (-1.0,) * 2),
              sample_of((9, 10, 21, 22, 23, 24), (0, 0, 0, 0, 1, 1), (-1.0,) * 2)]  # fmt: skip
    other = sample_of((9, 10, 30), (0, 0, 1), (-2.0,))
    gradients = []
    for rows in ([whole], halves):
        about = config(algorithm={"old": "rollout"}, guards={"max_kl": 1e9})
        learner = start(folder, about)
        made = batch_of([[episode_of(0, 1.0, rows), episode_of(1, 0.0, [other])]])
        learner.train_step(make_batch(made, about, seed=0), seed=0)
        gradients.append(weights(learner))
    assert (gradients[0] - gradients[1]).abs().max() < 1e-5


def test_turn_has_advantage_of_its_process_reward() -> None:
    rows = sample_of((9, 10, 21, 22, 40, 23, 24), (0, 0, 1, 1, 0, 1, 1), (-1.0,) * 4, (0, 0, 1, 1))
    made = batch_of([[episode_of(0, 1.0, [rows], {0: 1.0, 1: -1.0}), episode_of(1, 1.0, [rows], {0: -1.0})]])
    plain = make_batch(made, config(), seed=0)
    assert plain.advantages.tolist() == [0.0] * 8
    judged = make_batch(made, config(reward={"judge": "rule"}), seed=0)
    first, second, third = judged.advantages[0].item(), judged.advantages[2].item(), judged.advantages[4].item()
    assert first > 0 > second
    assert judged.advantages.tolist()[:4] == [first, first, second, second]
    assert third < 0
    assert judged.advantages[6].item() == 0  # not judged, in a zero-variance group
    assert judged.metrics["reward/process_scored_frac"] == pytest.approx(3 / 4)


def test_shuffle_keeps_the_set_of_rewards() -> None:
    made = some_batch()
    plain, control = (make_batch(made, config(reward={"shuffle": on}), seed=5) for on in (False, True))
    assert plain.metrics["rollout/avg_reward_submitted"] == control.metrics["rollout/avg_reward_submitted"]
    assert plain.advantages.tolist() != control.advantages.tolist()
    again = make_batch(made, config(reward={"shuffle": True}), seed=5)
    assert again.advantages.tolist() == control.advantages.tolist()


def test_nan_gradient_leaves_weights_unchanged(folder: Path) -> None:
    about = config()
    learner = start(folder, about)
    batch = on_policy(make_batch(some_batch(), about, seed=0), learner.policy)
    learner.parameters[3].data[0] = math.nan
    before = [p.detach().clone() for p in learner.parameters]
    with pytest.raises(TrainingError, match="NaN or infinite; the weights were not changed"):
        learner.train_step(batch, seed=0)
    assert all(
        torch.equal(a.nan_to_num(7), b.detach().nan_to_num(7)) for a, b in zip(before, learner.parameters, strict=True)
    )


def test_kl_and_entropy_guards_raise(folder: Path) -> None:
    far = config(algorithm={"old": "rollout"})  # the recorded log-probs differ from the policy's
    with pytest.raises(TrainingError, match=r"KL of one step is .* nats per token .*guards\.max_kl"):
        start(folder, far).train_step(make_batch(some_batch(), far, seed=0), seed=0)
    leaps = config(optimizer={"lr": 0.5, "warmup": 1})  # a single large update
    learner = start(folder, leaps)
    with pytest.raises(TrainingError, match=r"KL of one step is .* nats per token .*guards\.max_kl"):
        learner.train_step(on_policy(make_batch(some_batch(), leaps, seed=0), learner.policy), seed=0)
    certain = config(guards={"min_entropy": 20.0})
    learner = start(folder, certain)
    batch = on_policy(make_batch(some_batch(), certain, seed=0), learner.policy)
    with pytest.raises(TrainingError, match=r"entropy of the policy fell to .*guards\.min_entropy"):
        learner.train_step(batch, seed=0)


def test_nan_policy_exceeds_guard(folder: Path) -> None:
    """The gradient is finite but the update is not; the KL is NaN, which is not above the limit."""
    learner = start(folder, config())
    batch = on_policy(make_batch(some_batch(), config(), seed=0), learner.policy)
    learner.optimizer.register_step_post_hook(lambda *_: learner.parameters[3].data.fill_(math.nan))
    with pytest.raises(TrainingError, match=r"KL of one step is nan nats per token .*guards\.max_kl"):
        learner.train_step(batch, seed=0)


def test_mismatch_is_measured_without_extra_forward_pass(folder: Path) -> None:
    about = config(algorithm={"old": "rollout", "minibatches": 2}, guards={"max_kl": 1e9})
    learner = start(folder, about)
    batch = make_batch(some_batch(), about, seed=0)
    assert learner.train_step(on_policy(batch, learner.policy), seed=0)["training/rollout_probs_diff"] < 1e-6
    assert learner.train_step(batch, seed=0)["training/rollout_probs_diff"] > 1e-3  # ids with wrong log-probs


def test_lora_trains_adapters_and_shares_base_weights(folder: Path) -> None:
    about = config(model={"lora": {"rank": 4, "alpha": 8}})
    learner = start(folder, about)
    frozen = {n: p.detach().clone() for n, p in learner.policy.module.named_parameters() if not p.requires_grad}
    assert learner.policy.trained()
    assert all("lora_" in name for name in learner.policy.trained())
    batch = on_policy(make_batch(some_batch(), about, seed=0), learner.policy)
    learner.train_step(batch, seed=0)
    now = dict(learner.policy.module.named_parameters())
    assert all(torch.equal(now[name], tensor) for name, tensor in frozen.items())
    assert (on_policy(batch, learner.policy).rollout_logp - batch.rollout_logp).abs().max() > 0


def test_entropy_bonus_raises_entropy(folder: Path) -> None:
    """In zero-variance groups only the entropy bonus has a gradient."""
    same = batch_of([[episode_of(n, 1.0, [sample_of((9, 20, 21 + n), (0, 0, 1), (-1.0,))]) for n in range(2)]])
    about = config(algorithm={"entropy": 1.0})
    learner, batch = start(folder, about), make_batch(same, about, seed=0)
    seen = [learner.train_step(batch, seed=0)["actor/entropy"] for _ in range(20)]
    assert seen[-1] > seen[0] + 1e-3


@pytest.mark.parametrize("lora", [None, {"rank": 4}])
def test_kl_to_initial_policy_limits_update(folder: Path, lora: dict[str, Any] | None) -> None:
    model = {"model": {"lora": lora}, "optimizer": {"lr": 1e-3 if lora is None else 1e-2}}
    free, held = config(algorithm={"epochs": 4}, **model), config(algorithm={"epochs": 4, "kl": 50.0}, **model)
    moved = []
    for about in (free, held):
        learner = start(folder, about)
        batch = on_policy(make_batch(some_batch(), about, seed=0), learner.policy)
        metrics = learner.train_step(batch, seed=0)
        moved.append((on_policy(batch, learner.policy).rollout_logp - batch.rollout_logp).abs().mean())
    assert moved[1] < 0.8 * moved[0]
    assert metrics["actor/ref_kl"] > 0


CALLS: list[tuple[Any, Any, Any]] = []


def recorded(
    logp: Any, old_logp: Any, advantages: Any, weights: Any, importance: Any = None, sequences: Any = None
) -> Any:
    """REINFORCE; keeps what it was called with."""
    CALLS.append((weights, sequences, importance))
    return -(weights * advantages * logp).sum(), {}


def test_loss_gets_whole_sequences_with_labels(folder: Path) -> None:
    """In all micro-batches of a mini-batch, every sequence of its episodes is complete and in one call."""
    about = config(
        compute={"micro_tokens": 24, "row_tokens": 24},
        algorithm={"loss": f"{__name__}:recorded", "minibatches": 2, "aggregation": "token"},
    )
    learner, batch = start(folder, about), make_batch(some_batch(), about, seed=0)
    CALLS.clear()
    learner.train_step(batch, seed=0)
    assert len(CALLS) > 2
    seen: list[int] = []
    for weights, sequences, _ in CALLS:
        for row in sequences[weights != 0].unique().tolist():
            assert (sequences[weights != 0] == row).sum() == (batch.row == row).sum()
            seen.append(row)
    assert sorted(seen) == batch.row.unique().tolist()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_importance_weights_of_tokens_and_sequences(folder: Path, level: str, masked: bool) -> None:
    about = config(
        algorithm={
            "loss": f"{__name__}:recorded",
            "importance": f"masked-{level}" if masked else level,
            "importance_cap": 1.1,
        },
        compute={"micro_tokens": 10**6, "row_tokens": 10**5},
        guards={"max_kl": 1e9},
    )
    learner = start(folder, about)
    batch = on_policy(make_batch(some_batch(), about, seed=0), learner.policy)
    gaps = torch.randn(len(batch.row), generator=torch.Generator().manual_seed(0)) * 0.2
    CALLS.clear()
    metrics = learner.train_step(dataclasses.replace(batch, rollout_logp=batch.rollout_logp - gaps), seed=0)
    wanted = []
    for n, gap in enumerate(gaps.tolist()):
        total = (
            gap
            if level == "token"
            else sum(g for g, r in zip(gaps.tolist(), batch.row, strict=True) if r == batch.row[n])
        )
        ratio = math.exp(total)
        wanted.append(ratio if ratio <= 1.1 else 0.0 if masked else 1.1)
    got = torch.cat([factors for _, _, factors in CALLS if factors is not None])
    assert sorted(got.tolist()) == pytest.approx(sorted(wanted), abs=1e-4)
    rejected = wanted.count(0.0) / len(wanted)
    assert (0 < rejected < 1) == masked
    assert metrics.get("training/importance_masked_frac") == (pytest.approx(rejected) if masked else None)


def test_eps_of_the_optimizer(folder: Path) -> None:
    about = config(optimizer={"eps": 1e-3})
    assert start(folder, about).optimizer.param_groups[0]["eps"] == 1e-3


def test_imitation_trains_masked_ids_only(folder: Path) -> None:
    about = config(sft={"lr": 3e-3, "warmup": 1, "steps": 30})
    learner = start(folder, about)
    rows = [MaskedSequence((9, 10, 11, 40, 41), (0, 0, 0, 1, 1)), MaskedSequence((9, 12, 13, 50), (0, 0, 0, 1))]
    losses = [learner.imitate(rows, step=n, steps=30)["sft/loss"] for n in range(30)]
    assert losses[-1] < 0.5 < 4 < losses[0]
    context = [MaskedSequence((9, 10, 11), (0, 1, 1))]
    assert learner.imitate(context, step=29, steps=30)["sft/loss"] > 3


DEMONSTRATIONS = [MaskedSequence((9, 10, 11, 40, 41), (0, 0, 0, 1, 1)), MaskedSequence((9, 12, 13, 50), (0, 0, 0, 1))]


def imitation(folder: Path, about: TrainConfig) -> ImitationData:
    return ImitationData(DEMONSTRATIONS, about, Renderer(folder))


def test_imitation_loss_adds_to_rl_gradient(folder: Path) -> None:
    """If all rewards are equal, the step equals one of imitation alone."""
    about = config(algorithm={"imitation": 1.0}, sft={"batch": 2, "lr": 1e-3, "warmup": 1, "decay": False})
    alike = batch_of([[episode_of(n, 1.0, [sample_of((9, 9, 50 + n), (0, 0, 1), (-3.0,))]) for n in range(2)]])
    mixed = some_batch()
    both, alone, plain = (start(folder, about) for _ in range(3))
    metrics = both.train_step(make_batch(alike, about, seed=0), seed=0, imitation=imitation(folder, about).batch)
    alone.imitate(imitation(folder, about).batch(0), step=1, steps=2)
    assert torch.equal(weights(both), weights(alone))
    assert metrics["sft/loss"] > 4
    both.train_step(make_batch(mixed, about, seed=0), seed=0, imitation=imitation(folder, about).batch)
    plain.imitate(imitation(folder, about).batch(0), step=1, steps=2)
    plain.train_step(make_batch(mixed, about, seed=0), seed=0)
    assert not torch.equal(weights(both), weights(plain))


def test_solved_episodes_are_imitated_and_restored(folder: Path) -> None:
    about = config(sft={"batch": 64})
    batch = make_batch(some_batch(), about, seed=0)
    known, again = imitation(folder, about), imitation(folder, about)
    assert {row.ids for row in known.batch(0)} == {row.ids for row in DEMONSTRATIONS}
    assert known.add_solved(batch) == {"t": "e5"}  # the last one of the task; 3 and 7 have two rows each
    assert known.solved == 1
    chosen = {row.ids for row in known.batch(1)}
    assert chosen == {row.ids for row in DEMONSTRATIONS} | {batch.episodes[5].sequences[0].ids}
    again.add_solved(batch)
    assert again.batch(5) == known.batch(5) != known.batch(6)


def test_shuffled_rewards_decide_what_is_imitated(folder: Path) -> None:
    about = config(reward={"shuffle": True})
    kept = [imitation(folder, about).add_solved(make_batch(some_batch(), about, seed=seed)) for seed in range(8)]
    assert len({one.get("t") for one in kept}) > 1
