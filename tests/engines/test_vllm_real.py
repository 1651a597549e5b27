"""The vLLM engine on a real vLLM server, beside the transformers engine, on the same weights.

Runs where ``CLAWGYM_VLLM`` is the python of an environment with vLLM; ``docs/how-to/engines.md`` says how to make one.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from clawgym.engines.protocol import GenerateRequest, Sampling
from clawgym.engines.tiny import make_tiny_model
from clawgym.engines.vllm import VLLMEngine
from clawgym.errors import ContextLengthExceeded, EngineError, TrainingError

from .exact import assert_exact, sampled
from .real_vllm import needs_vllm, serving, untied

pytestmark = [
    needs_vllm,
    pytest.mark.timeout(600),
]
PROMPT = [1, 300, 400, 11, 2, 12, 1, 500, 12] * 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def plain(folder: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[str]:
    with serving(folder, "--served-model-name", "tiny") as server:
        yield server.address


@pytest_asyncio.fixture
async def engine(server: str, folder: Path) -> AsyncIterator[VLLMEngine]:
    made = VLLMEngine(server, "tiny", tokenizer=str(folder), patience=400)
    await made.ready()
    yield made
    await made.aclose()


async def test_ids_and_logprobs_are_exact(engine: VLLMEngine, plain: Any) -> None:
    rng = random.Random(0)
    prompts = [[rng.randrange(704) for _ in range(n)] for n in (1, 20, 300, 900)]
    assert engine.context_window == 4096
    for temperature in (1.0, 0.6):
        results = await asyncio.gather(*(sampled(engine, p, temperature=temperature, max_tokens=40) for p in prompts))
        for prompt, got in zip(prompts, results, strict=True):
            assert len(got.ids) == 40
            assert_exact(plain, prompt, got, temperature)


async def test_greedy_is_what_the_transformers_engine_gives(engine: VLLMEngine, folder: Path, plain: Any) -> None:
    from clawgym.engines.transformers import TransformersEngine

    ours = TransformersEngine(folder)
    try:
        theirs = await sampled(engine, PROMPT, temperature=0, max_tokens=60)
        mine = await sampled(ours, PROMPT, temperature=0, max_tokens=60)
    finally:
        await ours.aclose()
    assert theirs.ids == mine.ids
    assert_exact(plain, PROMPT, mine, 0)


async def test_ends(engine: VLLMEngine) -> None:
    free = await sampled(engine, PROMPT, seed=3, max_tokens=20)
    assert free.finish_reason == "length"
    stop = free.ids[9]
    stopped = await sampled(engine, PROMPT, seed=3, max_tokens=20, stop_ids=frozenset({stop}))
    assert stopped.finish_reason == "stop"
    assert stopped.ids == free.ids[: free.ids.index(stop) + 1]
    assert len(stopped.logprobs) == len(stopped.ids)
    assert stopped.cached > 0
    with pytest.raises(ContextLengthExceeded):
        await sampled(engine, [5] * 4096)
    with pytest.raises(EngineError, match="vocabulary"):
        await sampled(engine, [99999], max_tokens=2)


async def test_a_cut_choice_has_no_logprobs(engine: VLLMEngine) -> None:
    got = await sampled(engine, PROMPT, top_k=3, max_tokens=5)
    assert (len(got.ids), got.logprobs) == (5, [])


async def test_adapters(engine: VLLMEngine, folder: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    engine.shared = tmp_path / "adapters"
    for version in (1, 2, 3):
        torch.manual_seed(version)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
        about = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        model = peft.get_peft_model(model, about).eval()
        weights = peft.get_peft_model_state_dict(model)
        await engine.load_adapter("policy", weights, version, config=about.to_dict())
        got = await sampled(engine, PROMPT, max_tokens=20, adapter="policy")
        assert_exact(model, PROMPT, got)
    wide = peft.LoraConfig(r=32, lora_alpha=8, target_modules=["q_proj"]).to_dict()
    weights = {
        name: tensor.repeat(8, 1) if "lora_A" in name else tensor.repeat(1, 8) for name, tensor in weights.items()
    }
    with pytest.raises(EngineError, match="max-lora-rank"):
        await engine.load_adapter("policy", weights, 4, config=wide)


async def test_all_weights_in_place(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    folder = untied(make_tiny_model(tmp_path / "model"))
    with serving(folder, "--served-model-name", "tiny") as server:
        engine = VLLMEngine(server.address, "tiny", tokenizer=str(folder), patience=400, shared=tmp_path / "shared")
        await engine.ready()
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
        for version in (1, 2):
            old, model = model, transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
            torch.manual_seed(version)
            with torch.no_grad():
                for weight in model.parameters():
                    weight.add_(torch.randn_like(weight) * 0.05)
            running = asyncio.create_task(sampled(engine, PROMPT, max_tokens=200))
            await asyncio.sleep(0.5)
            await engine.update_weights({name: p.detach() for name, p in model.named_parameters()}, version)
            assert_exact(old, PROMPT, await running)
            assert_exact(model, PROMPT, await sampled(engine, PROMPT, max_tokens=20))  # no prefix of old weights
            assert engine.policy_version == version
        await engine.aclose()


async def test_tied_output_layer_is_refused(engine: VLLMEngine, folder: Path, tmp_path: Path) -> None:
    """On a CPU, vLLM 0.31 keeps a packed copy of it. Leaves the server with its first weights."""
    policy_module = pytest.importorskip("clawgym.trainers.common.policy")
    config = pytest.importorskip("clawgym.trainers.config")
    policy = policy_module.load_policy(config.Model(), folder, config.Compute(device="cpu"))
    engine.shared = tmp_path / "shared"
    with pytest.raises(TrainingError, match="does not sample with all weights"):
        await policy.check_loading(engine)
    await engine.update_weights(policy.trained(), 0)


async def test_leaving_early_leaves_the_server_in_order(engine: VLLMEngine, plain: Any) -> None:
    for _ in range(5):
        tokens = engine.generate(GenerateRequest(PROMPT, Sampling(max_tokens=2000)))
        await anext(tokens)
        await tokens.aclose()
    assert_exact(plain, PROMPT, await sampled(engine, PROMPT, max_tokens=5))
