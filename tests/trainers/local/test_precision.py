"""Training in bfloat16: small updates accumulate, and engine and trainer stay close."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from clawgym.engines.load import load_model
from clawgym.engines.protocol import GenerateRequest, Sampling
from clawgym.engines.tiny import make_tiny_model
from clawgym.errors import MissingDependency
from clawgym.records import TrainingSequence
from clawgym.trainers.batching import MaskedSequence
from clawgym.trainers.common.batch import TrainingBatch, make_batch
from clawgym.trainers.common.checkpoints import Checkpoints, Progress
from clawgym.trainers.common.policy import load_policy
from clawgym.trainers.config import TrainConfig
from clawgym.trainers.local.learner import Learner
from clawgym.trainers.local.main import train

from ..batches import batch_of, episode_of
from ..runs import Said, small

ROWS = [MaskedSequence((9, 10, 11, 40, 41), (0, 0, 0, 1, 1)), MaskedSequence((9, 12, 13, 50), (0, 0, 0, 1))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("m") / "model", spread=0.05)


def start(folder: Path, **parts: Any) -> Learner:
    model = {"dtype": "bfloat16", **parts.pop("model", {})}
    about = TrainConfig.model_validate({"model": model, **parts})
    return Learner(load_policy(about.model, folder, about.compute), about, lr=parts.get("sft", {}).get("lr"))


async def rolled_out(learner: Learner, about: TrainConfig) -> TrainingBatch:
    """A batch that an engine of the policy sampled."""
    engine = learner.policy.engine(kernels=about.compute.kernels)
    await learner.policy.publish(engine, 0)
    members = []
    for number in range(4):
        prompt = (9, 300, 400 + number // 2)
        given = Sampling(max_tokens=12, seed=number)
        stream = engine.generate(GenerateRequest(prompt, given, adapter=learner.policy.adapter))
        said = [tokens async for tokens in stream]
        new = [token for tokens in said for token in tokens.ids]
        logprobs = tuple(value for tokens in said for value in tokens.logprobs)
        count = len(new)
        mask = (0, 0, 0, *[1] * count)
        row = TrainingSequence((0,), (*prompt, *new), mask, logprobs, (0,) * count, (0,) * count)
        members.append(episode_of(number, float(number % 2), [row]))
    await engine.aclose()
    return make_batch(batch_of([members[:2], members[2:]]), about, seed=0)


@pytest.mark.parametrize("lora", [None, {"rank": 4}])
async def test_engine_and_trainer_probabilities_are_close(folder: Path, lora: Any) -> None:
    about = TrainConfig.model_validate({"model": {"dtype": "bfloat16", "lora": lora}, "optimizer": {"lr": 1e-3}})
    learner = Learner(load_policy(about.model, folder, about.compute), about)
    assert learner.policy.module.get_input_embeddings().weight.dtype == torch.bfloat16
    before = {name: tensor.clone() for name, tensor in learner.policy.trained().items()}
    metrics = learner.train_step(await rolled_out(learner, about), seed=0)
    assert metrics["training/rollout_probs_diff"] < 1e-4  # a probability is about 2e-3; in float32 it is below 1e-6
    assert metrics["actor/grad_norm"] > 0
    assert any(not torch.equal(before[name], tensor) for name, tensor in learner.policy.trained().items())


async def test_kernels_in_bfloat16_round_updates_as_they_round_samples(folder: Path) -> None:
    given = {"optimizer": {"lr": 1e-3}, "algorithm": {"old": "rollout"}}
    about = TrainConfig.model_validate({**given, "compute": {"kernels": "bfloat16"}})
    learner = Learner(load_policy(about.model, folder, about.compute), about)
    batch = await rolled_out(learner, about)
    metrics = learner.train_step(batch, seed=0)
    assert learner.policy.module.get_input_embeddings().weight.dtype == torch.float32
    exact = TrainConfig.model_validate(given)
    plain = Learner(load_policy(exact.model, folder, exact.compute), exact).train_step(batch, seed=0)
    assert 0 < metrics["training/rollout_probs_diff"] < 1e-4
    assert plain["actor/grad_norm"] != metrics["actor/grad_norm"] == pytest.approx(plain["actor/grad_norm"], rel=0.02)


def test_small_updates_accumulate_in_bfloat16(folder: Path) -> None:
    about: dict[str, Any] = {"sft": {"lr": 1e-5, "warmup": 1, "decay": False}}
    gained = []
    for dtype in ("bfloat16", "float32"):
        learner = start(folder, model={"dtype": dtype}, **about)
        losses = [learner.imitate(ROWS, step=0, steps=1)["sft/loss"] for _ in range(40)]
        gained.append(losses[0] - losses[-1])
    assert gained[0] == pytest.approx(gained[1], rel=0.3)


def test_resume_from_checkpoint_is_exact(folder: Path, tmp_path: Path) -> None:
    about: dict[str, Any] = {"sft": {"lr": 2e-5, "warmup": 1, "steps": 20}}
    whole, first, second = (start(folder, **about) for _ in range(3))
    for step in range(6):
        whole.imitate(ROWS, step=step, steps=20)
    for step in range(3):
        first.imitate(ROWS, step=step, steps=20)
    kept = Checkpoints(tmp_path)
    second.policy.folder = folder
    second_progress = kept.load(kept.save(first.policy, first, Progress(step=3)), second.policy, second)
    assert second_progress.step == 3
    for step in range(3, 6):
        second.imitate(ROWS, step=step, steps=20)
    there = whole.policy.trained()
    assert all(torch.equal(there[name], tensor) for name, tensor in second.policy.trained().items())
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters, second.parameters, strict=True))


async def test_whole_runs(tmp_path: Path) -> None:
    model = {"dtype": "bfloat16", "scratch": small().model.scratch.model_dump()}
    sft = {"steps": 1, "batch": 4, "evaluate_every": 1}
    await train(small(model=model, sft=sft), tmp_path / "sft", "sft", view=Said())
    model = {"dtype": "bfloat16", "path": str(tmp_path / "sft")}
    await train(small(model=model, budget={"steps": 1}), tmp_path / "rl", view=Said())
    (row,) = map(json.loads, (tmp_path / "rl/metrics.jsonl").read_text().splitlines())
    assert row["training/rollout_probs_diff"] < 2e-3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_engine_and_trainer_agree_on_four_bits(folder: Path, dtype: str) -> None:
    """They share the weights, which must not change under either, on a CPU that would pack them too."""
    pytest.importorskip("bitsandbytes")
    about = TrainConfig.model_validate(
        {"model": {"dtype": dtype, "quantize": "4bit", "lora": {"rank": 4}}, "optimizer": {"lr": 1e-3}}
    )
    learner = Learner(load_policy(about.model, folder, about.compute), about)
    layer = learner.policy.module.get_base_model().model.layers[0].mlp.up_proj.base_layer
    assert layer.weight.dtype == torch.uint8
    packed = layer.weight.data.clone()
    for step in range(2):
        metrics = learner.train_step(await rolled_out(learner, about), seed=step)
        assert metrics["training/rollout_probs_diff"] < (1e-7 if dtype == "float32" else 1e-4)
        assert metrics["actor/grad_norm"] > 0
    assert torch.equal(layer.weight.data, packed)


def test_an_engine_loads_the_weights_that_training_has(folder: Path) -> None:
    """The processes of a service load them separately."""
    pytest.importorskip("bitsandbytes")
    about = small(model={"path": str(folder), "quantize": "4bit", "lora": {"rank": 2}})
    trained = load_policy(about.model, folder, about.compute).module.get_base_model()
    served = load_model(folder, None, torch.float32, quantize="4bit")
    ids = torch.tensor([[9, 10, 11, 40]])
    with torch.no_grad():
        assert torch.equal(trained(input_ids=ids).logits, served(input_ids=ids).logits)
        plain = load_model(folder, None, torch.float32)
        assert not torch.allclose(plain(input_ids=ids).logits, served(input_ids=ids).logits, atol=1e-3)


def test_quantized_weights_need_their_package(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(MissingDependency, match=r"pip install 'clawgym\[quantized\]'"):
        load_model(folder, None, None, quantize="4bit")
