"""Both trainers compute the same advantages and the same loss for each training sequence."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from clawgym.engines.tiny import make_tiny_model
from clawgym.pool.states import Batch
from clawgym.rewards.hints import Teacher
from clawgym.trainers import algorithms
from clawgym.trainers.batching import MaskedSequence
from clawgym.trainers.common.batch import TrainingBatch, make_batch
from clawgym.trainers.common.teaching import Teachers
from clawgym.trainers.config import TrainConfig
from clawgym.trainers.credit import distilled_advantages
from clawgym.trainers.protocols import loss_of
from clawgym.trainers.verl.settings import loss_mode

from ..batches import batch_of, episode_of, sample_of, teacher_of
from ..local.test_learner import start

core: Any = pytest.importorskip("verl.trainer.ppo.core_algos")
configs: Any = pytest.importorskip("verl.workers.config")
formulas: Any = pytest.importorskip("clawgym.trainers.verl.formulas")
tensordicts: Any = pytest.importorskip("verl.utils.tensordict_utils")
rows: Any = pytest.importorskip("clawgym.trainers.verl.queue_entries")

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
    "kl and entropy": {"algorithm": {"kl": 0.3, "entropy": 0.1, "aggregation": "sequence"}},
    "k3": {"algorithm": {"kl": 0.3, "kl_estimator": "k3", "aggregation": "seq-mean-token-sum"}},
    "gspo": {"algorithm": {"loss": "gspo", "loss_options": {"high": 0.1}, "importance": "masked-token"}},
    "cispo": {"algorithm": {"loss": "cispo", "loss_options": {"cap": 1.1}, "importance": "sequence"}},
    "rejected": {"algorithm": {"importance": "masked-sequence", "importance_cap": 1.2}},
    "constant length": {"algorithm": {"aggregation": "seq-mean-token-sum-norm", "length": 7}},
    "taught": {"reward": {"judge": "policy"}, "distillation": {"hints": 1, "w_rl": 0.6, "w_opd": 0.8, "clip": 0.4}},
    "taught alone": {
        "reward": {"judge": "policy"}, "distillation": {"hints": 1, "w_rl": 0.0}, "algorithm": {"old": "rollout"},
    },
}  # fmt: skip


def some(seed: int) -> Batch:
    """Groups of three and four episodes with one to three turns; some have two training sequences, some are judged."""
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


def teachers_of(batch: Batch, seed: int) -> Teachers:
    """Teachers of some turns, for all ids of the turn."""
    rng = random.Random(seed)
    teachers: dict[tuple[str, int], Teacher] = {}
    for member in (m for g in batch.groups for m in g.episodes):
        for sample in member.sequences:
            for turn in set(sample.turn_of):
                if rng.random() < 0.6:
                    logprobs = [-rng.random() * 3 for t in sample.turn_of if t == turn]
                    teachers[member.episode.id, turn] = teacher_of(logprobs)
    return teachers


class Both:
    """One batch on both sides, with log-probs before and after a change of the policy."""

    def __init__(self, parts: dict[str, Any], seed: int) -> None:
        self.config = TrainConfig.model_validate(parts)
        batch = some(seed)
        teachers = teachers_of(batch, seed) if self.config.distillation.hints else {}
        self.local: TrainingBatch = make_batch(batch, self.config, seed=5, process_weight=0.6, teachers=teachers)
        made = [
            (number, *rows.queue_entry(member, sample, group.id, self.config, teachers))
            for number, (group, member, sample) in enumerate(
                (g, m, s) for g in batch.groups for m in g.episodes for s in m.sequences
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
        self.first = self.old + 0.5 * torch.randn(count, generator=generator)
        self.entropy = torch.rand(count, generator=generator).requires_grad_()

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
        """(B, T) advantages and importance weights, by what is registered there."""
        scored, episode = rows.episodes_of_tags(self.tags)
        turns = torch.nn.utils.rnn.pad_sequence([fields["turns"] for fields in self.fields], batch_first=True)
        given, _ = core.get_adv_estimator_fn("clawgym")(
            token_level_rewards=None, response_mask=self.mask, config=None, scored=scored,
            episode=episode, turn=turns, train=self.config, seed=5, process_weight=0.6, metrics={},
        )  # fmt: skip
        if self.config.distillation.hints:
            teacher = torch.nn.utils.rnn.pad_sequence(
                [fields["teacher_log_probs"] for fields in self.fields], batch_first=True
            )
            given = distilled_advantages(given, self.rows(self.old), teacher, self.config.distillation)
        used = torch.isin(episode, torch.tensor(self.local.trained))[:, None]
        self.weights = formulas.batch_token_weights(self.mask.bool() & used, episode, self.config)
        old, rollout = self.rows(self.old), self.rows(self.local.rollout_logp)
        return given * self.mask, formulas.batch_importance(old, rollout, self.mask, self.config)

    @property
    def advantages(self) -> torch.Tensor:
        """(S,) of the local trainer."""
        about, batch = self.config.distillation, self.local
        if not about.hints:
            return batch.advantages
        spoken = batch.teacher_logp.isfinite()
        opd = algorithms.distillation_advantages(batch.teacher_logp, self.old, clip=about.clip)
        return algorithms.combined(batch.advantages, opd, w_rl=about.w_rl, w_opd=about.w_opd, has_teacher=spoken)

    def local_losses(self, *, terms: bool = True) -> torch.Tensor:
        """(B,) what each row adds to the loss of the local trainer, in verl's order; with those of KL and entropy."""
        about, batch = self.config.algorithm, self.local
        part = batch.of_episodes(batch.trained)
        weights = torch.zeros_like(batch.rollout_logp)
        weights[part] = algorithms.token_weights(
            batch.episode[part], about.aggregation, rows=batch.row[part], norm=self.config.loss_length
        )
        importance = None
        if about.old == "recompute":
            importance = algorithms.importance_weights(
                self.old, batch.rollout_logp, cap=about.importance_cap,
                rows=batch.row if "sequence" in about.importance else None, masked="masked" in about.importance,
            )  # fmt: skip
        called = loss_of(about)
        found = []
        for number in self.order:
            mine = torch.where(batch.row == number, weights, 0.0)
            loss, _ = called(self.logp, self.old, self.advantages, mine, importance, batch.row)
            if terms:
                loss = loss + about.kl * (mine * algorithms.kl(self.logp, self.first, about.kl_estimator)).sum()
                loss = loss - about.entropy * (mine * self.entropy).sum()
            found.append(loss)
        return torch.stack(found)

    def actor(self) -> Any:
        about = self.config.algorithm
        return configs.ActorConfig(
            strategy="fsdp", rollout_n=1, use_dynamic_bsz=True, clip_ratio_low=about.clip_low,
            clip_ratio_high=about.clip_high, clip_ratio_c=about.dual_clip or float("inf"),
            policy_loss=configs.PolicyLossConfig(loss_mode=loss_mode(self.config)), use_kl_loss=about.kl > 0,
            kl_loss_coef=about.kl, kl_loss_type=about.kl_estimator, entropy_coeff=about.entropy,
        )  # fmt: skip

    def of_verl_losses(self, ranks: int, *imitation: tuple[dict[str, Any], torch.Tensor]) -> list[tuple[Any, Any]]:
        """Of each rank, by the function that its process calls, on rows as verl keeps them; ``imitation``: rows
        and the log-probs of their responses."""
        given, factors = self.of_verl()
        wanted = {"old_log_probs": self.rows(self.old), "advantages": given, "rollout_is_weights": factors}
        wanted |= {"votes": self.weights, "ref_log_prob": self.rows(self.first), "imitated": torch.zeros_like(given)}
        logp, entropy, made = self.rows(self.logp), self.rows(self.entropy), []
        for n, fields in enumerate(self.fields):
            length = len(fields["responses"])
            kept = {name: fields[name] for name in ("prompts", "responses", "response_mask")}
            kept |= {name: value[n, :length] for name, value in wanted.items()}
            made.append((kept, logp[n, :length], entropy[n, :length]))
        for fields, own in imitation:
            made.append(({name: fields[name] for name in made[0][0]}, own, torch.ones_like(own)))
        found = []
        for rank in range(ranks):
            mine = made[rank::ranks]
            data = tensordicts.list_of_dict_to_tensordict([fields for fields, _, _ in mine])
            for name, value in (("dp_size", ranks), ("batch_num_tokens", int(self.mask.sum()))):
                tensordicts.assign_non_tensor_data(data, name, value)
            output = {
                "log_probs": said([(len(fields["prompts"]), logp) for fields, logp, _ in mine]),
                "entropy": said([(len(fields["prompts"]), entropy) for fields, _, entropy in mine]),
            }
            found.append(formulas.loss(self.actor(), output, data))
        return found


