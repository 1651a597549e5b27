"""verl's servers as an engine, and the CPU engine as a server of verl, without a cluster."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM

from clawgym.engines import GenerateRequest, Sampling, TransformersEngine
from clawgym.engines.tiny import make_tiny_model
from clawgym.errors import ContextLengthExceeded, EngineError
from clawgym.rewards.scoring import ScoreRequest, TorchScorer

cpu: Any = pytest.importorskip("clawgym.trainers.verl.cpu")
servers: Any = pytest.importorskip("clawgym.trainers.verl.servers")

pytestmark = pytest.mark.asyncio(loop_scope="module")
PROMPT = [20, 21, 22, 23]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", context_window=128)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(folder: Path) -> AsyncIterator[Any]:
    made = cpu.CpuServer(str(folder), 1)
    yield made
    await made._engine.aclose()


class Client:
    """The client that a host gets from verl; requests may be delayed."""

    def __init__(self, server: Any) -> None:
        self.server = server
        self.sessions: list[str] = []

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]) -> Any:
        self.sessions.append(request_id)
        output = await self.server.generate(request_id, prompt_ids, sampling_params)
        output.extra_fields["min_global_steps"] = output.extra_fields["global_steps"]
        return output


def engine_of(server: Any, folder: Path, **about: Any) -> Any:
    return servers.VerlEngine(Client(server), folder, **{"engine": "transformers", "context_window": 128, **about})


async def sampled(engine: Any, **asked: Any) -> Any:
    pieces = [
        piece
        async for piece in engine.generate(
            GenerateRequest(PROMPT, Sampling(**asked), session="s", stop_ids=frozenset({2}))
        )
    ]
    (piece,) = pieces
    return piece


async def test_same_ids_and_logprobs_as_engine_alone(server: Any, folder: Path) -> None:
    engine = engine_of(server, folder)
    plain = TransformersEngine(folder, dtype="float32")
    for asked in ({"seed": 7, "temperature": 0.8, "max_tokens": 9}, {"seed": 1}):
        one = await sampled(engine, **asked)
        sent = {**asked, "seed": GenerateRequest(PROMPT, Sampling(**asked)).seed}
        pieces = [p async for p in plain.generate(GenerateRequest(PROMPT, Sampling(**sent), stop_ids=frozenset({2})))]
        assert one.ids == tuple(i for p in pieces for i in p.ids)
        assert one.logprobs == pytest.approx([x for p in pieces for x in p.logprobs], abs=1e-6)
        assert one.finish_reason == pieces[-1].finish_reason
    assert set(engine._client.sessions) == {"s"}
    await plain.aclose()


async def test_unsupported_requests_raise(server: Any, folder: Path) -> None:
    with pytest.raises(ContextLengthExceeded):
        await sampled(engine_of(server, folder, context_window=4))
    with pytest.raises(EngineError, match="does not support a JSON schema"):
        await sampled(engine_of(server, folder), json_schema={})


async def test_weights_load_in_parts_with_version(server: Any, folder: Path) -> None:
    engine = engine_of(server, folder)
    before = await sampled(engine, seed=3, max_tokens=8)
    weights = {name: tensor + 0.05 for name, tensor in server._engine._model.state_dict().items()}
    names = list(weights)
    await server.load({name: weights[name] for name in names[:3]}, None)
    assert (await sampled(engine, seed=3, max_tokens=8)).logprobs == before.logprobs
    await server.load({name: weights[name] for name in names[3:]}, 5)
    after = await sampled(engine, seed=3, max_tokens=8)
    assert (before.policy_version, after.policy_version) == (0, 5)
    assert after.logprobs != before.logprobs


async def test_aborted_request_returns_tokens_and_new_requests_wait(server: Any, folder: Path) -> None:
    asked = {"temperature": 1.0, "max_tokens": 120, "logprobs": True, "seed": 0}
    running = asyncio.create_task(server.generate("r", PROMPT, asked))
    while not server._engine.occupancy()["running"]:  # noqa: ASYNC110 - the engine's own thread changes it
        await asyncio.sleep(0.001)
    await server.abort_all_requests()
    output = await running
    assert output.stop_reason == "aborted"
    assert len(output.token_ids) == len(output.log_probs) < 120
    waiting = asyncio.create_task(sampled(engine_of(server, folder), max_tokens=4, seed=0))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await server.resume_generation()
    assert len((await waiting).ids) <= 4


async def test_scorer_matches_trainer_logprobs(server: Any, folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.load_state_dict({name: tensor + 0.01 for name, tensor in model.state_dict().items()})
    sampled_ids = [30, 31, 2, 33]
    reader = servers.VerlScorer(Client(server), context_window=128)
    found = []
    for version in (6, 7):  # also after the weights have changed again
        model.load_state_dict({name: tensor * 1.05 for name, tensor in model.state_dict().items()})
        await server.load(dict(model.state_dict()), version)
        for top_k in (0, 3):
            asked = [ScoreRequest(PROMPT, sampled_ids, top_k), ScoreRequest(PROMPT, sampled_ids[:2], top_k)]
            (one, short), (other, _) = [await scorer.score(asked) for scorer in (reader, TorchScorer(model))]
            assert short.logprobs == pytest.approx(one.logprobs[:2], abs=1e-5)
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
            assert (one.top_ids == other.top_ids).all()
            assert one.top_logprobs == pytest.approx(other.top_logprobs, abs=1e-5)
            assert one.top_logprobs.shape == (4, top_k)
        found.append(one.logprobs)
    assert abs(found[0] - found[1]).max() > 1e-3


async def test_scorer_gives_nan_beyond_context_window(server: Any) -> None:
    reader = servers.VerlScorer(Client(server), context_window=8)
    beyond, fits = await reader.score(
        [ScoreRequest(PROMPT, [30, 31, 32, 33], top_k=2), ScoreRequest(PROMPT, [30, 31, 32])]
    )
    assert np.isnan(beyond.logprobs).all()
    assert np.isfinite(fits.logprobs).all()
    with pytest.raises(ValueError, match="temperature 1 only"):
        await reader.score([ScoreRequest(PROMPT, [30], temperature=0.7)])


async def test_scorer_raises_for_other_ids() -> None:
    class Other:
        async def generate(self, *_: Any, prompt_ids: list[int], **__: Any) -> Any:
            count = len(prompt_ids)
            said = {"prompt_ids": [[1]] * count, "prompt_logprobs": [[-1.0]] * count}
            return cpu.TokenOutput(token_ids=[], log_probs=[], stop_reason="completed", extra_fields=said)

    with pytest.raises(EngineError, match="other ids"):
        await servers.VerlScorer(Other(), context_window=128).score([ScoreRequest(PROMPT, [30])])


async def test_aborted_request_is_a_retryable_engine_error(folder: Path) -> None:
    class Ended:
        async def generate(self, *_: Any, **__: Any) -> Any:
            return cpu.TokenOutput(token_ids=[5], log_probs=[-1.0], stop_reason="aborted")

    with pytest.raises(EngineError) as raised:
        await sampled(servers.VerlEngine(Ended(), folder, engine="vllm", context_window=128))
    assert raised.value.retryable


async def test_missing_logprobs_raise(folder: Path) -> None:
    class Silent:
        async def generate(self, *_: Any, **__: Any) -> Any:
            return cpu.TokenOutput(token_ids=[5, 6], log_probs=None, stop_reason="completed")

    with pytest.raises(EngineError, match="without a log-prob"):
        await sampled(servers.VerlEngine(Silent(), folder, engine="vllm", context_window=128))


async def test_mailbox_keeps_order_of_weights() -> None:
    box = cpu._Mailbox()
    given = [(str(n), torch.full((2,), float(n))) for n in range(5)]

    async def read(sending: int) -> list[str]:
        names, number, last = [], 0, False
        while not last:
            items, last = await box.get(sending, number)
            names += [name for name, _ in items]
            number += 1
        return names

    for sending in range(2):
        readers = [asyncio.create_task(read(sending)) for _ in range(2)]
        await box.put(sending, given[:2], False)
        await box.put(sending, given[2:], True)
        assert await asyncio.gather(*readers) == [["0", "1", "2", "3", "4"]] * 2


async def test_cpu_platform_has_one_device() -> None:
    module = cpu.CpuPlatform.device_module
    assert (module.is_available(), module.get_device_name(), module.mem_get_info()) == (False, "CPU", (0, 0))
    assert module.memory_allocated() == module.max_memory_reserved() == 0
    module.manual_seed(7)
    kept = module.get_rng_state()
    first = torch.rand(3)
    module.set_rng_state(kept)
    assert torch.equal(torch.rand(3), first)
