"""Changing weights and adapters while the transformers engine runs: no stream mixes two versions."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from clawgym.engines import _crew  # noqa: E402
from clawgym.engines._kernels import adds_int8_exactly  # noqa: E402
from clawgym.engines.protocol import GenerateRequest, Sampling  # noqa: E402
from clawgym.engines.tiny import make_tiny_model  # noqa: E402
from clawgym.engines.transformers import TransformersEngine  # noqa: E402
from clawgym.errors import EngineError  # noqa: E402

from .exact import assert_exact, log_softmax, sampled, until  # noqa: E402

PROMPT = [1, 300, 400, 11, 2, 12, 1, 500, 12] * 6


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def loaded(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The same model with other weights, three times."""
    root = tmp_path_factory.mktemp("tiny")
    return [make_tiny_model(root / str(seed), seed=seed) for seed in range(3)]


@pytest.fixture(scope="module")
def plain(folders: list[Path]) -> list[Any]:
    return [loaded(folder) for folder in folders]


@pytest.fixture(scope="module")
def lora(folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, Any]]:
    """Three adapters of the first model: folder, and the model that peft makes of it."""
    return [made_lora(folders[0], tmp_path_factory.mktemp("lora"), seed) for seed in range(3)]


def made_lora(folder: Path, into: Path, seed: int, **settings: Any) -> tuple[Path, Any]:
    peft = pytest.importorskip("peft")
    torch.manual_seed(seed)
    chosen = {
        "r": 4,
        "lora_alpha": 16,
        "target_modules": ["q_proj", "v_proj", "down_proj"] if seed else "all-linear",
        "init_lora_weights": False,
        "use_rslora": seed == 2,
        **settings,
    }
    model = peft.get_peft_model(loaded(folder), peft.LoraConfig(task_type="CAUSAL_LM", **chosen)).eval()
    model.save_pretrained(into)
    return into, model


@pytest_asyncio.fixture
async def engine(folders: list[Path]) -> AsyncIterator[TransformersEngine]:
    made = TransformersEngine(folders[0])
    yield made
    await made.aclose()


async def test_new_weights_from_each_source(engine: TransformersEngine, folders: list[Path], plain: list[Any]) -> None:
    for version, source in ((1, folders[1]), (2, plain[2].state_dict()), (3, str(folders[0]))):
        await engine.update_weights(source, version)
        got = await sampled(engine, PROMPT, max_tokens=20)
        assert got.versions == {version} == {engine.policy_version}
        assert got.cached == 0  # what other weights computed is gone
        assert_exact(plain[version % 3], PROMPT, got)
        assert (await sampled(engine, PROMPT, max_tokens=1)).cached > 0


async def test_streams_finish_on_the_weights_they_began_with(engine: TransformersEngine, folders, plain) -> None:
    seen: list[tuple[Any, list[int]]] = []

    async def one(index: int) -> None:
        prompt = PROMPT[: 5 + index]
        await asyncio.sleep(index * 0.01)
        seen.append((await sampled(engine, prompt, max_tokens=20 + 10 * (index % 5)), prompt))

    async def change() -> None:
        for version in range(1, 6):
            await asyncio.sleep(0.05)
            await engine.update_weights(folders[version % 3], version)

    await asyncio.gather(change(), *(one(i) for i in range(40)))
    assert len(seen) == 40
    for got, prompt in seen:
        assert len(got.versions) == 1
        assert_exact(plain[got.versions.pop() % 3], prompt, got)


async def test_nothing_begins_while_new_weights_wait(engine: TransformersEngine, folders, plain) -> None:
    long = asyncio.ensure_future(sampled(engine, PROMPT, max_tokens=200))
    await until(lambda: engine.occupancy()["running"] == 1)
    change = asyncio.ensure_future(engine.update_weights(folders[1], 1))
    await asyncio.sleep(0)  # it reads the folder in a thread
    later = asyncio.ensure_future(sampled(engine, PROMPT, max_tokens=3))
    await asyncio.gather(long, change, later)
    assert (await long).versions == {0}
    assert_exact(plain[0], PROMPT, await long)
    after = await sampled(engine, PROMPT, max_tokens=3)
    assert after.versions == {1}


