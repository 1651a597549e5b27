"""Training with a vLLM server for rollouts."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from clawgym.engines.tiny import make_tiny_model
from clawgym.errors import TrainingError
from clawgym.pool import Pool
from clawgym.trainers.common.policy import load_policy
from clawgym.trainers.config import TrainConfig, load_config
from clawgym.trainers.local.main import plan, train

from ...engines.real_vllm import Server, needs_vllm, serving, untied
from ..runs import Said, small


def beside(server: Server, folder: Path, staleness: int, *, lora: bool = True) -> TrainConfig:
    return small(
        model={"path": str(folder), "lora": {"rank": 4} if lora else None, "context_window": 1024},
        rollout={"groups": 2, "group_size": 2, "concurrency": 8, "staleness": staleness},
        optimizer={"lr": 3e-2 if lora else 1e-3},
        compute={"threads": 1, "row_tokens": 256, "micro_tokens": 1024, "vllm": server.address},
    )


def metrics(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@needs_vllm
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("lora", "staleness"), [(True, 0), (True, 1), (False, 0), (False, 1)])
async def test_run_samples_with_updated_weights(tmp_path: Path, lora: bool, staleness: int) -> None:
    folder = make_tiny_model(tmp_path / "model", spread=0.05)
    if not lora:
        untied(folder)
    out = tmp_path / "run"
    with serving(folder) as server:
        await train(beside(server, folder, staleness, lora=lora), out, "rl", view=Said())
    rows = metrics(out)
    assert [row["step"] for row in rows] == [1, 2, 3]
    behind = [row["staleness/max"] for row in rows]
    with Pool(out / "pool.db") as pool:
        delivered = [e for e in pool.episodes(channel="train", state="closed") if e.fate == "delivered"]
        versions = [{turn.policy_version for turn in pool.turns(episode.id)} for episode in delivered]
    if staleness:
        assert behind[0] == 0
        assert max(behind) == 1
        assert set().union(*versions) <= {0, 1, 2}
    else:  # only the first batch was sampled with the initial weights
        assert behind == [0, 0, 0]
        assert all(row["training/rollout_probs_diff"] < 1e-5 for row in rows)
        assert all(len(seen) == 1 for seen in versions)
        assert set().union(*versions) == {0, 1, 2}
    assert not (out / "adapters").exists()


@needs_vllm
@pytest.mark.timeout(900)
@pytest.mark.parametrize("lora", [True, False])
async def test_run_survives_server_restart(tmp_path: Path, lora: bool) -> None:
    folder = make_tiny_model(tmp_path / "model", spread=0.05)
    if not lora:
        untied(folder)
    out = tmp_path / "run"
    with serving(folder) as server:
        running = asyncio.create_task(train(beside(server, folder, 0, lora=lora), out, "rl", view=Said()))
        while not (out / "metrics.jsonl").exists():
            assert not running.done(), running
            await asyncio.sleep(0.1)
        server.kill()
        with serving(folder, port=server.port):
            progress = await running
    assert progress.step == 3
    rows = metrics(out)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(row["training/rollout_probs_diff"] < 1e-5 for row in rows)


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        (["compute.vllm=http://a/v1", "trainer=demo"], r"is for trainer: local: leave it out"),
        (["compute.vllm=http://a/v1", "compute.sglang=http://a"], r"leave one of them out"),
        (["compute.sglang=http://a", "model.lora={rank: 4}"], r"leave out model\.lora, or set compute\.vllm"),
        (["compute.sleep=true"], r"set compute\.vllm or compute\.sglang, or leave it out"),
    ],
)
def test_settings_of_servers_are_checked(settings: list[str], advice: str) -> None:
    with pytest.raises(TrainingError, match=advice):
        load_config("tiny-cpu", settings)


@pytest.mark.parametrize("kept", ["", "model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight"])
async def test_server_that_keeps_old_weights_is_refused(tmp_path: Path, kept: str) -> None:
    """The engine in this process stands for the server, and keeps one weight."""
    folder = make_tiny_model(tmp_path / "model")
    policy = load_policy(small().model, folder, small().compute)
    before = {name: weight.clone() for name, weight in policy.trained().items()}
    engine = policy.engine()
    update = engine.update_weights

    async def keeping(weights: Any, version: int) -> None:
        await update({name: before[name] if name == kept else weight for name, weight in weights.items()}, version)

    engine.update_weights = keeping  # type: ignore[method-assign]
    if kept in before:
        with pytest.raises(TrainingError, match=r"does not sample with all weights.*leave out the server$"):
            await policy.check_loading(engine)
    else:
        await policy.check_loading(engine)
    await engine.aclose()
    assert all(torch.equal(before[name], weight) for name, weight in policy.trained().items())


def test_server_memory_is_not_planned(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model")
    model = {"path": str(folder), "lora": {"rank": 4}}
    alone = plan(small(model=model), "rl", tmp_path / "run")["memory_bytes"]
    beside = plan(small(model=model, compute={"vllm": "http://127.0.0.1:1/v1"}), "rl", tmp_path / "run")["memory_bytes"]
    assert set(alone) - set(beside) == {"weights of the engine", "keys and values of rollouts"}
