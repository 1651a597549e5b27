"""All weights into a server, in place: no token is recorded under a version that did not sample it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch

from clawgym.engines.protocol import GenerateRequest, Sampling
from clawgym.engines.sglang import SGLangEngine
from clawgym.engines.vllm import VLLMEngine
from clawgym.errors import EngineError

from .fake_sglang import FakeSGLang
from .fake_vllm import FakeVLLM
from .test_vllm import PROMPT, check, sample

WEIGHTS = {"model.embed_tokens.weight": torch.ones(2, 3)}


@pytest.fixture
async def vllm(fake_vllm: FakeVLLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[VLLMEngine]:
    monkeypatch.setattr("clawgym.engines._retry.FIRST_SECONDS", 0.02)
    made = VLLMEngine(fake_vllm.base_url, "tiny", tokenizer="tiny", patience=5.0, shared=tmp_path / "shared")
    yield made
    await made.aclose()
    assert not (tmp_path / "shared").exists()


@pytest.fixture
async def sglang(fake_sglang: FakeSGLang, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    monkeypatch.setattr("clawgym.engines._retry.FIRST_SECONDS", 0.02)
    made = SGLangEngine(fake_sglang.base_url, "tiny", tokenizer="tiny", patience=5.0, shared=tmp_path / "shared")
    yield made
    await made.aclose()


async def versions(engine: Any, **options: Any) -> set[int | None]:
    """The versions of the tokens of one stream."""
    parts = await sample(engine, Sampling(max_tokens=6, seed=1), **options)
    check(parts)
    return {tokens.policy_version for tokens in parts}


async def test_versions_are_those_that_sampled(fake_vllm: FakeVLLM, vllm: VLLMEngine) -> None:
    """Streams before, during and after a change of the weights."""
    fake_vllm.pace = 0.05
    await vllm.update_weights(WEIGHTS, 1)
    fake_vllm.sampled.clear()
    old = [asyncio.create_task(versions(vllm)) for _ in range(4)]
    await asyncio.sleep(0.1)
    change = asyncio.create_task(vllm.update_weights(WEIGHTS, 2))
    while vllm._gate._open.is_set():  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    new = [asyncio.create_task(versions(vllm)) for _ in range(4)]
    found = Counter(version for seen in await asyncio.gather(*old, *new) for version in seen)
    await change
    assert found == {1: 4, 2: 4}
    assert Counter(mark[0] for mark in fake_vllm.sampled) == {"1": 24, "2": 24}
    assert vllm.identity()["policy_version"] == 2
    assert vllm.shared is not None
    assert len(list(vllm.shared.iterdir())) == 1  # the folder of the last version


@pytest.mark.parametrize("noticed", [False, True])
async def test_restarted_server_gets_its_weights_back(fake_vllm: FakeVLLM, vllm: VLLMEngine, noticed: bool) -> None:
    await vllm.update_weights(WEIGHTS, 3)
    assert await versions(vllm) == {3}
    await fake_vllm.stop()
    if noticed:
        waiting = asyncio.create_task(versions(vllm))
        await asyncio.sleep(0.1)
        await fake_vllm.start()
        assert await waiting == {3}
    else:
        await fake_vllm.start()  # between two requests
    fake_vllm.sampled.clear()
    assert {version for seen in await asyncio.gather(*(versions(vllm) for _ in range(4))) for version in seen} == {3}
    assert fake_vllm.weight_version.startswith("3-")
    assert sum(mark.startswith("3-") for mark in fake_vllm.sampled) == 24


async def test_prefixes_of_old_weights_are_forgotten(fake_vllm: FakeVLLM, vllm: VLLMEngine) -> None:
    fake_vllm.busy = 2
    await vllm.update_weights(WEIGHTS, 1)
    assert fake_vllm.busy == -1
    fake_vllm.busy = 10**6
    vllm._patience = 0.1
    with pytest.raises(EngineError, match="let only the trainer use this server"):
        await vllm.update_weights(WEIGHTS, 2)
    fake_vllm.busy = 0
    assert await versions(vllm) == {2}  # loaded before the next stream


async def test_refused_weights_are_not_sampled(fake_vllm: FakeVLLM, vllm: VLLMEngine) -> None:
    await vllm.update_weights(WEIGHTS, 1)
    assert vllm._weights is not None
    (vllm._weights.folder / "model.safetensors").unlink()
    vllm._weights.confirmed = False
    with pytest.raises(EngineError, match=r"Cannot find any model weights.*VLLM_SERVER_DEV_MODE=1"):
        await versions(vllm)
    vllm.shared = None
    with pytest.raises(EngineError, match=r"set shared$"):
        await vllm.update_weights(WEIGHTS, 2)


async def test_server_without_the_endpoints_says_how_to_start_it(tmp_path: Path) -> None:
    server = FakeVLLM()
    server.dev = False
    await server.start()
    made = VLLMEngine(server.base_url, "tiny", tokenizer="tiny", patience=1.0, shared=tmp_path)
    with pytest.raises(EngineError, match="started with VLLM_SERVER_DEV_MODE=1"):
        await made.update_weights(WEIGHTS, 1)
    with pytest.raises(EngineError, match=r"started with --enable-sleep-mode and VLLM_SERVER_DEV_MODE=1$"):
        await made.sleep()
    await made.aclose()
    await server.stop()


async def test_requests_wait_while_the_server_sleeps(fake_vllm: FakeVLLM, vllm: VLLMEngine) -> None:
    await vllm.update_weights(WEIGHTS, 1)
    running = vllm.generate(GenerateRequest(PROMPT, Sampling(max_tokens=6)))
    await anext(running)
    going = asyncio.create_task(vllm.sleep())
    await asyncio.sleep(0.05)
    assert not fake_vllm.asleep  # a stream runs
    async for _ in running:
        pass
    await going
    assert fake_vllm.asleep
    waiting = asyncio.create_task(versions(vllm))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await vllm.update_weights(WEIGHTS, 2)
    assert await waiting == {2}
    await vllm.sleep()
    await vllm.wake()
    assert await versions(vllm) == {2}
    await vllm.sleep()
    await vllm.aclose()
    assert not fake_vllm.asleep


async def test_sglang_reports_its_version_with_every_token(fake_sglang: FakeSGLang, sglang: SGLangEngine) -> None:
    with pytest.raises(EngineError, match="update_weights first"):
        await sglang.sleep()
    await sglang.update_weights(WEIGHTS, 5)
    assert await versions(sglang) == {5}
    fake_sglang.weight_version = "default"  # started again
    assert await versions(sglang) == {5}
    fake_sglang.versions = [fake_sglang.weight_version, "default"]
    with pytest.raises(EngineError, match="samples with other weights"):
        await sample(sglang)
    await sglang.sleep()
    assert fake_sglang.asleep
    await sglang.wake()
    assert await versions(sglang) == {5}  # its weights were lost, and loaded again
