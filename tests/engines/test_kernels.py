"""Linear layers in lower precision: other log-probs than in float32, but those of what was computed."""

from __future__ import annotations

import asyncio
import copy
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from clawgym.engines._kernels import adds_int8_exactly, kernel_of  # noqa: E402
from clawgym.engines.tiny import make_tiny_model  # noqa: E402
from clawgym.engines.transformers import TransformersEngine, transformers_engine  # noqa: E402
from clawgym.errors import EngineError  # noqa: E402
from clawgym.trainers.config import TrainConfig  # noqa: E402

from .exact import Sampled, log_softmax, sampled  # noqa: E402

KERNELS = ("bfloat16", "int8")
APART = {"bfloat16": 0.1, "int8": 0.01}
"""Nats, for any length. The sums of bfloat16 depend on how many rows are computed together, and torch's attention takes
an approximate exponential of 8 or 16 scores at once; a last bit of float32 can decide to which of two multiples of
1/127 a number is rounded."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


class Rounded(torch.nn.Module):
    """What a linear layer computes in lower precision, by its definition."""

    def __init__(self, layer: Any, kernels: str) -> None:
        super().__init__()
        self.weight, self.bias, self.kernels = layer.weight.detach().double(), layer.bias, kernels

    def forward(self, x: Any) -> Any:
        if self.kernels == "bfloat16":
            return self.exact(x).bfloat16().float()
        x, y = self.nearest(x.double()), self.nearest(self.weight)
        return (x @ y.T).float()

    def exact(self, x: Any) -> Any:
        """Of numbers in bfloat16, the sum."""
        return x.bfloat16().double() @ self.weight.bfloat16().double().T

    def nearest(self, x: Any) -> Any:
        """Each row as multiples of 1/127 of its largest number."""
        step = x.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
        return (x / step).round() * step


class Gated(torch.nn.Module):
    """What a gated layer computes in bfloat16, by its definition: both factors are rounded, and their product."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.gate, self.up, self.down = (Rounded(x, "bfloat16") for x in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))

    def forward(self, x: Any) -> Any:
        gate = torch.nn.functional.silu(self.gate.exact(x)).bfloat16()
        return self.down(gate * self.up(x).bfloat16())


def attention_in_bfloat16(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **options: Any):
    """Of rounded queries, keys and values, by its definition; what is added up is rounded too."""
    query, key, value = (x.bfloat16().double() for x in (query, key, value))
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = query @ key.mT * scaling
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    scores = scores.masked_fill(~mask, -torch.inf)
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    out = weights.bfloat16().double() @ value / weights.sum(-1, keepdim=True)
    return out.bfloat16().float().transpose(1, 2), None


