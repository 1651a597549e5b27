"""What the trainer ``tinker`` refuses before anything runs. tests/interop/test_tinker.py trains, with the packages."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from clawgym.errors import TrainingError
from clawgym.trainers.config import TrainConfig
from clawgym.trainers.protocols import train
from clawgym.trainers.tinker.settings import check_supported, lora_of, loss_settings

MODEL = {"path": "Qwen/Qwen3-8B", "lora": {"rank": 8}}


def config(**parts: Any) -> TrainConfig:
    return TrainConfig.model_validate({"trainer": "tinker", "model": MODEL, **parts})


def test_supported() -> None:
    check_supported(config())
    check_supported(config(algorithm={"loss": "cispo", "advantage": "rloo", "old": "rollout", "imitation": 0.1}))


@pytest.mark.parametrize(
    ("parts", "named"),
    [
        ({"model": {}}, "model.scratch"),
        ({"model": {"path": "x"}}, "model.lora"),
        ({"model": {"path": "x", "lora": {"alpha": 16}}}, "model.lora.alpha"),
        ({"model": {"path": "x", "lora": {"targets": ["q_proj"]}}}, "model.lora.targets"),
        ({"model": {**MODEL, "quantize": "4bit"}}, "model.quantize"),
        ({"rollout": {"temperature": 0.7}}, "rollout.temperature"),
        ({"algorithm": {"loss": "gspo"}}, "algorithm.loss"),
        ({"algorithm": {"loss": "math:exp"}}, "algorithm.loss"),
        ({"algorithm": {"dual_clip": 3.0}}, "algorithm.dual_clip"),
        ({"algorithm": {"kl": 0.1}}, "algorithm.kl"),
        ({"algorithm": {"entropy": 0.1}}, "algorithm.entropy"),
        ({"algorithm": {"advantage": "gae"}}, "algorithm.advantage"),
        ({"distillation": {"hints": 1}, "reward": {"judge": "policy"}}, "distillation.hints"),
    ],
)
async def test_refused_by_name_before_anything_runs(parts: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=f"^{re.escape(named)}: not supported by trainer: tinker: "):
        await train(config(**parts), tmp_path / "run")
    assert not (tmp_path / "run").exists()


async def test_method_and_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    with pytest.raises(TrainingError, match="no method 'sft': use trainer: local"):
        await train(config(), tmp_path / "run", "sft")
    with pytest.raises(TrainingError, match="set the environment variable TINKER_API_KEY"):
        await train(config(), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_lora() -> None:
    def of(*targets: str) -> Any:
        return lora_of(config(model={"path": "x", "lora": {"rank": 4, "targets": targets}}).model)

    attention, mlp = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
    assert of(*attention, *mlp) == {"rank": 4, "train_attn": True, "train_mlp": True, "train_unembed": False}
    assert of(*mlp, "lm_head") == {"rank": 4, "train_attn": False, "train_mlp": True, "train_unembed": True}
    assert of(*attention, "up_proj") is None


def test_bounds_of_the_ratio() -> None:
    assert loss_settings(config(algorithm={"clip_low": 0.25, "clip_high": 0.5})) == {
        "clip_low_threshold": 0.75,
        "clip_high_threshold": 1.5,
    }
    cispo = config(algorithm={"loss": "cispo", "loss_options": {"cap": 3.0}})
    assert loss_settings(cispo) == {"clip_low_threshold": 0.0, "clip_high_threshold": 3.0}
