"""The sglang engine against a server that speaks its wire format; the log-probs are those of a toy model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from clawgym.engines.protocol import Sampling, TokenEngine, Tokens
from clawgym.engines.sglang import SGLangEngine
from clawgym.errors import ContextLengthExceeded, EngineError, TokenIdsStripped

from .fake_server import Fault
from .fake_sglang import FakeSGLang
from .test_vllm import check, joined, sample


@pytest.fixture
async def engine(fake_sglang: FakeSGLang, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    """Makes engines for the fake server."""
    monkeypatch.setattr("clawgym.engines._retry.FIRST_SECONDS", 0.02)
    made: list[SGLangEngine] = []

    def make(**options: Any) -> SGLangEngine:
        defaults: dict[str, Any] = {"tokenizer": "tiny", "patience": 5.0}
        made.append(SGLangEngine(fake_sglang.base_url, "tiny", **defaults | options))
        return made[-1]

    yield make
    for one in made:
        await one.aclose()


@pytest.mark.parametrize("incremental", [False, True])
@pytest.mark.parametrize("at_once", [1, 4])
async def test_ids_and_log_probs_as_sampled(fake_sglang: FakeSGLang, engine, incremental: bool, at_once: int) -> None:
    fake_sglang.incremental, fake_sglang.at_once = incremental, at_once
    e = engine(policy_version=3)
    assert isinstance(e, TokenEngine)
    parts = await sample(e, Sampling(max_tokens=6, temperature=0.7, top_k=9))
    check(parts, 0.7)
    assert len(joined(parts)[0]) == 6
    assert len(parts) == (6 if at_once == 1 else 2)
    assert parts[-1].finish_reason == "length"
    assert parts[-1].cached_tokens == 2
    assert {p.policy_version for p in parts} == {3}
    params = fake_sglang.requests[-1]["sampling_params"]
    assert (params["top_p"], params["top_k"], params["repetition_penalty"], params["ignore_eos"]) == (1.0, 9, 1.0, True)
    assert "sampling_seed" not in params


async def test_a_stop_id_and_a_seed(engine) -> None:
    e = engine()
    free, _ = joined(await sample(e, Sampling(max_tokens=12, seed=1)))
    parts = await sample(e, Sampling(max_tokens=12, seed=1), stop_ids=frozenset({free[5]}))
    assert joined(parts)[0] == free[: free.index(free[5]) + 1]
    assert parts[-1].finish_reason == "stop"
    check(parts)


async def test_log_probs_that_ignore_the_temperature_are_left_out(fake_sglang: FakeSGLang, engine) -> None:
    fake_sglang.mode = "raw"
    e = engine()
    assert joined(await sample(e, Sampling(max_tokens=4, temperature=0.7)))[1] == []
    check(await sample(e, Sampling(max_tokens=4)))
    assert e.identity()["log_probs"] == "raw"


async def test_an_adapter_and_a_schema(fake_sglang: FakeSGLang, engine) -> None:
    parts = await sample(engine(), Sampling(max_tokens=6, json_schema={}), adapter="lora-a")
    assert fake_sglang.requests[-1]["lora_path"] == "lora-a"
    assert fake_sglang.requests[-1]["sampling_params"]["json_schema"] == '{"type": "object"}'
    assert joined(parts)[1] == []


async def test_the_servers_own_version_of_the_weights_counts(fake_sglang: FakeSGLang, engine) -> None:
    fake_sglang.weight_version = "7"
    assert {p.policy_version for p in await sample(engine())} == {7}
    e = engine()
    await e.ready()
    fake_sglang.versions = ["7", "7", "8"]
    got: list[Tokens] = []
    with pytest.raises(EngineError, match="from version 7 to 8 in the middle") as caught:
        await sample(e, Sampling(max_tokens=6), got=got)
    assert [t.policy_version for t in got] == [7, 7]
    assert not caught.value.retryable


async def test_stripped_fields_are_named_at_the_first_call(fake_sglang: FakeSGLang, engine) -> None:
    fake_sglang.strip = frozenset({"output_token_logprobs"})
    with pytest.raises(TokenIdsStripped, match="output_token_logprobs") as caught:
        await engine().ready()
    assert f"127.0.0.1:{fake_sglang.port}" in str(caught.value)


async def test_a_prompt_that_was_cut_is_refused(fake_sglang: FakeSGLang, engine) -> None:
    fake_sglang.truncates = 1
    with pytest.raises(EngineError, match=r"another prompt \(4 ids\) than it was sent \(5 ids\)"):
        await sample(engine())


async def test_prompts_that_do_not_fit(engine) -> None:
    with pytest.raises(ContextLengthExceeded, match="the context window is 64"):
        await sample(engine(), prompt=range(64))
    with pytest.raises(ContextLengthExceeded, match="longer than the model's context"):
        await sample(engine(context_window=100), prompt=range(70))


@pytest.mark.parametrize(
    ("status", "retryable"), [(503, True), (500, True), (400, False), (None, True)], ids=["503", "500", "400", "none"]
)
async def test_aborted_answers(fake_sglang: FakeSGLang, engine, status: int | None, retryable: bool) -> None:
    e = engine(patience=0.0)
    await e.ready()
    fake_sglang.abort = {"type": "abort", "message": "no room for it", "status_code": status, "err_type": None}
    with pytest.raises(EngineError, match="no room for it") as caught:
        await sample(e)
    assert caught.value.retryable is retryable
    assert caught.value.status == (status or 503)


@pytest.mark.parametrize("fault", [Fault(status=503), Fault(drop_after=0), Fault(error_after=0), Fault(end_after=0)])
async def test_what_fails_before_the_first_token_is_begun_again(fake_sglang: FakeSGLang, engine, fault: Fault) -> None:
    e = engine()
    await e.ready()
    fake_sglang.faults.append(fault)
    check(await sample(e))


async def test_what_fails_later_is_not(fake_sglang: FakeSGLang, engine) -> None:
    e = engine()
    await e.ready()
    fake_sglang.faults.append(Fault(end_after=2))
    with pytest.raises(EngineError, match="ended before the answer did") as caught:
        await sample(e)
    assert not caught.value.retryable


async def test_many_streams_at_once(engine) -> None:
    e = engine()
    prompts = [(i % 30, 2, 3) for i in range(50)]
    for prompt, parts in zip(prompts, await asyncio.gather(*(sample(e, prompt=p) for p in prompts)), strict=True):
        check(parts, prompt=prompt)
