"""Makes run folders of training runs with a tiny model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

HASH = "5" * 64


def train_run(folder: Path, model: Path, **config: Any) -> Path:
    """Make a run with checkpoints at steps 2 and 4. The one at step 2 is the best, and was evaluated."""
    manifest = {
        "kind": "train",
        "task_set": {"name": "ClawGym-Train", "version": "abc", "hash": HASH, "size": 1},
        "tasks": {"one": {"hash": "1" * 64, "verifier": "2" * 64}},
        "engine": {"model": str(model)},
        "seed": 7,
        "config": {"algorithm": "grpo", "optimizer": {"lr": 1e-5}, "output": str(folder), **config},
        "library": "0.1.0",
        "created": "2026-01-02T03:04:05+00:00",
    }
    folder.mkdir(parents=True)
    (folder / "receipt.json").write_text(json.dumps(manifest))
    rows = [{"step": n, "time": float(n), "loss": 1.0 / n, "reward_mean": n / 5} for n in range(1, 5)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 5, "ti')
    scores = [
        {"step": step, "task_set": name, "split": "held-out", "score": score, "low": score - 0.1, "high": score + 0.1}
        | {"episodes": 200, "samples": 1}
        for name in ("ClawGym-Bench", "terminal-basic")
        for step, score in ((0, 0.125), (2, 0.625), (4, 0.5))
    ]
    (folder / "evaluations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in scores))
    for step in (2, 4):
        place = folder / "checkpoints" / f"{step:06d}"
        shutil.copytree(model, place / "model")
        (place / "state.json").write_text("{}")
        for name in ("optimizer.pt", "pytorch_model.bin", "optimizer.safetensors", "training_args.bin"):
            (place / "model" / name).write_bytes(b"\x80\x04stays")
    (folder / "checkpoints/best").write_text("000002\n")
    (folder / "checkpoints/last").write_text("000004\n")
    return folder


def lora_run(folder: Path, model: Path) -> Path:
    """Like :func:`train_run`, with LoRA adapters that change the outputs of the model."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    train_run(folder, model)
    settings: Any = LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    adapted: Any = get_peft_model(AutoModelForCausalLM.from_pretrained(model), settings)
    torch.manual_seed(0)
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight)
    for step in (2, 4):
        place = folder / "checkpoints" / f"{step:06d}"
        shutil.rmtree(place / "model")
        adapted.save_pretrained(place / "adapter")
    return folder
