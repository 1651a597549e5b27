"""The estimate of memory, beside the tensors that exist while a model is trained."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from clawgym.engines.tiny import make_tiny_model
from clawgym.trainers.common.batch import TrainingBatch, make_batch
from clawgym.trainers.common.memory import ModelShape, estimate
from clawgym.trainers.common.policy import load_policy
from clawgym.trainers.config import TrainConfig, load_config
from clawgym.trainers.local.learner import Learner

from ..batches import batch_of, episode_of, sample_of
from ..live_tensors import LiveTensors

MICRO = 512


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("m") / "model", hidden=128, layers=4)


def two_micro_batches(config: TrainConfig) -> TrainingBatch:
    """Two groups of eight with a common prompt. Each is a packed row that fills a micro-batch."""
    rng = random.Random(0)

    def ids(count: int) -> list[int]:
        return [rng.randrange(9, 600) for _ in range(count)]

    groups = []
    for group in range(2):
        prompt, mask, logprobs = ids(128), [0] * 128 + [1] * 48, [-6.0] * 48
        rows = [sample_of([*prompt, 100 + n, *ids(47)], mask, logprobs) for n in range(8)]
        groups.append([episode_of(8 * group + n, float(n % 2), [row]) for n, row in enumerate(rows)])
    return make_batch(batch_of(groups), config, seed=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora", [None, {"rank": 8}])
@pytest.mark.parametrize("checkpointing", [False, True])
async def test_estimate_is_peak_of_an_update(folder: Path, dtype: str, lora: Any, checkpointing: bool) -> None:
    config = TrainConfig.model_validate(
        {
            "model": {"path": str(folder), "dtype": dtype, "lora": lora},
            "compute": {"micro_tokens": MICRO, "row_tokens": MICRO, "checkpointing": checkpointing},
            "algorithm": {"old": "rollout"},
            "guards": {"max_kl": 1e9},
        }
    )
    learner = Learner(load_policy(config.model, folder, config.compute), config)
    engine = learner.policy.engine()
    known = [*learner.policy.module.parameters(), *learner.parameters, *engine._model.parameters()]
    batch = two_micro_batches(config)
    assert [len(row.ids) for row in batch.rows] == [MICRO, MICRO]
    expected = estimate(ModelShape.of(config.model, folder), config)
    with LiveTensors(known) as live:
        learner.train_step(batch, seed=0)  # allocates the moments
        before = live.restart()
        learner.train_step(batch, seed=1)
        assert live.peak == pytest.approx(expected.update, rel=0.1)
        assert live.restart() == pytest.approx(before, rel=0.01)  # gradients are freed
        await learner.policy.publish(engine, 1)
        assert live.peak <= before + (3 * expected.items["weights of the engine"] if lora else 0)  # two adapters
    await engine.aclose()


QWEN3 = {  # hidden, inner, layers, heads, tied: of the published configurations
    "0.6B": (1024, 3072, 28, 16, True),
    "1.7B": (2048, 6144, 28, 16, True),
    "4B": (2560, 9728, 36, 32, True),
    "8B": (4096, 12288, 36, 32, False),
}
PEAKS = {"0.6B": (14, 5), "1.7B": (36, 9), "4B": (80, 17), "8B": (164, 29)}
"""GB without keys and values, with all weights and with LoRA, as in docs/results/training.md."""


def test_keys_and_values_of_bfloat16_kernels_take_half(folder: Path) -> None:
    kept = {}
    for kernels in ("float32", "bfloat16", "int8"):
        config = TrainConfig.model_validate(
            {"name": "x", "model": {"path": str(folder)}, "compute": {"kernels": kernels}}
        )
        kept[kernels] = estimate(ModelShape.of(config.model, folder), config).items["keys and values of rollouts"]
    assert kept["int8"] == kept["float32"] == 2 * kept["bfloat16"]


@pytest.mark.parametrize("name", QWEN3)
def test_estimate_of_qwen3(name: str, tmp_path: Path) -> None:
    from transformers import Qwen3Config

    hidden, inner, layers, heads, tied = QWEN3[name]
    Qwen3Config(
        vocab_size=151936,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=tied,
    ).save_pretrained(tmp_path)
    found = []
    for lora in ("null", "{rank: 16, alpha: 32}"):
        config = load_config("one-gpu-4b-lora", [f"model.lora={lora}"])
        about = estimate(ModelShape.of(config.model, tmp_path), config)
        found.append(round(about.update / 1e9))
    assert tuple(found) == PEAKS[name]