async def test_weights_that_do_not_fit_change_nothing(
    engine: TransformersEngine, plain: list[Any], tmp_path: Path
) -> None:
    state = dict(plain[1].state_dict())
    name = "model.layers.0.self_attn.q_proj.weight"
    other = make_tiny_model(tmp_path / "other", hidden=32)
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"no")
    for source, message in (
        ({**state, "extra": torch.zeros(1)}, "no weight 'extra'"),
        ({**state, name: torch.zeros(3, 3)}, r"q_proj.weight has the shape \(3, 3\)"),
        ({k: v for k, v in state.items() if k != name}, "1 weights are missing"),
        (other, "the weights of this model"),
        (tmp_path / "empty", "no safetensors"),
        (tmp_path / "broken", "model.safetensors: cannot be read"),
    ):
        with pytest.raises(EngineError, match=message):
            await engine.update_weights(source, 7)
    got = await sampled(engine, PROMPT, max_tokens=5)
    assert got.versions == {0}
    assert_exact(plain[0], PROMPT, got)


async def test_failed_weight_change_blocks_requests_until_weights_are_set(
    engine: TransformersEngine, folders: list[Path], plain: list[Any]
) -> None:
    def half(model: Any) -> None:
        with torch.no_grad():
            next(model.parameters()).mul_(2)
        raise ValueError("the optimizer gave up")

    with pytest.raises(ValueError, match="gave up"):
        await engine.update_weights(half, 1)
    with pytest.raises(EngineError, match="half changed") as caught:
        await sampled(engine, PROMPT, max_tokens=2)
    assert caught.value.retryable
    await engine.update_weights(folders[1], 2)
    got = await sampled(engine, PROMPT, max_tokens=2)
    assert got.versions == {2}
    assert_exact(plain[1], PROMPT, got)


async def test_a_module_shared_with_a_trainer(folders: list[Path]) -> None:
    model = loaded(folders[0])
    attention = model.config._attn_implementation
    with pytest.raises(EngineError, match="tokenizer"):
        TransformersEngine(model)
    engine = TransformersEngine(model, tokenizer=folders[0])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    try:
        for version in range(1, 4):
            got = await sampled(engine, PROMPT, max_tokens=30)

            def train(module: Any, got: Any = got) -> None:
                module.train()
                ids = torch.tensor([PROMPT + got.ids, PROMPT + got.ids])  # the batched, masked path of training
                module(ids, attention_mask=torch.ones_like(ids), labels=ids).loss.backward()
                optimizer.step()
                optimizer.zero_grad()

            before = log_softmax(model, PROMPT)
            assert_exact(model, PROMPT, got)
            await engine.update_weights(train, version)
            assert not model.training
            assert not torch.allclose(before, log_softmax(model, PROMPT), atol=1e-3)
        got = await sampled(engine, PROMPT, max_tokens=30)
        assert got.versions == {3}
        assert_exact(model, PROMPT, got)
    finally:
        await engine.aclose()
    assert model.config._attn_implementation == attention


@pytest.mark.parametrize("threads", [1, 3])
async def test_adapters_side_by_side(
    folders: list[Path], plain: list[Any], lora: list[Any], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_crew, "WORTH", 1.0)  # so that steps of this small model are divided among the threads
    divided: list[int] = []
    run = _crew.Crew.map
    monkeypatch.setattr(_crew.Crew, "map", lambda crew, do, parts: divided.append(len(parts)) or run(crew, do, parts))
    before = torch.get_num_threads()
    engine = TransformersEngine(folders[0], threads=threads)
    try:
        await adapters_side_by_side(engine, plain, lora)
    finally:
        await engine.aclose()
        torch.set_num_threads(before)
    assert max(divided, default=1) == threads


