"""Adapters that a vLLM server samples by, beside the trainer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clawgym.engines.tiny import make_tiny_model
from clawgym.errors import TrainingError
from clawgym.pool import Pool
from clawgym.trainers.config import load_config
from clawgym.trainers.local.main import plan, train

from ...engines.real_vllm import needs_vllm, serving
from .runs import Said, small


@needs_vllm
@pytest.mark.timeout(900)
@pytest.mark.parametrize("staleness", [0, 1])
async def test_a_run_samples_by_what_it_has_learnt(tmp_path: Path, staleness: int) -> None:
    folder = make_tiny_model(tmp_path / "model", spread=0.05)
    with serving(folder) as address:
        about = small(
            model={"path": str(folder), "lora": {"rank": 4}, "context_window": 1024},
            rollout={"groups": 2, "group_size": 2, "concurrency": 8, "staleness": staleness},
            optimizer={"lr": 3e-2},
            compute={"threads": 1, "row_tokens": 256, "micro_tokens": 1024, "vllm": address},
        )
        out = tmp_path / "run"
        await train(about, out, "rl", view=Said())
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["staleness/max"] for row in rows] == [0.0] * 3 if not staleness else [row["step"] for row in rows]
    if not staleness:  # the first update is of the weights that sampled, the others are of what was learnt since
        assert all(row["training/rollout_probs_diff"] < 1e-5 for row in rows)
    with Pool(out / "pool.db") as pool:
        for episode in pool.episodes(channel="train", state="closed"):
            assert {turn.policy_version for turn in pool.turns(episode.id)} <= {0, 1, 2, 3}
    assert not (out / "adapters").exists()


def test_it_is_for_adapters() -> None:
    with pytest.raises(TrainingError, match=r"compute\.vllm.*model\.lora"):
        load_config("tiny-cpu", ["compute.vllm=http://127.0.0.1:1/v1"])


def test_its_memory_is_not_the_trainers(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model")
    model = {"path": str(folder), "lora": {"rank": 4}}
    alone = plan(small(model=model), "rl", tmp_path / "run")["memory_bytes"]
    beside = plan(small(model=model, compute={"vllm": "http://127.0.0.1:1/v1"}), "rl", tmp_path / "run")["memory_bytes"]
    assert set(alone) - set(beside) == {"weights of the engine", "keys and values of rollouts"}
