"""The vision engine samples exactly as the model does for the same ids and images."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawgym.engines.protocol import GenerateRequest, Image, Sampling, TokenEngine, Tokens
from clawgym.engines.tiny import SPECIAL_TOKENS, VISION_TOKENS, make_tiny_model
from clawgym.errors import ContextLengthExceeded, EngineError

PIL = pytest.importorskip("PIL.Image")
torch = pytest.importorskip("torch")
vision = pytest.importorskip("clawgym.engines.vision")

START, END, PAD = (len(SPECIAL_TOKENS) + n for n in range(3))
SHOWN = (START, PAD, END)
PROMPT = (1, 300, *SHOWN, 301, 302, *SHOWN, 303)


def picture(seed: int, width: int = 320, height: int = 240) -> Image:
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    PIL.fromarray(pixels).save(buffer, "PNG")
    return Image(hashlib.sha256(buffer.getvalue()).hexdigest(), buffer.getvalue())


ONE, OTHER = picture(1), picture(2, 200, 400)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "sees", vision=True)


@pytest.fixture
async def engine(folder: Path) -> Any:
    made = vision.VisionEngine(folder)
    yield made
    await made.aclose()


async def said(engine: Any, ids: Any = PROMPT, images: Any = (ONE, OTHER), **settings: Any) -> list[Tokens]:
    sampling = Sampling(**{"max_tokens": 6, "seed": 3, **settings})
    return [tokens async for tokens in engine.generate(GenerateRequest(ids, sampling, images=images))]


def whole(engine: Any, ids: list[int], images: Any) -> Any:
    """Log-probabilities of each next id, from one pass over all of them."""
    features, counts = engine.images(images)
    given = torch.tensor([vision.expanded(ids, counts, engine.placeholder)])
    engine._model.model.rope_deltas = None
    with torch.no_grad():
        out = engine._model(input_ids=given, mm_token_type_ids=(given == engine.placeholder).int(), **features)
    return out.logits[0].log_softmax(-1)


async def test_log_probs_are_those_of_one_pass(engine: Any) -> None:
    assert isinstance(engine, TokenEngine)
    tokens = await said(engine)
    ids = [token for piece in tokens for token in piece.ids]
    assert [piece.finish_reason for piece in tokens] == [None] * 5 + ["length"]
    logprobs = whole(engine, [*PROMPT, *ids], (ONE, OTHER))[-len(ids) - 1 : -1]
    expected = logprobs[range(len(ids)), ids].tolist()
    assert [piece.logprobs[0] for piece in tokens] == pytest.approx(expected, abs=1e-5)


async def test_weights_have_the_type_that_is_asked_for(folder: Path) -> None:
    for asked, held in ((None, "float32"), (torch.bfloat16, "bfloat16"), ("float16", "float16")):
        made = vision.VisionEngine(folder, dtype=asked)
        assert made.identity()["dtype"] == held
        await made.aclose()


async def test_images_and_their_order_matter_and_nothing_else_does(engine: Any) -> None:
    first = await said(engine)
    assert await said(engine) == first
    swapped = await said(engine, images=(OTHER, ONE))
    assert swapped[0].logprobs != first[0].logprobs
    without = await said(engine, ids=(1, 300, 301), images=())
    assert len(without) == 6
    assert await said(engine) == first, "something of another sequence was left"


async def test_it_ends_where_it_is_told_to(engine: Any) -> None:
    ids = [piece.ids[0] for piece in await said(engine)]
    stop = frozenset({ids[2]})
    got = [
        t async for t in engine.generate(GenerateRequest(PROMPT, Sampling(seed=3), stop_ids=stop, images=(ONE, OTHER)))
    ]
    assert [piece.ids[0] for piece in got] == ids[: ids.index(ids[2]) + 1]
    assert got[-1].finish_reason == "stop"
    stream = engine.generate(GenerateRequest(PROMPT, Sampling(), images=(ONE, OTHER)))
    await anext(stream)
    await stream.aclose()
    assert await said(engine)


async def test_a_place_for_an_image_is_never_sampled(engine: Any) -> None:
    head = engine._model.get_output_embeddings().weight
    (likeliest,) = await said(engine, max_tokens=1, temperature=0.0)
    with torch.no_grad():
        head[engine.placeholder] = 4 * head[likeliest.ids[0]]
    (tokens,) = await said(engine, max_tokens=1, temperature=0.0)
    expected = whole(engine, list(PROMPT), (ONE, OTHER))[-1]
    assert int(expected.argmax()) == engine.placeholder
    assert tokens.ids[0] == int(expected.argsort(descending=True)[1])
    assert tokens.logprobs[0] == pytest.approx(float(expected[tokens.ids[0]]), abs=1e-5)


async def test_a_reply_is_sampled_by_one_version(engine: Any, folder: Path) -> None:
    before = await said(engine)
    stream = engine.generate(GenerateRequest(PROMPT, Sampling(max_tokens=6, seed=3), images=(ONE, OTHER)))
    begun = [await anext(stream)]
    weights = {name: tensor * 1.1 for name, tensor in engine._model.state_dict().items()}
    change = asyncio.create_task(engine.update_weights(weights, 7))
    begun += [tokens async for tokens in stream]
    assert begun == before
    await change
    after = await said(engine)
    assert {tokens.policy_version for tokens in after} == {7} == {engine.identity()["policy_version"]}
    assert after[0].logprobs != before[0].logprobs
    for wrong in ({"nothing": torch.zeros(1)}, {next(iter(weights)): torch.zeros(1)}):
        with pytest.raises(EngineError, match="the weights of this model"):
            await engine.update_weights(wrong, 8)
    assert await said(engine) == after


async def test_a_module_that_is_loaded_needs_its_folder(engine: Any, folder: Path) -> None:
    before = await said(engine)
    with pytest.raises(EngineError, match="tokenizer=FOLDER"):
        vision.VisionEngine(engine._model)
    made = vision.VisionEngine(engine._model, tokenizer=folder)
    assert [tokens.ids for tokens in await said(made)] == [tokens.ids for tokens in before]
    await made.aclose()


async def test_what_cannot_be_read_is_refused(engine: Any, folder: Path, tmp_path: Path) -> None:
    for images, message in (
        ((ONE,), "2 places for images, and 1"),
        ((ONE, Image("00", b"no image")), "image 00 cannot be read"),
        ((ONE, picture(1, 400, 1)), "images cannot be read"),
    ):
        with pytest.raises(EngineError, match=message):
            await said(engine, images=images)
    huge = io.BytesIO()
    PIL.new("1", (20_000, 20_000)).save(huge, "PNG")
    with pytest.raises(EngineError, match="pixels"):
        await said(engine, images=(ONE, Image("11", huge.getvalue())))
    with pytest.raises(EngineError, match="settings"):
        await said(engine, top_p=2.0)
    narrow = vision.VisionEngine(folder, context_window=60)
    with pytest.raises(ContextLengthExceeded, match="the context window is 60"):
        await said(narrow)
    await narrow.aclose()
    assert vision.sees(folder)
    assert not vision.sees(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "CLIPImageProcessor"}))
    with pytest.raises(EngineError, match="CLIPImageProcessor are not read"):
        vision.ImageReader(tmp_path)


@given(st.lists(st.integers(0, 5)), st.data())
def test_places_are_filled_in_order(ids: list[int], data: Any) -> None:
    counts = [data.draw(st.integers(1, 4)) for token in ids if token == 5]
    out = vision.expanded(ids, counts, 5)
    assert [token for token in out if token != 5] == [token for token in ids if token != 5]
    runs = []
    for token in ids:
        runs += [5] * counts.pop(0) if token == 5 else [token]
    assert out == runs
    with pytest.raises(EngineError, match="places for images"):
        vision.expanded([*ids, 5], [1] * ids.count(5), 5)


def test_tokens_of_vision() -> None:
    assert VISION_TOKENS.index("<|image_pad|>") == PAD - len(SPECIAL_TOKENS)