async def adapters_side_by_side(engine: TransformersEngine, plain: list[Any], lora: list[Any]) -> None:
    for index, (folder, _) in enumerate(lora):
        await engine.load_adapter(f"a{index}", folder, 10 + index)
    assert engine.adapters == {"a0": 10, "a1": 11, "a2": 12}
    names = [None, "a0", "a1", "a2"] * 3
    results = await asyncio.gather(
        *(sampled(engine, PROMPT, max_tokens=10 + 3 * i, seed=i, adapter=n) for i, n in enumerate(names))
    )
    models = {None: plain[0], **{f"a{i}": model for i, (_, model) in enumerate(lora)}}
    for name, got in zip(names, results, strict=True):
        assert got.versions == {engine.adapters[name] if name else 0}
        assert_exact(models[name], PROMPT, got)
    again = [await sampled(engine, PROMPT, max_tokens=2, adapter=n) for n in names[:4]]
    for name, got in zip(names, again, strict=False):
        assert got.cached == 48
        assert_exact(models[name], PROMPT, got)


@pytest.mark.parametrize("kernels", ["bfloat16", "int8"])
async def test_layers_with_an_adapter_beside_rounded_ones(folders, lora, kernels: Any) -> None:
    if kernels == "int8" and not adds_int8_exactly():
        pytest.skip("this CPU has no VNNI")
    engine = TransformersEngine(folders[0], kernels=kernels)
    try:
        for index, (folder, model) in enumerate(lora):
            await engine.load_adapter(f"a{index}", folder, 1)
            got = await sampled(engine, PROMPT, max_tokens=20, adapter=f"a{index}")
            rows = log_softmax(model, [*PROMPT, *got.ids])[len(PROMPT) - 1 : -1]
            want = rows.gather(1, torch.tensor(got.ids)[:, None])[:, 0]
            assert 1e-5 < float((want - torch.tensor(got.logprobs)).abs().mean()) < 0.1
    finally:
        await engine.aclose()


async def test_an_adapter_is_replaced_while_it_runs(engine: TransformersEngine, lora: list[Any]) -> None:
    await engine.load_adapter("policy", lora[0][0], 1)
    old = engine.generate(GenerateRequest(PROMPT, Sampling(max_tokens=300), adapter="policy"))
    begun = await anext(aiter(old))
    state = {k: v for k, v in lora[1][1].state_dict().items() if ".lora_" in k}  # with the adapter's name inside
    await engine.load_adapter("policy", state, 2, config={"lora_alpha": 16, "r": 4})
    new = await sampled(engine, PROMPT, max_tokens=5, adapter="policy")
    assert engine.occupancy()["running"] == 1  # nobody waited for anybody
    assert new.versions == {2}
    assert new.cached == 0
    assert_exact(lora[1][1], PROMPT, new)
    pieces = [begun, *[tokens async for tokens in old]]
    assert {p.policy_version for p in pieces} == {1}
    new.ids = [i for p in pieces for i in p.ids]
    new.logprobs = [x for p in pieces for x in p.logprobs]
    assert len(new.ids) == 300
    assert_exact(lora[0][1], PROMPT, new)


async def test_unloading(engine: TransformersEngine, lora: list[Any]) -> None:
    await engine.load_adapter("policy", lora[0][0], 1)
    running = asyncio.ensure_future(sampled(engine, PROMPT, max_tokens=100, adapter="policy"))
    await until(lambda: engine.occupancy()["running"] == 1)
    await engine.unload_adapter("policy")
    with pytest.raises(EngineError, match="no adapter 'policy'"):
        await sampled(engine, PROMPT, adapter="policy")
    with pytest.raises(EngineError, match="no adapter 'policy'"):
        await engine.unload_adapter("policy")
    assert_exact(lora[0][1], PROMPT, await running)