def rounded(folder: Path, kernels: str, scale: float = 1.0) -> tuple[Any, Any]:
    """The model, and one with all linear layers replaced; ``scale``: of the weights of the layers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "proj" in name:
                weight.mul_(scale)
    made = copy.deepcopy(model)
    for module in list(made.modules()):
        for name, layer in list(module.named_children()):
            if name == "mlp" and kernels == "bfloat16":
                setattr(module, name, Gated(layer))
            elif isinstance(layer, torch.nn.Linear):
                setattr(module, name, Rounded(layer, kernels))
    if kernels == "bfloat16":
        transformers.AttentionInterface.register("rounded", attention_in_bfloat16)
        made.set_attn_implementation("rounded")
    return model, made


def apart(model: Any, prompt: list[int], got: Sampled) -> float:
    """The mean difference of log-probs."""
    rows = log_softmax(model, [*prompt, *got.ids])[len(prompt) - 1 : -1]
    want = rows.gather(1, torch.tensor(got.ids)[:, None])[:, 0]
    return float((want - torch.tensor(got.logprobs)).abs().mean())


@pytest.mark.parametrize("kernels", KERNELS)
async def test_log_probs_are_those_of_the_rounded_model(folder: Path, kernels: Any) -> None:
    """However requests are batched, and after the weights have changed."""
    if kernels == "int8" and not adds_int8_exactly():
        pytest.skip("this CPU has no VNNI")
    rng = random.Random(0)
    prompts = [[rng.randrange(704) for _ in range(length)] for length in (1, 9, 70)]
    plain, reference = rounded(folder, kernels)
    engine = TransformersEngine(folder, kernels=kernels)
    try:
        assert engine.identity()["kernels"] == kernels
        results = await asyncio.gather(*(sampled(engine, p, max_tokens=30) for p in prompts))
        for prompt, got in zip(prompts, results, strict=True):
            assert apart(reference, prompt, got) < APART[kernels]
            assert apart(plain, prompt, got) > apart(reference, prompt, got)
        short = await sampled(engine, [1], max_tokens=6)
        assert apart(reference, [1], short) < 1e-4
        assert apart(plain, [1], short) > 1e-3
        other, reference = rounded(folder, kernels, 1.5)
        await engine.update_weights(dict(other.named_parameters()), 1)
        got = await sampled(engine, prompts[1], max_tokens=30)
        assert got.versions == {1}
        assert apart(reference, prompts[1], got) < APART[kernels]
    finally:
        await engine.aclose()


@pytest.mark.parametrize("rows", [1, 9, 600])
@pytest.mark.parametrize("biased", [False, True])
def test_a_layer_in_bfloat16_is_its_definition(rows: int, biased: bool) -> None:
    generator = torch.Generator().manual_seed(rows)
    x, weight, bias = (torch.randn(*shape, generator=generator) for shape in ((rows, 96), (40, 96), (40,)))
    layer = torch.nn.Linear(96, 40)
    layer.weight.data, layer.bias.data = weight, bias if biased else torch.zeros(40)
    want = Rounded(layer, "bfloat16")(x).double() + (bias.bfloat16().double() if biased else 0)
    kernel = kernel_of("bfloat16")
    got = kernel.linear(kernel.operand(x), (weight, bias if biased else None))
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, rtol=0.01, atol=0.1)


@pytest.mark.parametrize("kernels", ["float32", *KERNELS])
@pytest.mark.parametrize("rows", [1, 9, 600])
@pytest.mark.parametrize("biased", [False, True])
def test_a_gated_layer_is_its_definition(kernels: Any, rows: int, biased: bool) -> None:
    if kernels == "int8" and not adds_int8_exactly():
        pytest.skip("this CPU has no VNNI")
    generator = torch.Generator().manual_seed(rows)
    x, *pairs = (
        torch.randn(*shape, generator=generator) / shape[-1] ** 0.5
        for shape in ((rows, 96), (160, 96), (160,), (160, 96), (160,), (96, 160), (96,))
    )
    layers = [(weight, bias if biased else None) for weight, bias in zip(pairs[::2], pairs[1::2], strict=True)]
    gate, up, down = layers

    def exact(at: Any, weights: Any) -> Any:
        return torch.nn.functional.linear(at.double(), *(None if w is None else w.double() for w in weights))

    want = exact(torch.nn.functional.silu(exact(x, gate)) * exact(x, up), down)
    kernel = kernel_of(kernels)
    got = kernel.gated(kernel.operand(x), gate, up, down)
    assert got.dtype == torch.float32
    most = {"float32": 1e-6, "bfloat16": 0.02, "int8": 0.03}[kernels]
    assert float((got - want).norm() / want.norm()) < most


def test_without_matrix_instructions_bfloat16_layers_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    x, gate, up, down = (torch.randn(*s, generator=generator) / 8 for s in ((9, 64), (96, 64), (96, 64), (64, 96)))
    results = []
    for available in (True, False):
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda available=available: available)
        kernel = kernel_of("bfloat16")
        results.append(kernel.gated(kernel.operand(x), *((weight, None) for weight in (gate, up, down))))
    torch.testing.assert_close(*results, rtol=0.02, atol=0.01)


def test_kernels_are_refused_where_there_are_none(folder: Path) -> None:
    with pytest.raises(EngineError, match=r"kernels=int8: .* in torch\.bfloat16 on cpu has none"):
        TransformersEngine(folder, dtype="bfloat16", kernels="int8")
    with pytest.raises(EngineError, match=r"kernels=int8: .* has none: they are for"):
        transformers_engine(str(folder), dtype="bfloat16", kernels="int8")
    for other in ({"model": {"dtype": "bfloat16"}}, {"compute": {"kernels": "int8", "vllm": "http://127.0.0.1:1/v1"}}):
        with pytest.raises(ValidationError, match=r"compute\.kernels: are for the engine in this process"):
            TrainConfig.model_validate({"name": "x", "compute": {"kernels": "int8"}, **other})


def test_int8_is_refused_on_a_cpu_whose_sums_overflow(folder: Path) -> None:
    code = "import sys; from clawgym.engines.transformers import *; TransformersEngine(sys.argv[1], kernels='int8')"
    environ = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"}
    done = subprocess.run([sys.executable, "-c", code, str(folder)], env=environ, capture_output=True, text=True)
    assert "sums of int8 overflow on this CPU, which has no VNNI: use bfloat16" in done.stderr
