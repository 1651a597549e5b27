"""The learner on two ranks of verl, on CPUs, against the local one: the same batch gives the same adapter."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from clawgym.engines.tiny import make_tiny_model
from clawgym.errors import InfraError, TrainingError
from clawgym.rewards.scoring import ScoreRequest
from clawgym.trainers.common.batch import make_batch
from clawgym.trainers.common.checkpoints import Checkpoints, Progress
from clawgym.trainers.common.policy import Policy, load_policy
from clawgym.trainers.config import TrainConfig
from clawgym.trainers.local.learner import Learner
from clawgym.trainers.verl.learner import RankedLearner, RankedPolicy, open_ranks

from .test_parity import some, teachers_of

pytest.importorskip("verl")

pytestmark = pytest.mark.timeout(900)
LR, TOLERANCE = 1e-3, 1e-5
"""An update moves a weight by about the learning rate. Two summation orders differ by much less."""
METHODS: dict[str, dict[str, Any]] = {
    "binary": {"algorithm": {"advantage": "binary", "old": "rollout"}},
    "opd": {"algorithm": {"advantage": "binary"}, "distillation": {"hints": 1, "w_rl": 0.0}},
    "combined": {
        "algorithm": {"advantage": "binary", "minibatches": 2, "epochs": 2},
        "distillation": {"hints": 1, "w_rl": 0.6, "w_opd": 0.8},
        "optimizer": {"warmup": 3},
    },
}


def config(**parts: Any) -> TrainConfig:
    about: dict[str, Any] = {
        "trainer": "verl",
        "verl": {"engine": "transformers", "ranks": 2},
        "model": {"lora": {"rank": 4, "alpha": 8}},
        "reward": {"judge": "policy"},
        "compute": {"micro_tokens": 64},
        "guards": {"max_kl": 1e9},
        **parts,
    }
    about["optimizer"] = {"lr": LR, **about.get("optimizer", {})}
    about["algorithm"] = {"kl": 0.1, **about.get("algorithm", {})}
    return TrainConfig.model_validate(about)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose head has weights of its own, as those of large models have."""
    where = make_tiny_model(tmp_path_factory.mktemp("m") / "model", spread=0.05)
    from transformers import AutoModelForCausalLM

    tied = AutoModelForCausalLM.from_pretrained(where)
    tied.config.tie_word_embeddings = False
    made: Any = type(tied)(tied.config)
    made.load_state_dict(tied.state_dict())
    made.save_pretrained(where)
    return where


@pytest.fixture(scope="module")
def ranked(folder: Path) -> Iterator[RankedPolicy]:
    with open_ranks(config(), folder) as policy:
        yield policy


@pytest.fixture
def local(folder: Path, ranked: RankedPolicy) -> Policy:
    """A policy in this process, whose weights the ranks have too."""
    about = config()
    policy = load_policy(about.model, folder, about.compute, seed=about.seed)
    ranked.load(policy.trained())
    return policy


def test_a_cluster_whose_sockets_would_have_too_long_paths_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    far = tmp_path / ("far" * 30)
    far.mkdir()
    monkeypatch.setenv("RAY_TMPDIR", str(far))
    with (
        pytest.raises(TrainingError, match="Set RAY_TMPDIR to a folder with a shorter path"),
        open_ranks(config(), folder),
    ):
        pass
    assert not list(far.iterdir())


def apart(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def test_the_first_adapter_is_that_of_the_seed(folder: Path, ranked: RankedPolicy) -> None:
    about = config()
    assert apart(load_policy(about.model, folder, about.compute, seed=about.seed).trained(), ranked.trained()) == 0


@pytest.mark.parametrize("method", METHODS)
def test_the_same_batch_gives_the_same_adapter(
    method: str, local: Policy, ranked: RankedPolicy, tmp_path: Path
) -> None:
    """In two steps, with a checkpoint of either one between them that the other takes up."""
    about = config(**METHODS[method])
    start = {name: weight.clone() for name, weight in local.trained().items()}
    learners: list[Any] = [Learner(local, about), RankedLearner(ranked, about)]
    for step in range(2):
        data = some(3 + step)
        teachers = teachers_of(data, 3 + step) if about.distillation.hints else {}
        batch = make_batch(data, about, seed=5, teachers=teachers)
        ours, theirs = (learner.train_step(batch, seed=step) for learner in learners)
        assert apart(local.trained(), ranked.trained()) < TOLERANCE, method
        assert apart(start, ranked.trained()) > LR / 2
        for name in ("actor/grad_norm", "actor/lr", "actor/pg_loss", "opd/tokens_taught_frac"):
            assert theirs[name] == pytest.approx(ours[name], abs=1e-4), name
        assert learners[0].updates == learners[1].updates > 0
        if step == 0:
            folders = []
            for learner, name in zip(learners, ("local", "ranked"), strict=True):
                store = Checkpoints(tmp_path / name)
                folders.append(store.save(learner.policy, learner, Progress(step=1)))
            names = [sorted(str(file.relative_to(one)) for file in one.rglob("*") if file.is_file()) for one in folders]
            assert names[0] == names[1]
            first, second = (json.loads((one / "adapter/adapter_config.json").read_text()) for one in folders)
            assert {n for n in first if first[n] != second.get(n)} <= {"base_model_name_or_path"}
            learners = [Learner(local, about), RankedLearner(ranked, about)]
            for learner, taken in zip(learners, reversed(folders), strict=True):
                Checkpoints(tmp_path).load(taken, learner.policy, learner)


async def test_scores_are_those_of_the_policy(local: Policy, ranked: RankedPolicy) -> None:
    with torch.no_grad():
        for name, weight in local.module.named_parameters():
            if "lora_B" in name:
                weight.normal_(0, 0.3)
    ranked.load(local.trained())
    requests = [ScoreRequest(range(9, 9 + n), range(20, 20 + m), 3) for n, m in ((5, 4), (9, 2), (30, 7), (3, 1))]
    requests.append(ScoreRequest((9,), (10,) * 40_000, 3))  # more than the model can read
    ours, theirs = [await policy.scorer(tokens=64).score(requests) for policy in (local, ranked)]
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=0, atol=1e-5)
        assert (one.top_ids == other.top_ids).all()


def test_an_adapter_of_another_shape_is_refused(ranked: RankedPolicy) -> None:
    weights = ranked.trained()
    with pytest.raises(ValueError, match="other weights"):
        ranked.load({name: weight[:1] for name, weight in weights.items()})


def test_an_infinite_gradient_changes_nothing(local: Policy, ranked: RankedPolicy) -> None:
    about = config(algorithm={"advantage": "binary", "old": "rollout"})
    learner, before = RankedLearner(ranked, about), ranked.trained()
    batch = make_batch(some(1), about, seed=5)
    batch.advantages.fill_(float("inf"))
    with pytest.raises(TrainingError, match=r"gradient is NaN or infinite.*lower optimizer\.lr"):
        learner.train_step(batch, seed=0)
    assert apart(before, ranked.trained()) == 0


def test_a_failed_rank_is_an_infrastructure_error(ranked: RankedPolicy) -> None:
    with pytest.raises(InfraError, match="start the training again"):
        ranked.call("restore_optimizer", {"no number": torch.zeros(1)})
    assert asyncio.run(ranked.scorer(tokens=64).score([])) == []