async def test_adapters_that_would_not_be_exact_are_refused(
    engine: TransformersEngine, folders: list[Path], lora: list[Any], tmp_path: Path
) -> None:
    peft_state = {k: v for k, v in lora[1][1].state_dict().items() if ".lora_" in k}
    config = {"lora_alpha": 16}
    some = next(iter(peft_state))
    wider = make_tiny_model(tmp_path / "wider", hidden=96)
    for source, given, message in (
        (tmp_path, None, "not a LoRA adapter that peft saved"),
        (peft_state, None, "no lora_alpha"),
        ({}, config, "holds no weights"),
        (peft_state, {**config, "bias": "all"}, "bias='all'"),
        (peft_state, {**config, "alpha_pattern": {"q_proj": 1}}, "alpha_pattern"),
        ({**peft_state, "x.lora_magnitude_vector": torch.zeros(1)}, config, "no LoRA weight of a linear layer"),
        ({k: v for k, v in peft_state.items() if k != some}, config, "has only lora_B"),
        ({k.replace("layers.1", "layers.9"): v for k, v in peft_state.items()}, config, "no linear layer"),
        (made_lora(wider, tmp_path / "l", 1)[0], None, "this adapter was trained for"),
        (made_lora(folders[0], tmp_path / "d", 1, use_dora=True)[0], None, "use_dora=True"),
    ):
        with pytest.raises(EngineError, match=message):
            await engine.load_adapter("x", source, 1, config=given)
    assert engine.adapters == {}
    with pytest.raises(EngineError, match="use load_adapter"):
        await engine.update_weights(lora[0][0], 1)


# Other models

SMALL = {"vocab_size": 128, "max_position_embeddings": 256}
USUAL = {
    **SMALL,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def of_config(name: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**settings)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("Llama", USUAL),
        ("Qwen2", USUAL),
        ("Mistral", {**USUAL, "sliding_window": None}),
        ("Qwen3Moe", {**USUAL, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
        ("GPT2", {"vocab_size": 128, "n_positions": 256, "n_embd": 32, "n_layer": 2, "n_head": 4}),
    ],
)
async def test_other_models_run_exactly(name: str, config: dict[str, Any]) -> None:
    model = of_config(name, **config)
    engine = TransformersEngine(model, tokenizer="none", prefill_chunk=20)
    rng = random.Random(1)
    prompts = [[rng.randrange(128) for _ in range(n)] for n in (1, 9, 50, 120)]
    try:
        results = await asyncio.gather(*(sampled(engine, p, max_tokens=25) for p in prompts))
        for prompt, got in zip(prompts, results, strict=True):
            assert_exact(model, prompt, got)
    finally:
        await engine.aclose()


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("Mistral", {**USUAL, "sliding_window": 8}, "sliding"),
        ("Gemma2", {**USUAL, "head_dim": 8}, "sliding_attention"),
        ("Gemma2", {**USUAL, "head_dim": 8, "layer_types": ["full_attention"] * 2}, "softcap"),
        ("Mamba", {"vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 2}, "full attention"),
        ("Bloom", {"vocab_size": 128, "hidden_size": 32, "n_layer": 2, "n_head": 4}, "full attention"),
        (
            "Llama",
            {**USUAL, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "dynamic positions",
        ),
    ],
)
def test_models_that_would_not_be_exact_are_refused(name: str, config: dict[str, Any], message: str) -> None:
    model = of_config(name, **config)
    attention = model.config._attn_implementation
    with pytest.raises(EngineError, match=message):
        TransformersEngine(model, tokenizer="none")
    assert model.config._attn_implementation == attention


def test_what_cannot_be_loaded_is_named(tmp_path: Path, folders: list[Path]) -> None:
    with pytest.raises(EngineError, match="cannot be loaded"):
        TransformersEngine(tmp_path)
    for nowhere in (tmp_path / "nowhere", str(tmp_path / "nowhere"), "./nowhere"):
        with pytest.raises(EngineError, match="no such folder"):
            TransformersEngine(nowhere)
    with pytest.raises(EngineError, match="no causal language model"):
        TransformersEngine(torch.nn.Linear(2, 2), tokenizer="none")
    for wrong in ({"max_batch": 0}, {"prefill_chunk": 0}, {"kv_tokens": 0}, {"context_window": 10**9}):
        with pytest.raises(EngineError, match=next(iter(wrong))):
            TransformersEngine(folders[0], **wrong)  # type: ignore[arg-type]
