from __future__ import annotations

from pathlib import Path

import peft
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from clawgym.engines.tiny import make_tiny_model
from clawgym.trainers.verl.merging import merge_adapters


def test_merged_folder_equals_model_with_adapters(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "tiny")
    plain = AutoModelForCausalLM.from_pretrained(folder)
    about = peft.LoraConfig(r=4, lora_alpha=12, target_modules=["q_proj", "down_proj"])
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(folder), about)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.normal_(std=0.1)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    names = sorted(weights)
    (folder / "model.safetensors").unlink()
    for number in range(2):  # the matrices of an adapter may be in different files
        save_file({name: weights[name] for name in names[number::2]}, folder / f"model-{number}.safetensors")
    (folder / "model.safetensors.index.json").write_text("{}")
    merge_adapters(folder, 12 / 4)
    ids = torch.tensor([[20, 30, 40, 50]])
    with torch.no_grad():
        read = AutoModelForCausalLM.from_pretrained(folder)(ids).logits
        torch.testing.assert_close(read, model(ids).logits, rtol=1e-4, atol=1e-4)
        assert (read - plain(ids).logits).abs().max() > 0.01
