"""The vllm engine against a server that speaks its wire format; the log-probs are those of a toy model."""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from clawgym.engines.protocol import GenerateRequest, Image, Sampling, TokenEngine, Tokens
from clawgym.engines.vllm import VLLMEngine
from clawgym.errors import ContextLengthExceeded, EngineError, TokenIdsStripped

from .fake_model import exact
from .fake_server import Fault
from .fake_vllm import FakeVLLM

KEY = "THISISSECRET0123456789"
PROMPT = (5, 6, 7, 8, 9)


@pytest.fixture
async def engine(fake_vllm: FakeVLLM, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    """Makes engines for the fake server."""
    monkeypatch.setattr("clawgym.engines._retry.FIRST_SECONDS", 0.02)
    monkeypatch.setattr("clawgym.engines._retry.POLL_SECONDS", 0.1)
    made: list[VLLMEngine] = []

    def make(**options: Any) -> VLLMEngine:
        defaults: dict[str, Any] = {"tokenizer": "tiny", "api_key": KEY, "patience": 5.0}
        made.append(VLLMEngine(fake_vllm.base_url, options.pop("model", "tiny"), **defaults | options))
        return made[-1]

    yield make
    for one in made:
        await one.aclose()


async def sample(
    engine: Any,
    sampling: Sampling | None = None,
    prompt: Sequence[int] = PROMPT,
    got: list[Tokens] | None = None,
    **options: Any,
) -> list[Tokens]:
    """All that comes; in ``got`` as far as it came."""
    got = [] if got is None else got
    async for tokens in engine.generate(GenerateRequest(prompt, sampling or Sampling(max_tokens=6, seed=1), **options)):
        got.append(tokens)
    return got


def joined(parts: list[Tokens]) -> tuple[list[int], list[float]]:
    return [i for p in parts for i in p.ids], [v for p in parts for v in p.logprobs]


def check(parts: list[Tokens], temperature: float = 1.0, prompt=PROMPT) -> None:
    """Every id has the log-prob that the model gives it."""
    ids, logprobs = joined(parts)
    prefix = list(prompt)
    for token, logprob in zip(ids, logprobs, strict=True):
        assert logprob == pytest.approx(exact(prefix, token, temperature), abs=1e-9)
        prefix.append(token)


async def test_ids_and_log_probs_as_sampled(fake_vllm: FakeVLLM, engine) -> None:
    e = engine(policy_version=3)
    assert isinstance(e, TokenEngine)
    parts = await sample(e)
    check(parts)
    assert len(parts) == 6
    assert [p.finish_reason for p in parts] == [None] * 5 + ["length"]
    assert parts[-1].cached_tokens == 2
    assert {p.policy_version for p in parts} == {3}
    assert e.context_window == 64
    sent = fake_vllm.requests[-1]
    assert sent["prompt"] == list(PROMPT)
    assert sent["ignore_eos"]
    assert (sent["temperature"], sent["top_p"], sent["top_k"], sent["repetition_penalty"]) == (1.0, 1.0, 0, 1.0)
    assert fake_vllm.headers[-1]["Authorization"] == f"Bearer {KEY}"


async def test_several_tokens_an_event_and_a_stop_id(fake_vllm: FakeVLLM, engine) -> None:
    fake_vllm.at_once = 4
    free, _ = joined(await sample(engine(), Sampling(max_tokens=12, seed=1)))
    stop = free[5]
    parts = await sample(engine(), Sampling(max_tokens=12, seed=1), stop_ids=frozenset({stop}))
    ids, _ = joined(parts)
    assert ids == free[: free.index(stop) + 1]
    assert parts[-1].finish_reason == "stop"
    check(parts)


async def test_a_seed_says_what_is_sampled(engine) -> None:
    e = engine()
    same = [joined(await sample(e, Sampling(max_tokens=8, seed=s))) for s in (1, 1, 2)]
    assert same[0] == same[1] != same[2]


async def test_the_window_is_the_default_limit_and_is_never_passed(engine) -> None:
    ids, _ = joined(await sample(engine(), Sampling()))
    assert len(ids) == 64 - len(PROMPT)
    ids, _ = joined(await sample(engine(), Sampling(max_tokens=1000)))
    assert len(ids) == 64 - len(PROMPT)
    with pytest.raises(ContextLengthExceeded, match="the context window is 64"):
        await sample(engine(), prompt=range(64))
    with pytest.raises(ContextLengthExceeded, match="maximum context length is 64"):
        await sample(engine(context_window=80), prompt=range(70))


@pytest.mark.parametrize(
    ("mode", "sampling", "given"),
    [
        ("raw", Sampling(max_tokens=4), True),
        ("raw", Sampling(max_tokens=4, top_k=3), True),
        ("raw", Sampling(max_tokens=4, temperature=0.6), False),
        ("processed", Sampling(max_tokens=4, temperature=0.6), True),
        ("processed", Sampling(max_tokens=4, temperature=0.6, top_k=3), False),
        ("processed", Sampling(max_tokens=4), True),
        ("logits", Sampling(max_tokens=4), False),
        ("raw", Sampling(max_tokens=4, temperature=0.0), False),
    ],
)
async def test_log_probs_are_exact_or_left_out(
    fake_vllm: FakeVLLM, engine, caplog: pytest.LogCaptureFixture, mode: str, sampling: Sampling, given: bool
) -> None:
    fake_vllm.mode = mode
    e = engine()
    if mode == "logits":
        with pytest.raises(EngineError, match="log-probs above 0"):
            await sample(e, sampling)
        assert e.scale == "logits"
        return
    with caplog.at_level(logging.WARNING):
        parts = await sample(e, sampling)
        await sample(e, sampling)
    if given:
        check(parts, sampling.temperature or 1.0)
    else:
        assert joined(parts)[1] == []
        assert len(joined(parts)[0]) == 4
    warned = [r.getMessage() for r in caplog.records if "log-probs are left out" in r.getMessage()]
    assert len(warned) == (not given and sampling.temperature != 0)
    assert e.identity()["log_probs"] == ("raw" if mode == "raw" else "scaled")


async def test_a_schema_is_passed_on_and_its_log_probs_are_not(fake_vllm: FakeVLLM, engine) -> None:
    parts = await sample(engine(), Sampling(max_tokens=6, json_schema={}))
    assert fake_vllm.requests[-1]["response_format"]["json_schema"]["schema"] == {"type": "object"}
    assert joined(parts)[1] == []


async def test_an_adapter_is_a_model_of_the_server(fake_vllm: FakeVLLM, engine) -> None:
    await sample(engine(), adapter="lora-a")
    assert fake_vllm.requests[-1]["model"] == "lora-a"
    with pytest.raises(EngineError, match="lora-b"):
        await sample(engine(), adapter="lora-b")


def weights(value: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """An adapter, as peft has it."""
    torch = pytest.importorskip("torch")
    layer = "base_model.model.model.layers.0.self_attn.q_proj"
    return {f"{layer}.lora_{part}.weight": torch.full((2, 2), value) for part in "AB"}, {"r": 2, "lora_alpha": 4}


async def test_an_adapter_is_replaced_while_it_samples(fake_vllm: FakeVLLM, engine, tmp_path: Path) -> None:
    one = engine()
    with pytest.raises(EngineError, match="shared"):
        await one.load_adapter("policy", weights(0)[0], 0, config={})
    one.shared = tmp_path / "adapters"
    (one.shared / "left").mkdir(parents=True)  # by a run that was killed
    (first, about), (second, _) = weights(1), weights(2)
    await one.load_adapter("policy", first, 3, config=about)
    running = one.generate(GenerateRequest(PROMPT, Sampling(max_tokens=6, seed=1), adapter="policy"))
    fake_vllm.pace = 0.01
    versions = {(await anext(running)).policy_version}
    old = fake_vllm.requests[-1]["model"]

    await one.load_adapter("policy", second, 4, config=about)
    assert {tokens.policy_version for tokens in await sample(one, adapter="policy")} == {4}
    new = fake_vllm.requests[-1]["model"]
    assert new != old
    versions |= {tokens.policy_version async for tokens in running}
    assert versions == {3}  # to its end
    assert {row["id"] for row in fake_vllm.models} == {"tiny", "lora-a", old, new}
    assert one.identity()["adapters"] == {"policy": 4}

    await one.load_adapter("policy", first, 5, config=about)
    assert not {row["id"] for row in fake_vllm.models} & {old, new}
    assert len(list(one.shared.iterdir())) == 1
    await one.aclose()
    assert [row["id"] for row in fake_vllm.models] == ["tiny", "lora-a"]
    assert not one.shared.exists()


async def test_a_server_that_was_started_again_gets_its_adapters_back(
    fake_vllm: FakeVLLM, engine, tmp_path: Path
) -> None:
    one, before = engine(), fake_vllm.models
    one.shared = tmp_path / "adapters"
    given, about = weights(1)
    await one.load_adapter("policy", given, 3, config=about)
    await sample(one, adapter="policy")
    fake_vllm.models = before
    check(await sample(one, adapter="policy"))
    await fake_vllm.stop()
    fake_vllm.models = before
    again = asyncio.create_task(sample(one, adapter="policy"))
    await asyncio.sleep(0.2)
    await fake_vllm.start()
    assert {tokens.policy_version for tokens in await again} == {3}


async def test_a_server_that_takes_no_adapters_is_told_apart(tmp_path: Path) -> None:
    server = FakeVLLM()
    server.loads = False
    await server.start()
    one = VLLMEngine(server.base_url, "tiny", tokenizer="tiny", patience=5.0)
    one.shared = tmp_path / "adapters"
    given, about = weights(1)
    with pytest.raises(EngineError, match="VLLM_ALLOW_RUNTIME_LORA_UPDATING"):
        await one.load_adapter("policy", given, 3, config=about)
    await one.aclose()
    await server.stop()


@pytest.mark.parametrize("field", ["token_ids", "prompt_token_ids", "logprobs"])
@pytest.mark.parametrize("streams_only", [False, True])
async def test_stripped_fields_are_named_at_the_first_call(
    fake_vllm: FakeVLLM, engine, field: str, streams_only: bool
) -> None:
    fake_vllm.strip, fake_vllm.strip_streams_only = frozenset({field}), streams_only
    e = engine()
    expected = EngineError if field == "logprobs" and streams_only else TokenIdsStripped
    with pytest.raises(expected) as caught:
        await sample(e) if streams_only else await e.ready()
    said = str(caught.value)
    assert field.replace("logprobs", "log-probs") in said
    assert f"127.0.0.1:{fake_vllm.port}" in said
    assert not caught.value.retryable
    if expected is TokenIdsStripped:
        assert "vLLM 0.10.2" in said


async def test_another_prompt_is_refused(fake_vllm: FakeVLLM, engine) -> None:
    fake_vllm.prompt_as_seen = [5, 6]
    with pytest.raises(EngineError, match=r"another prompt \(2 ids\) than it was sent \(5 ids\)"):
        await sample(engine())


async def test_a_server_that_goes_on_after_a_stop_id_is_refused(fake_vllm: FakeVLLM, engine) -> None:
    free, _ = joined(await sample(engine()))
    fake_vllm.heeds_stop = False
    for at_once in (1, 4):
        fake_vllm.at_once = at_once
        with pytest.raises(EngineError, match="after a stop id"):
            await sample(engine(), stop_ids=frozenset({free[1]}))


async def test_a_model_that_is_not_served(engine) -> None:
    with pytest.raises(EngineError, match="does not serve 'other' but 'tiny', 'lora-a': correct the model's name"):
        await sample(engine(model="other"))


async def test_images_and_empty_prompts_are_refused(engine) -> None:
    with pytest.raises(EngineError, match="images"):
        await sample(engine(), images=[Image("0" * 64, b"x")])
    with pytest.raises(EngineError, match="empty prompt"):
        await sample(engine(), prompt=())


# -- bad days


@pytest.mark.parametrize("status", [429, 500, 502, 503])
async def test_refusals_are_tried_again(fake_vllm: FakeVLLM, engine, status: int) -> None:
    e = engine()
    await e.ready()
    fake_vllm.faults.extend([Fault(status=status, headers={"retry-after-ms": "30"}), Fault(status=status)])
    check(await sample(e))
    assert not fake_vllm.faults


async def test_retry_after_is_honoured_and_too_long_a_wait_is_not_waited_for(fake_vllm: FakeVLLM, engine) -> None:
    e = engine()
    await e.ready()
    fake_vllm.faults.append(Fault(status=429, headers={"retry-after": "0.3"}))
    begun = time.monotonic()
    await sample(e)
    assert time.monotonic() - begun >= 0.3
    fake_vllm.faults.append(Fault(status=429, message="slow down", headers={"retry-after": "60"}))
    with pytest.raises(EngineError, match="slow down") as caught:
        await sample(e)
    assert (caught.value.retryable, caught.value.status, caught.value.retry_after) == (True, 429, 60.0)


async def test_what_is_wrong_with_the_request_is_not_tried_again(fake_vllm: FakeVLLM, engine) -> None:
    e = engine()
    await e.ready()
    before = len(fake_vllm.requests)
    fake_vllm.faults.append(Fault(status=400, message=f"bad {KEY}"))
    with pytest.raises(EngineError) as caught:
        await sample(e)
    assert len(fake_vllm.requests) == before + 1
    assert (caught.value.retryable, caught.value.status) == (False, 400)
    assert KEY not in "".join(traceback.format_exception(caught.value)) + repr(e) + str(e.identity())


@pytest.mark.parametrize("fault", [Fault(drop_after=0), Fault(end_after=0), Fault(error_after=0)])
async def test_a_stream_that_breaks_before_the_first_token_is_begun_again(
    fake_vllm: FakeVLLM, engine, fault: Fault
) -> None:
    e = engine()
    await e.ready()
    fake_vllm.faults.append(fault)
    parts = await sample(e)
    assert len(joined(parts)[0]) == 6
    check(parts)


@pytest.mark.parametrize("fault", [Fault(drop_after=2), Fault(end_after=2), Fault(error_after=2)])
async def test_a_stream_that_breaks_later_is_not_begun_again(fake_vllm: FakeVLLM, engine, fault: Fault) -> None:
    e = engine()
    await e.ready()
    before = len(fake_vllm.requests)
    fake_vllm.faults.append(fault)
    got: list[Tokens] = []
    with pytest.raises(EngineError) as caught:
        await sample(e, got=got)
    assert 1 <= len(got) <= 2
    assert not caught.value.retryable
    assert len(fake_vllm.requests) == before + 1


async def test_errors_after_a_complete_answer_are_ignored(fake_vllm: FakeVLLM, engine) -> None:
    e = engine()
    await e.ready()
    fake_vllm.faults.append(Fault(error_after=6))
    check(await sample(e))
    fake_vllm.faults.append(Fault(end_after=6))
    check(await sample(e))


async def test_time_limits(fake_vllm: FakeVLLM, engine) -> None:
    e = engine(first_token_seconds=0.3, between_seconds=0.3, patience=0.0)
    await e.ready()
    fake_vllm.faults.append(Fault(delay=1.0))
    with pytest.raises(EngineError, match=r"no first answer within 0\.3 s") as caught:
        await sample(e)
    assert (caught.value.retryable, caught.value.status) == (True, None)
    fake_vllm.faults.append(Fault(hang=2.0))  # with comments, which are no answer
    with pytest.raises(EngineError, match=r"no next part of the answer within 0\.3 s") as caught:
        await sample(e)
    assert not caught.value.retryable


async def test_shorter_time_limit_after_the_first_token(fake_vllm: FakeVLLM, engine) -> None:
    e = engine(first_token_seconds=30.0, between_seconds=0.3, patience=0.0)
    await e.ready()
    fake_vllm.faults.append(Fault(hang=2.0))
    with pytest.raises(EngineError, match=r"no next part of the answer within 0\.3 s"):
        await sample(e)


async def test_slow_reader_does_not_use_up_the_time_limit(fake_vllm: FakeVLLM, engine) -> None:
    e = engine(first_token_seconds=0.5, between_seconds=0.3, patience=0.0)
    await e.ready()
    request = GenerateRequest(PROMPT, Sampling(max_tokens=8))
    pieces = []
    async for tokens in e.generate(request):
        pieces.append(tokens)
        await asyncio.sleep(0.4)
    assert pieces[-1].finish_reason


async def test_requests_wait_for_a_restarted_server_and_probe_it_again(fake_vllm: FakeVLLM, engine) -> None:
    e = engine(patience=20.0)
    await sample(e)
    assert e.scale == "raw"
    await fake_vllm.stop()
    waiting = [asyncio.create_task(sample(e, Sampling(max_tokens=3, temperature=0.5, seed=s))) for s in range(20)]
    await asyncio.sleep(0.5)
    assert not any(task.done() for task in waiting)
    fake_vllm.mode = "processed"
    await fake_vllm.start()
    for parts in await asyncio.gather(*waiting):
        check(parts, 0.5)
    assert e.scale == "scaled"


async def test_server_that_stays_down_is_an_error(fake_vllm: FakeVLLM, engine) -> None:
    await fake_vllm.stop()
    e = engine(patience=0.4)
    with pytest.raises(EngineError, match="no connection") as caught:
        await sample(e)
    assert (caught.value.retryable, caught.value.status) == (True, None)


async def test_closing_the_iterator_stops_the_sampling(fake_vllm: FakeVLLM, engine) -> None:
    fake_vllm.pace = 0.02
    e = engine()
    async with aclosing(e.generate(GenerateRequest(PROMPT, Sampling(max_tokens=50)))) as parts:
        async for _ in parts:
            break
    for _ in range(100):
        if fake_vllm.gone:
            break
        await asyncio.sleep(0.02)
    assert (fake_vllm.gone, fake_vllm.streaming) == (1, 0)
    check(await sample(e))


async def test_concurrent_streams_share_one_probe(fake_vllm: FakeVLLM, engine) -> None:
    e = engine()
    prompts = [(i % 30, 2, 3) for i in range(100)]
    answers = await asyncio.gather(*(sample(e, prompt=p) for p in prompts))
    for prompt, parts in zip(prompts, answers, strict=True):
        check(parts, prompt=prompt)
    assert len(fake_vllm.requests) == 100 + 2


@pytest.mark.parametrize(
    "event", [{"choices": [3]}, {"choices": [{"token_ids": 3, "prompt_token_ids": list(PROMPT)}]}, [1], b"{"]
)
async def test_an_answer_of_another_form_is_an_error_in_words(
    fake_vllm: FakeVLLM, engine, event: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    e = engine()
    await e.ready()

    async def events(*_: Any) -> AsyncIterator[Any]:
        yield event

    monkeypatch.setattr(fake_vllm, "_events", events)
    with pytest.raises(EngineError) as caught:
        await sample(e)
    assert not caught.value.retryable


def test_addresses_and_names_are_checked() -> None:
    with pytest.raises(EngineError, match="web address"):
        VLLMEngine("127.0.0.1:8000", "m", tokenizer="t")
    with pytest.raises(EngineError, match="pass model="):
        VLLMEngine("http://127.0.0.1:8000", "", tokenizer="t")
