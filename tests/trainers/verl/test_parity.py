"""The same batch has the same advantages, and each row the same loss, in both trainers."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from clawgym.pool.states import Batch
from clawgym.trainers import algorithms
from clawgym.trainers.config import TrainConfig
from clawgym.trainers.local.batch import TrainingBatch, make_batch

from ..local.batches import batch_of, episode_of, sample_of

core: Any = pytest.importorskip("verl.trainer.ppo.core_algos")
losses: Any = pytest.importorskip("verl.workers.utils.losses")
configs: Any = pytest.importorskip("verl.workers.config")
formulas: Any = pytest.importorskip("clawgym.trainers.verl.formulas")
host: Any = pytest.importorskip("clawgym.trainers.verl.host")
tensordicts: Any = pytest.importorskip("verl.utils.tensordict_utils")
trainer: Any = pytest.importorskip("clawgym.trainers.verl.trainer")

CONFIGS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "dr-grpo": {"algorithm": {"advantage": "dr-grpo", "aggregation": "token"}},
    "rloo": {"algorithm": {"advantage": "rloo", "aggregation": "sequence"}},
    "reinforce++": {"algorithm": {"advantage": "reinforce++", "dual_clip": 3.0}},
    "integrated": {"reward": {"judge": "rule", "coefficient": 0.7, "clip": 1.5}},
    "by step": {"reward": {"judge": "rule", "by_step": True}},
    "binary": {"reward": {"judge": "rule"}, "algorithm": {"advantage": "binary"}},
    "as sampled": {"algorithm": {"old": "rollout"}},
    "shuffled": {"reward": {"shuffle": True}},
}


def some(seed: int) -> Batch:
    """Groups of three and four; episodes of one to three turns, some rewritten into two rows, some judged."""
    rng = random.Random(seed)
    groups = []
    for group, size in enumerate((4, 3)):
        members = []
        for n in range(size):
            turns = rng.randint(1, 3)
            ids, mask, logprobs, turn_of = [rng.randrange(9, 99) for _ in range(5)], [0] * 5, [], []
            for turn in range(turns):
                count = rng.randint(1, 4)
                ids += [rng.randrange(9, 99) for _ in range(count + 2)]
                mask += [1] * count + [0] * 2
                logprobs += [-rng.random() * 3 for _ in range(count)]
                turn_of += [turn] * count
            samples = [sample_of(ids[:-2], mask[:-2], logprobs, turn_of)]
            if n == 1:
                samples.append(sample_of([7, 8, 11, 12], [0, 0, 1, 1], [-0.5, -1.5], [turns, turns]))
            judged = {t: float(rng.choice((-1, 0, 1))) for t in range(turns) if rng.random() < 0.7}
            members.append(episode_of(10 * group + n, rng.choice((0.0, 0.5, 1.0)), samples, judged))
        groups.append(members)
    return batch_of(groups)


class Both:
    """One batch on both sides, with log-probs before and after a change of the policy."""

    def __init__(self, parts: dict[str, Any], seed: int) -> None:
        self.config = TrainConfig.model_validate(parts)
        batch = some(seed)
        self.local: TrainingBatch = make_batch(batch, self.config, seed=5, worth=0.6)
        made = [
            (number, *host.row_of(member, sample, group.id, self.config))
            for number, (group, member, sample) in enumerate(
                (g, m, s) for g in batch.groups for m in g.episodes for s in m.samples
            )
        ]
        random.Random(seed).shuffle(made)  # ranks are given rows of like length, not of like episodes
        self.order = [number for number, _, _ in made]
        self.fields = [fields for _, fields, _ in made]
        self.tags = [tag for _, _, tag in made]
        generator = torch.Generator().manual_seed(seed)
        count = len(self.local.rollout_logp)
        self.old = self.local.rollout_logp + 0.3 * torch.randn(count, generator=generator)
        if self.config.algorithm.old == "rollout":
            self.old = self.local.rollout_logp
        self.logp = (self.old + 0.3 * torch.randn(count, generator=generator)).requires_grad_()

    def rows(self, flat: torch.Tensor) -> torch.Tensor:
        """(S,) of the local trainer as (B, T) of verl."""
        made = torch.zeros_like(self.mask, dtype=flat.dtype)
        for place, number in enumerate(self.order):
            made[place, self.mask[place].bool()] = flat[self.local.row == number]
        return made

    @property
    def mask(self) -> torch.Tensor:
        masks = [fields["response_mask"] for fields in self.fields]
        return torch.nn.utils.rnn.pad_sequence(masks, batch_first=True)

    def of_verl(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(B, T) advantages and factors, by what is registered there."""
        attempts, episode = trainer.attempts_of(self.tags)
        turns = torch.nn.utils.rnn.pad_sequence([fields["turns"] for fields in self.fields], batch_first=True)
        given, _ = core.get_adv_estimator_fn("clawgym")(
            token_level_rewards=None, response_mask=self.mask, config=None, attempts=attempts,
            episode=episode, turn=turns, train=self.config, seed=5, worth=0.6, figures={},
        )  # fmt: skip
        importance = None
        if self.config.algorithm.old == "recompute":
            importance = algorithms.truncated_importance(self.rows(self.old), self.rows(self.local.rollout_logp))
        return given, formulas.token_factors(self.mask, episode, importance, self.config)

    def local_losses(self) -> torch.Tensor:
        """(B,) what each row adds to the loss of the local trainer, in verl's order."""
        about, batch = self.config.algorithm, self.local
        weights = algorithms.token_weights(batch.episode, about.aggregation, rows=batch.row)
        importance = None
        if about.old == "recompute":
            importance = algorithms.truncated_importance(self.old, batch.rollout_logp)
        found = []
        for number in self.order:
            mine = torch.where(batch.row == number, weights, 0.0)
            loss, _ = algorithms.policy_loss(
                self.logp, self.old, batch.advantages, mine, clip_low=about.clip_low, clip_high=about.clip_high,
                dual_clip=about.dual_clip, importance=importance,
            )  # fmt: skip
            found.append(loss)
        return torch.stack(found)

    def actor(self) -> Any:
        about = self.config.algorithm
        return configs.ActorConfig(
            strategy="fsdp", rollout_n=1, use_dynamic_bsz=True, clip_ratio_low=about.clip_low,
            clip_ratio_high=about.clip_high, clip_ratio_c=about.dual_clip or float("inf"),
            policy_loss=configs.PolicyLossConfig(loss_mode="clawgym"),
        )  # fmt: skip


