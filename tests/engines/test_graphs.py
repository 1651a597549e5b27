"""Decoding by recorded steps is exact. Without a GPU a step is computed again where a graph would be replayed; all that
is around the graph is the same."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from clawgym.engines import _batch  # noqa: E402
from clawgym.engines._graphs import DecodeGraphs  # noqa: E402
from clawgym.engines._lean import Lean  # noqa: E402
from clawgym.engines.tiny import make_tiny_model  # noqa: E402
from clawgym.engines.transformers import TransformersEngine  # noqa: E402

from .exact import assert_exact, sampled, until  # noqa: E402
from .test_transformers import prompt_of  # noqa: E402


class Recomputed(DecodeGraphs):
    """What a graph does, without one. Counts what it records."""

    captures = 0

    @classmethod
    def of(cls, run: Any, model: Any, device: Any) -> DecodeGraphs | None:
        return cls(run, model) if isinstance(run, Lean) and run.fixed else None

    def _capture(self, step: Callable[[], Any], device: Any) -> tuple[Callable[[], Any], Any]:
        type(self).captures += 1
        logits = step()
        return lambda: logits.copy_(step()), logits


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def plain(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)


@pytest.fixture(params=["recomputed", "cuda"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("no GPU")
        yield "cuda"
    else:
        monkeypatch.setattr(_batch, "DecodeGraphs", Recomputed)
        Recomputed.captures = 0
        yield "cpu"


WORK = [(n % 7 * 40 + 1, n % 5 * 17 + 1) for n in range(40)]
"""Tokens of a prompt, and of its reply: more rows than a slab begins with, and two capacities."""


async def play(engine: TransformersEngine, plain: Any, work: list[tuple[int, int]]) -> None:
    prompts = [prompt_of(length, seed) for seed, (length, _) in enumerate(work)]
    asked = [sampled(engine, prompt, max_tokens=work[n][1], seed=n) for n, prompt in enumerate(prompts)]
    for prompt, got in zip(prompts, await asyncio.gather(*asked), strict=True):
        assert_exact(plain, prompt, got)


async def test_it_is_exact_while_rows_come_and_go(folder: Path, plain: Any, device: str) -> None:
    engine = TransformersEngine(folder, device=device)
    try:
        await play(engine, plain, WORK)
        recorded = Recomputed.captures
        await play(engine, plain, WORK[::-1])
        assert Recomputed.captures == recorded, "a second round of the same work records nothing new"
        assert device == "cuda" or 0 < recorded <= 4
    finally:
        await engine.aclose()


async def test_prompts_of_all_lengths_after_a_known_prefix_are_exact(folder: Path, plain: Any, device: str) -> None:
    """On a GPU torch's attention has a special case for the last of 32 n + 1 queries."""
    engine = TransformersEngine(folder, device=device)
    try:
        known = prompt_of(48)
        await sampled(engine, known, max_tokens=1)
        longer = [known + prompt_of(more, more) for more in range(1, 100)]
        asked = [sampled(engine, prompt, max_tokens=2, seed=n) for n, prompt in enumerate(longer)]
        for prompt, got in zip(longer, await asyncio.gather(*asked), strict=True):
            assert_exact(plain, prompt, got)
    finally:
        await engine.aclose()


async def test_new_weights_are_used_and_damaged_ones_leave_nothing(folder: Path, plain: Any, device: str) -> None:
    engine = TransformersEngine(folder, device=device)
    try:
        await play(engine, plain, WORK[:9])
        good = {name: p.clone() for name, p in plain.state_dict().items()}
        await engine.update_weights({name: p * float("nan") for name, p in good.items()}, 1)
        for asked in await asyncio.gather(
            *(sampled(engine, prompt_of(9, i), max_tokens=3) for i in range(3)), return_exceptions=True
        ):
            assert "not finite" in str(asked)
        await engine.update_weights(good, 2)
        await play(engine, plain, WORK[:9])

        def moved(model: Any) -> None:
            for parameter in model.parameters():
                parameter.data = parameter.data.clone()

        await engine.update_weights(moved, 3)
        await play(engine, plain, WORK[:9])
    finally:
        await engine.aclose()


async def test_little_memory_frees_the_rows_that_nobody_uses(folder: Path, plain: Any, device: str) -> None:
    engine = TransformersEngine(folder, device=device, kv_tokens=3000, max_batch=4)
    try:
        await play(engine, plain, WORK)
        await until(lambda: engine.occupancy()["running"] == 0)
        await play(engine, plain, [(700, 5), (2, 40), (900, 3)])
    finally:
        await engine.aclose()


async def test_requests_with_an_adapter_run_beside_it(folder: Path, plain: Any, device: str) -> None:
    layer = "model.layers.0.self_attn.q_proj"
    width, out = plain.get_submodule(layer).in_features, plain.get_submodule(layer).out_features
    torch.manual_seed(0)
    pair = {f"{layer}.lora_A.weight": torch.randn(2, width), f"{layer}.lora_B.weight": torch.randn(out, 2)}
    engine = TransformersEngine(folder, device=device)
    try:
        prompt = prompt_of(20)
        await engine.load_adapter("a", pair, 1, config={"r": 2, "lora_alpha": 2})
        base, other, again = await asyncio.gather(
            sampled(engine, prompt, max_tokens=20, seed=1),
            sampled(engine, prompt, max_tokens=20, seed=1, adapter="a"),
            sampled(engine, prompt, max_tokens=20, seed=1),
        )
        assert_exact(plain, prompt, base)
        assert base.ids == again.ids
        assert base.logprobs != other.logprobs
    finally:
        await engine.aclose()