def said(values: Sequence[tuple[int, torch.Tensor]]) -> torch.Tensor:
    """Log-probs of responses in verl's layout, one position before the token; each as (length of the prompt, (T,))."""
    whole = [torch.cat([torch.zeros(start - 1), row, torch.zeros(1)]) for start, row in values]
    return torch.nested.as_nested_tensor(whole, layout=torch.jagged)


@pytest.fixture(params=CONFIGS)
def both(request: pytest.FixtureRequest) -> Both:
    return Both(CONFIGS[request.param], seed=3)


def test_queue_entry_fields(both: Both) -> None:
    for number, fields, tag in zip(both.order, both.fields, both.tags, strict=True):
        path = both.local.sequences[number]
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
    torch.testing.assert_close(given, both.rows(both.advantages), rtol=0, atol=1e-6)
    assert given.any()


def test_loss_of_each_sequence(both: Both) -> None:
    given, factors = both.of_verl()
    logp, old, mask = both.rows(both.logp), both.rows(both.old), both.mask
    losses = [
        formulas.policy_loss(
            old_log_prob=old[n : n + 1], log_prob=logp[n : n + 1], advantages=given[n : n + 1],
            response_mask=mask[n : n + 1], config=both.actor(), votes=both.weights[n : n + 1],
            rollout_is_weights=factors[n : n + 1],
        )[0]
        for n in range(len(mask))
    ]  # fmt: skip
    theirs, ours = torch.stack(losses), both.local_losses(terms=False)
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-6)
    a, b = (torch.autograd.grad(x.sum(), both.logp, retain_graph=True)[0] for x in (theirs, ours))
    torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
    assert a.any()