@pytest.fixture(params=CONFIGS)
def both(request: pytest.FixtureRequest) -> Both:
    return Both(CONFIGS[request.param], seed=3)


def test_what_a_row_is_made_of(both: Both) -> None:
    for number, fields, tag in zip(both.order, both.fields, both.tags, strict=True):
        path = both.local.paths[number]
        assert fields["input_ids"].tolist() == [*fields["prompts"].tolist(), *fields["responses"].tolist()]
        assert fields["input_ids"].tolist() == list(path.ids)
        assert [0] * len(fields["prompts"]) + fields["response_mask"].tolist() == list(path.mask)
        trained = fields["response_mask"].bool()
        assert torch.equal(fields["rollout_log_probs"][trained], both.local.rollout_logp[both.local.row == number])
        assert not fields["rollout_log_probs"][~trained].any()
        assert tag["seq_len"] == len(path.ids)
        assert trained[0]


def test_advantages(both: Both) -> None:
    given, _ = both.of_verl()
    torch.testing.assert_close(given, both.rows(both.local.advantages), rtol=0, atol=1e-6)
    assert given.any()


def test_the_loss_of_each_row(both: Both) -> None:
    given, factors = both.of_verl()
    logp, old, mask = both.rows(both.logp), both.rows(both.old), both.mask
    losses = [
        core.get_policy_loss_fn("clawgym")(
            old_log_prob=old[n : n + 1], log_prob=logp[n : n + 1], advantages=given[n : n + 1],
            response_mask=mask[n : n + 1], config=both.actor(), rollout_is_weights=factors[n : n + 1],
        )[0]
        for n in range(len(mask))
    ]  # fmt: skip
    theirs, ours = torch.stack(losses), both.local_losses()
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-6)
    a, b = (torch.autograd.grad(x.sum(), both.logp, retain_graph=True)[0] for x in (theirs, ours))
    torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
    assert a.any()


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_loss_as_verl_calls_it(both: Both, ranks: int) -> None:
    """Through its own function, on its nested rows; the mean over ranks is the loss of the batch."""
    given, factors = both.of_verl()
    wanted = {"old_log_probs": both.rows(both.old), "advantages": given, "rollout_is_weights": factors}
    parts = []
    for rank in range(ranks):
        places = range(rank, len(both.fields), ranks)
        fields = [
            {name: both.fields[n][name] for name in ("prompts", "responses", "response_mask")}
            | {name: value[n, : len(both.fields[n]["responses"])] for name, value in wanted.items()}
            for n in places
        ]
        data = host.list_of_dict_to_tensordict(fields)
        for name, value in (("dp_size", ranks), ("batch_num_tokens", 1), ("global_batch_size", 1)):
            tensordicts.assign_non_tensor_data(data, name, value)
        logp = both.rows(both.logp)
        whole = []
        for n in places:
            prompt, length = len(both.fields[n]["prompts"]), len(both.fields[n]["responses"])
            # What the model says of a token stands one place before it.
            whole.append(torch.cat([torch.zeros(prompt - 1), logp[n, :length], torch.zeros(1)]))
        output = {"log_probs": torch.nested.as_nested_tensor(whole, layout=torch.jagged)}
        loss, said = losses.ppo_loss(both.actor(), output, data)
        assert "actor/clip_fraction_low" in said
        parts.append(loss)
    torch.testing.assert_close(torch.stack(parts).mean(), both.local_losses().sum(), rtol=0, atol=1e-6)


def test_mini_batches_share_the_votes() -> None:
    whole, cut = Both({}, seed=3), Both({"algorithm": {"minibatches": 4}}, seed=3)
    torch.testing.assert_close(cut.of_verl()[1], 4 * whole.of_verl()[1])


def test_a_batch_without_factors_is_refused() -> None:
    same = torch.zeros(1, 2)
    with pytest.raises(ValueError, match="trainer=verl"):
        core.get_policy_loss_fn("clawgym")(same, same, same, same, config=Both({}, 0).actor())
