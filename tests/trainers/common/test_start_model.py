"""The model that a run starts from."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from clawgym.engines.tiny import make_tiny_model
from clawgym.errors import TrainingError
from clawgym.trainers.common.checkpoints import Checkpoints, Progress
from clawgym.trainers.common.policy import load_policy
from clawgym.trainers.common.start_model import base_folder, given_model
from clawgym.trainers.local.learner import Learner
from clawgym.trainers.local.main import plan, train

from ..runs import Said, small


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("m") / "model", spread=0.05)


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> tuple[Path, torch.Tensor]:
    """A run with LoRA adapters, and the logits of its best checkpoint."""
    run = tmp_path_factory.mktemp("runs") / "lora"
    config = small(model={"path": str(folder), "lora": {"rank": 2}})
    policy = load_policy(config.model, folder, config.compute)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, weight in policy.module.named_parameters():
            if "lora_" in name:
                weight.normal_(0, 0.3)
    Checkpoints(run).save(policy, Learner(policy, config), Progress(step=1, best_step=1))
    return run, logits(policy.module)


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(20, 40)[None]).logits


def test_run_starts_from_merged_adapters(adapted: tuple[Path, torch.Tensor], folder: Path, tmp_path: Path) -> None:
    run, wanted = adapted
    config = small(model={"path": str(run), "lora": {"rank": 4}})
    assert (
        plan(config, "rl", tmp_path / "next")["weights"]
        == plan(small(model={"path": str(folder)}), "rl", tmp_path)["weights"]
    )
    assert not (tmp_path / "next").exists()
    (tmp_path / "next").mkdir()
    made = base_folder(config, tmp_path / "next", (), ())
    policy = load_policy(config.model, made, config.compute)
    # Merged in one product, or added after it: rounding moves a logit by up to 2e-4, the adapters by more than 1e-2.
    torch.testing.assert_close(logits(policy.module), wanted, atol=1e-3, rtol=1e-3)
    assert (wanted - logits(load_policy(small().model, folder, config.compute).module)).abs().max() > 0.01
    assert (made / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    shutil.rmtree(run)  # the merged model is in the run's own folder
    assert [f.name for f in (tmp_path / "next").iterdir()] == ["base"]


def test_plan_is_same_before_and_after_model_is_made(tmp_path: Path, folder: Path) -> None:
    shape = json.loads((folder / "config.json").read_text())
    scratch = {
        "hidden": shape["hidden_size"], "layers": shape["num_hidden_layers"], "heads": shape["num_attention_heads"],
        "kv_heads": shape["num_key_value_heads"], "context_window": shape["max_position_embeddings"],
    }  # fmt: skip
    before, after = (
        plan(small(model=model), "rl", tmp_path)["memory_bytes"]
        for model in ({"scratch": scratch}, {"path": str(folder)})
    )
    assert before["keys and values of rollouts"] == after["keys and values of rollouts"]


def test_adapter_without_base_model_raises(tmp_path: Path, folder: Path) -> None:
    config = small(model={"path": str(folder), "lora": {"rank": 2}})
    policy = load_policy(config.model, folder, config.compute)
    Checkpoints(tmp_path / "lora").save(policy, Learner(policy, config), Progress(step=1, best_step=1))
    settings = tmp_path / "lora/checkpoints/000001/adapter/adapter_config.json"
    settings.write_text(settings.read_text().replace(str(folder), "/gone"))
    with pytest.raises(TrainingError, match=r"adapter_config\.json: its base model /gone is no folder here"):
        base_folder(small(model={"path": str(tmp_path / "lora")}), tmp_path, (), ())
    assert not (tmp_path / "base").exists()


@pytest.fixture
def hub(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The Hub's cache with ``team/tiny``; nothing else can be downloaded."""
    there = tmp_path / "cache/models--team--tiny/snapshots/0123456789abcdef0123456789abcdef01234567"
    shutil.copytree(folder, there)
    refs = tmp_path / "cache/models--team--tiny/refs"
    refs.mkdir()
    (refs / "main").write_text(there.name)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return there


def test_hub_name_resolves_to_folder(hub: Path, tmp_path: Path) -> None:
    config = small(model={"path": "team/tiny", "lora": {"rank": 2}})
    assert given_model(config) == hub
    policy = load_policy(config.model, base_folder(config, tmp_path, (), ()), config.compute)
    saved = Checkpoints(tmp_path / "run").save(policy, Learner(policy, config), Progress(step=1, best_step=1))
    assert (saved / "adapter/tokenizer.json").exists()
    assert plan(config, "rl", tmp_path / "next")["weights"] > 0


@pytest.mark.parametrize("path", ["runs/no-such-sft", "team/other"])
async def test_unknown_model_leaves_no_run_folder(hub: Path, tmp_path: Path, path: str) -> None:
    config = small(model={"path": path})
    with pytest.raises(TrainingError, match=rf"model\.path {path}: is no folder here, and the Hub does not give it"):
        await train(config, tmp_path / "run", view=Said())
    with pytest.raises(TrainingError, match="is no folder here"):
        plan(config, "rl", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_run_without_checkpoint_cannot_be_started_from(tmp_path: Path) -> None:
    (tmp_path / "receipt.json").write_text("{}")
    with pytest.raises(TrainingError, match="has no checkpoint yet"):
        given_model(small(model={"path": str(tmp_path)}))
