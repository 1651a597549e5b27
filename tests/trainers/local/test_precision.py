"""Training in bfloat16: small updates accumulate, and engine and trainer stay close."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from clawgym.engines.protocol import GenerateRequest, Sampling
from clawgym.engines.tiny import make_tiny_model
from clawgym.errors import EngineError, TrainingError
from clawgym.records import TrainingSequence
from clawgym.trainers.batching import MaskedSequence
from clawgym.trainers.common import policy
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


@pytest.mark.parametrize("quantize", ["4bit", "8bit"])
def test_quantized_weights_are_loaded(quantize: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stops before loading, so bitsandbytes is not required."""
    asked: list[Any] = []

    def load(auto: Any, where: Any, **options: Any) -> Any:
        asked.append(options["quantization_config"])
        raise EngineError("stop")

    monkeypatch.setitem(sys.modules, "bitsandbytes", ModuleType("bitsandbytes"))
    monkeypatch.setattr(policy, "load_weights", load)
    about = small(model={"path": str(folder), "quantize": quantize, "lora": {"rank": 2}, "dtype": "bfloat16"})
    with pytest.raises(TrainingError, match="stop"):
        load_policy(about.model, folder, about.compute)
    (given,) = asked
    assert (given.load_in_4bit, given.load_in_8bit) == (quantize == "4bit", quantize == "8bit")
    if quantize == "4bit":
        assert (given.bnb_4bit_quant_type, given.bnb_4bit_compute_dtype) == ("nf4", torch.bfloat16)
