"""The check of a loaded model tells a wrong kernel from rounding, in float32 and in bfloat16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from clawgym.engines import load
from clawgym.engines.tiny import make_tiny_model
from clawgym.errors import EngineError

FIRST, SECOND = [[7 * i + j for i in range(9)] for j in (3, 5)]


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """28 layers with large logits, as a real model has them."""
    return make_tiny_model(tmp_path_factory.mktemp("m") / "deep", layers=28, spread=0.35)


def compared(model: Any, first: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probs in pieces, for a history that begins with ``first``; plain ones; and those without a history."""
    load.register_attention()
    shape = load.KVShape(28, 2, 32, model.dtype, torch.device("cpu"))
    model.set_attn_implementation(load.ATTENTION)
    found = load._in_pieces(load._running(model), shape, first, SECOND)
    model.set_attn_implementation("sdpa")
    plain = load._wanted(*(load._log_probs(model, [x]) for x in (FIRST, SECOND)))
    alone = load._wanted(*(load._log_probs(model, [[i] for i in x]) for x in (FIRST, SECOND)))
    return found, plain, alone


@torch.inference_mode()
def test_bfloat16_rounds_by_more_than_a_fifth_and_is_accepted(deep: Path) -> None:
    """The rounding of all weights and layers is more than that of another order of sums."""
    rounded, _, _ = compared(load.load_model(deep, "cpu", torch.bfloat16), FIRST)
    _, plain, alone = compared(load.load_model(deep, "cpu", torch.float32), FIRST)
    assert (rounded - plain).exp().sub(1).abs().max() > 0.2
    assert load.rounding_exceeded(torch.bfloat16, rounded, plain, alone) is None
    assert load.rounding_exceeded(torch.float32, rounded, plain, alone) is not None
    assert load.prepare(load.load_model(deep, "cpu", torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_one_wrong_token_in_the_history_is_found(deep: Path, dtype: torch.dtype) -> None:
    model = load.load_model(deep, "cpu", dtype)
    found, plain, alone = compared(model, [FIRST[0] + 1, *FIRST[1:]])
    assert load.rounding_exceeded(dtype, found, plain, alone) is not None


def test_nan_is_refused() -> None:
    plain = torch.zeros(3, 4).log_softmax(-1)
    for dtype in (torch.float32, torch.bfloat16):
        assert load.rounding_exceeded(dtype, plain * float("nan"), plain, plain)


@torch.inference_mode()
def test_model_whose_attention_forgets_is_refused(deep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece sees only itself."""
    prefill = load.Prefill
    monkeypatch.setattr(load, "Prefill", lambda buffer, start, count, at: prefill(buffer, 0, count, at))
    with pytest.raises(EngineError, match=r"nats of the .* of its history"):
        load.prepare(load.load_model(deep, "cpu", torch.bfloat16))
