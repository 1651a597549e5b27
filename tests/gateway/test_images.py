"""Images through the gateway: log-probs can be computed again from the stored turns."""

from __future__ import annotations

import base64
import math
from typing import Any

import pytest

from clawgym.engines.protocol import Sampling
from clawgym.engines.tiny import make_tiny_model
from clawgym.records import prompt_ids

from ..engines.test_vision import ONE, OTHER, vision, whole

torch = pytest.importorskip("torch")


def shown(*images: Any, text: str = "what is this?") -> dict[str, Any]:
    urls = [f"data:image/png;base64,{base64.b64encode(image.data).decode()}" for image in images]
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


async def test_stored_log_probs_with_images_are_reproduced(make_gateway: Any, tmp_path: Any) -> None:
    folder = make_tiny_model(tmp_path / "model", vision=True)
    engine = vision.VisionEngine(folder)
    setup = await make_gateway("", engine=engine, session={"sampling": Sampling(max_tokens=8, seed=5)})
    history = [shown(ONE)]
    for more in (shown(OTHER, ONE, text="and <|image_pad|> here?"), None):
        answer = (await setup.chat(history)).choices[0].message
        history += [{"role": "assistant", "content": answer.content}, *([more] if more else [])]
    turns = setup.turns
    assert [turn.flaw for turn in turns] == [None, None]
    assert [turn.parent for turn in turns] == [None, 0]
    assert [turn.images for turn in turns] == [(ONE.sha256,), (OTHER.sha256, ONE.sha256)]

    fresh = vision.VisionEngine(folder)
    assert fresh.identity()["images"] == engine.identity()["images"]
    for number, turn in enumerate(turns):
        ids = [*prompt_ids(turns, number), *turn.sampled_ids]
        assert ids.count(fresh.placeholder) == (1, 3)[number], "a text is never a place for an image"
        stored = [setup.pool.image(sha) for each in turns[: number + 1] for sha in each.images]
        sampled = turn.sampled_ids
        again = whole(fresh, ids, stored)[-len(sampled) - 1 : -1][range(len(sampled)), list(sampled)].tolist()
        assert list(turn.logprobs) == pytest.approx(again, abs=1e-5)
        assert not any(math.isnan(value) for value in again)
    await fresh.aclose()
    await engine.aclose()