@pytest.mark.parametrize("ranks", [1, 2])
def test_loss_through_verl(both: Both, ranks: int) -> None:
    """The mean over ranks is the loss of the batch; so are its gradients."""
    found = both.of_verl_losses(ranks)
    theirs, ours = torch.stack([loss for loss, _ in found]).mean(), both.local_losses().sum()
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-6)
    for tensor in (both.logp, both.entropy):
        a, b = (torch.autograd.grad(x, tensor, retain_graph=True, allow_unused=True)[0] for x in (theirs, ours))
        a, b = (torch.zeros_like(tensor) if x is None else x for x in (a, b))
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
        assert a.any() == (tensor is both.logp or both.config.algorithm.entropy > 0)
    entropy = sum(metrics["actor/entropy"].aggregate() for _, metrics in found) / ranks
    assert entropy == pytest.approx(float(both.entropy.detach().mean()), abs=1e-6)


@pytest.mark.parametrize("ranks", [1, 2])
def test_imitation_adds_mean_cross_entropy(ranks: int) -> None:
    both = Both({}, seed=3)
    paths = [
        MaskedSequence((5, 6, 7, 8), (0, 0, 1, 1)),
        MaskedSequence((5, 6, 7, 8, 9), (0, 1, 0, 1, 1)),
        MaskedSequence((4, 3), (0, 1)),
    ]
    logps = [torch.randn(len(path.ids) - path.mask.index(1)).requires_grad_() for path in paths]
    count = sum(sum(path.mask) for path in paths)
    made = [rows.imitation_entry(path, 0.4 / count) for path in paths]
    found = both.of_verl_losses(ranks, *zip(made, logps, strict=True))
    theirs = torch.stack([loss for loss, _ in found]).mean()
    masks = [torch.tensor(path.mask[path.mask.index(1) :]) for path in paths]
    away = -torch.stack([(logp * mask).sum() for logp, mask in zip(logps, masks, strict=True)]).sum() / count
    ours = both.local_losses().sum() + 0.4 * away
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-6)
    for tensor in (*logps, both.logp):
        a, b = (torch.autograd.grad(x, tensor, retain_graph=True)[0] for x in (theirs, ours))
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
    seen = sum(metrics["actor/imitation"].aggregate() for _, metrics in found) / ranks
    assert seen == pytest.approx(0.4 * float(away.detach()), abs=1e-6)
    apart = sum(metrics["actor/pg_loss"].aggregate() for _, metrics in found) / ranks
    assert apart == pytest.approx(float(both.local_losses(terms=False).sum().detach()), abs=1e-6)


@pytest.mark.parametrize(
    "name", ["integrated", "kl and entropy", "k3", "gspo", "cispo", "constant length", "taught", "taught alone"]
)
def test_local_trainer_has_same_loss_and_gradient(name: str, tmp_path: Path) -> None:
    """The local trainer's loss of a model equals verl's loss of that model's log-probs."""
    both = Both({"guards": {"max_kl": 1e9}, **CONFIGS[name]}, seed=3)
    learner = start(make_tiny_model(tmp_path / "model", spread=0.05), both.config)
    model: Any = learner.policy.module
    with torch.no_grad():
        for number, weight in enumerate(model.parameters()):
            weight += 0.02 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(number))

    def says(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """(S,) log-probs and entropies."""
        found = []
        for path in both.local.sequences:
            logp = model(torch.tensor([path.ids])).logits[0, :-1].log_softmax(-1)
            trained = torch.tensor(path.mask[1:]).bool()
            own = logp.gather(1, torch.tensor(path.ids[1:])[:, None])[:, 0]
            found.append(torch.stack([own[trained], -(logp.exp() * logp).sum(-1)[trained]]))
        return torch.cat(found, 1).unbind()

    both.logp, both.entropy = says(model)
    if both.config.algorithm.old == "recompute":
        both.old = both.logp.detach()
    if learner.policy.reference is not None:
        both.first = says(learner.policy.reference)[0].detach()
    ((loss, seen),) = both.of_verl_losses(1)
    gradient = torch.autograd.grad(loss, list(model.parameters()))
    metrics = learner.train_step(both.local, seed=0)
    assert seen["actor/pg_loss"].aggregate() == pytest.approx(metrics["actor/pg_loss"], abs=1e-5)
    norm = float(torch.stack([each.norm() for each in gradient]).norm())
    assert 0 < norm == pytest.approx(metrics["actor/grad_norm"], rel=1e-4)
    shown = ["actor/ref_kl"] if both.config.algorithm.kl else []
    if name != "taught alone":  # there the local trainer leaves out the sequences that have no teacher
        shown.append("actor/entropy")
    for one in shown:
        assert 0 < seen[one].aggregate() == pytest.approx(metrics[one], abs=1e-5)


@given(ranks=st.integers(1, 4), cut=st.integers(1, 3), size=st.integers(1, 5), share=st.integers(0, 3))
def test_interleave_gives_each_mini_batch_of_each_rank_its_share(ranks: int, cut: int, size: int, share: int) -> None:
    own = [("row", n) for n in range(ranks * cut * size)]
    others = [[(n, place) for place in range(ranks * share)] for n in range(cut)]
    found = rows.interleave(own, others, ranks)
    assert [one for one in found if one[0] == "row"] == own
    assert len(set(found)) == len(found) == len(own) + cut * ranks * share
    piece = len(found) // (ranks * cut)
    for number in range(ranks * cut):
        mine = found[number * piece : (number + 1) * piece]
        assert sum(one[0] == "row" for one in mine) == size
        assert {one[0] for one in mine} <= {"row", number % cut}


def test_token_weights_of_mini_batches() -> None:
    whole, cut = Both({}, seed=3), Both({"algorithm": {"minibatches": 4}}, seed=3)
    for one in (whole, cut):
        one.of_verl()
    torch.testing.assert_close(cut.weights, 4 * whole.weights)
