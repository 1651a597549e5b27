"""The openai engine, against a scripted endpoint."""

from __future__ import annotations

import asyncio
import json
import sys
import time
import traceback
from typing import Any

import pytest

from clawgym.engines import AnswerBudget, Engine, OpenAIEngine, Prices, RateLimits, Sampling
from clawgym.errors import BudgetExceeded, ContextLengthExceeded, EngineError, MissingDependency
from clawgym.records import Usage

from .fake_openai import FakeOpenAI, call, error, raw, reply, slow, streamed

KEY = "sk-test-THISISSECRET0123456789"
HELLO = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}


@pytest.fixture
async def engine(fake_openai: FakeOpenAI, monkeypatch: pytest.MonkeyPatch):
    """Makes engines for the fake endpoint."""
    made: list[OpenAIEngine] = []
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setattr("clawgym.engines._retry.FIRST_SECONDS", 0.02)

    def make(**options: Any) -> OpenAIEngine:
        made.append(OpenAIEngine("m", **{"base_url": fake_openai.base_url, "api_key": KEY, **options}))
        return made[-1]

    yield make
    for one in made:
        await one.aclose()


async def ask(engine: OpenAIEngine, sampling: Sampling | None = None, **options: Any):
    return await engine.complete(HELLO, sampling=sampling or Sampling(), **options)


async def test_a_completion_with_usage_and_cost(fake_openai: FakeOpenAI, engine):
    usage = {"prompt_tokens": 1000, "completion_tokens": 100, "prompt_tokens_details": {"cached_tokens": 400}}
    fake_openai.script.append(reply("hey", usage=usage, reasoning_content="hm"))
    e = engine(prices=Prices(prompt=1.0, completion=10.0, cached=0.1))
    assert isinstance(e, Engine)
    completion = await ask(e, Sampling(temperature=0.5, top_p=0.9, max_tokens=64, seed=7, stop=("END",)))
    assert (completion.text, completion.reasoning, completion.model) == ("hey", "hm", "m")
    assert completion.turn is None
    assert completion.usage == Usage(1000, 100, 400, pytest.approx((600 * 1 + 400 * 0.1 + 100 * 10) / 1e6))
    sent = fake_openai.requests[0]
    assert sent == {
        "model": "m",
        "messages": HELLO,
        "temperature": 0.5,
        "top_p": 0.9,
        "max_tokens": 64,
        "seed": sent["seed"],
        "stop": ["END"],
    }
    assert e.usage == completion.usage


async def test_a_seed_is_sent_as_one_for_the_request(fake_openai: FakeOpenAI, engine):
    """The turns of an episode have one seed, and must not begin with the same random numbers."""
    e, longer = engine(), [*HELLO, {"role": "assistant", "content": "hey"}, *HELLO]
    for messages, seed in ((HELLO, 7), (HELLO, 8), (longer, 7)):
        await e.complete(messages, sampling=Sampling(seed=seed))
    fake_openai.script.append(streamed())
    async for _ in e.stream({"messages": HELLO, "seed": 7}):
        pass
    first, other, next_turn, same = (request["seed"] for request in fake_openai.requests)
    assert first == same
    assert len({first, other, next_turn}) == 3
    assert all(0 <= seed < 2**31 for seed in (first, other, next_turn))


async def test_without_prices_there_is_no_cost(engine):
    assert (await ask(engine())).usage == Usage(10, 5, 0, None)


async def test_settings_left_out_are_not_sent_and_extra_body_is(fake_openai: FakeOpenAI, engine):
    e = engine(extra_body={"reasoning_effort": "low"})
    await ask(e)
    assert fake_openai.requests[0] == {"model": "m", "messages": HELLO, "reasoning_effort": "low"}
    assert e.identity()["extra_body"] == {"reasoning_effort": "low"}


async def test_tool_calls_are_parsed_and_malformed_ones_kept(fake_openai: FakeOpenAI, engine):
    calls = [
        call("bash", {"command": "ls"}, "a"),
        call("bash", '{"command": "ls', "b"),
        call("bash", "[1]", "c"),
        call("submit", "", "d"),
    ]
    fake_openai.script.append(reply(None, tool_calls=calls, finish_reason="tool_calls"))
    completion = await ask(engine(), tools=[TOOL])
    assert [(c.id, c.name, c.arguments) for c in completion.tool_calls] == [
        ("a", "bash", {"command": "ls"}),
        ("d", "submit", {}),
    ]
    assert completion.malformed_calls == ('bash({"command": "ls)', "bash([1])")
    assert fake_openai.requests[0]["tools"] == [TOOL]


async def test_429_honours_retry_after(fake_openai: FakeOpenAI, engine):
    fake_openai.script += [error(429, "slow down", headers={"Retry-After": "0.4"}), reply("ok")]
    e = engine()
    assert (await ask(e)).text == "ok"
    assert fake_openai.times[1] - fake_openai.times[0] >= 0.4
    assert (e.stats()["requests"], e.stats()["retries"], e.stats()["throttled"]) == (2, 1, 1)


async def test_retry_after_holds_every_request_back(fake_openai: FakeOpenAI, engine):
    fake_openai.script.append(error(429, "slow down", headers={"Retry-After": "0.4"}))
    e = engine()
    first = asyncio.create_task(ask(e))
    await fake_openai.arrived.wait()
    await asyncio.sleep(0.1)
    await asyncio.gather(first, ask(e), ask(e))
    assert min(t - fake_openai.times[0] for t in fake_openai.times[1:]) >= 0.39


async def test_an_unreasonable_retry_after_is_an_error(fake_openai: FakeOpenAI, engine):
    fake_openai.default = error(429, "come back tomorrow", headers={"Retry-After": "86400"})
    with pytest.raises(EngineError, match="run again later") as caught:
        await ask(engine())
    assert caught.value.retryable
    assert len(fake_openai.requests) == 1


async def test_500_and_broken_json_are_retried(fake_openai: FakeOpenAI, engine):
    fake_openai.script += [error(500), raw('{"choices": [', status=200), raw("", status=200), error(503), reply("ok")]
    assert (await ask(engine())).text == "ok"
    assert len(fake_openai.requests) == 5


async def test_retries_are_bounded(fake_openai: FakeOpenAI, engine):
    fake_openai.default = error(502, "bad gateway")
    with pytest.raises(EngineError, match=r"\(502\): bad gateway: .* run again") as caught:
        await ask(engine(max_retries=2))
    assert caught.value.retryable
    assert len(fake_openai.requests) == 3


async def test_an_error_inside_a_200_is_read(fake_openai: FakeOpenAI, engine):
    fake_openai.script += [raw('{"error": {"message": "upstream busy", "code": 503}}'), reply("ok")]
    assert (await ask(engine())).text == "ok"
    fake_openai.script.append(raw('{"error": {"message": "no such model", "code": 404}}'))
    with pytest.raises(EngineError, match="no such model"):
        await ask(engine())


async def test_a_slow_answer_times_out_and_is_tried_again(fake_openai: FakeOpenAI, engine):
    fake_openai.script += [slow(60, reply()), reply("ok")]
    start = time.monotonic()
    assert (await ask(engine(timeout=0.3))).text == "ok"
    assert time.monotonic() - start < 50


async def test_no_endpoint(engine):
    with pytest.raises(EngineError, match="no connection") as caught:
        await ask(engine(base_url="http://127.0.0.1:9/v1", max_retries=1))
    assert caught.value.retryable


@pytest.mark.parametrize(
    ("status", "advice"),
    [(400, "correct the request"), (401, "OPENAI_API_KEY"), (403, "another model"), (404, "base_url ends with /v1")],
)
async def test_client_errors_are_not_retried_and_say_what_to_do(
    fake_openai: FakeOpenAI, engine, status: int, advice: str
):
    fake_openai.default = error(status, "nope")
    with pytest.raises(EngineError, match=advice) as caught:
        await ask(engine())
    assert not caught.value.retryable
    assert len(fake_openai.requests) == 1


async def test_a_used_up_account_is_not_retried(fake_openai: FakeOpenAI, engine):
    fake_openai.default = error(429, "quota", code="insufficient_quota")
    with pytest.raises(EngineError, match="add credit") as caught:
        await ask(engine())
    assert not caught.value.retryable
    assert len(fake_openai.requests) == 1


async def test_a_web_page_instead_of_json(fake_openai: FakeOpenAI, engine):
    fake_openai.default = raw("<html>hi</html>", content_type="text/html")
    with pytest.raises(EngineError, match="base_url ends with /v1"):
        await ask(engine())


@pytest.mark.parametrize(
    "answer",
    [
        error(400, "too long", code="context_length_exceeded"),
        error(400, "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens."),
        error(
            400, "the request exceeds the available context size. try increasing it", type="exceed_context_size_error"
        ),
    ],
)
async def test_context_length_exceeded_has_its_own_error(fake_openai: FakeOpenAI, engine, answer):
    fake_openai.default = answer
    with pytest.raises(ContextLengthExceeded, match="context window") as caught:
        await ask(engine(), Sampling(max_tokens=10))
    assert caught.value.cause == "context"
    assert len(fake_openai.requests) == 1


async def test_refused_parameters_are_adapted_once_and_said(fake_openai: FakeOpenAI, engine):
    fake_openai.script += [
        error(
            400,
            "Unsupported parameter: 'max_tokens' is not supported with this model. "
            "Use 'max_completion_tokens' instead.",
            param="max_tokens",
            code="unsupported_parameter",
        ),
        error(400, "Unrecognized request argument supplied: seed", code=None),
        reply("ok"),
    ]
    e = engine()
    assert e.identity()["adaptations"] == {}
    for _ in range(2):
        await ask(e, Sampling(max_tokens=9, seed=3, temperature=0.1))
    assert fake_openai.requests[-1] == fake_openai.requests[2]
    assert fake_openai.requests[2] == {
        "model": "m",
        "messages": HELLO,
        "max_completion_tokens": 9,
        "temperature": 0.1,
    }
    assert len(fake_openai.requests) == 4
    assert e.identity()["adaptations"] == {"max_tokens": "sent as max_completion_tokens", "seed": "left out"}


async def test_a_refusal_in_the_shape_of_a_validator(fake_openai: FakeOpenAI, engine):
    detail = [{"type": "extra_forbidden", "loc": ["body", "seed"], "msg": "Extra inputs are not permitted", "input": 1}]
    fake_openai.script.append(raw(json.dumps({"detail": detail}), status=422))
    e = engine()
    await ask(e, Sampling(seed=1))
    assert e.identity()["adaptations"] == {"seed": "left out"}


async def test_a_refused_value_is_not_adapted(fake_openai: FakeOpenAI, engine):
    fake_openai.default = error(400, "temperature must be at most 2", param="temperature", code="invalid_value")
    with pytest.raises(EngineError, match="at most 2"):
        await ask(engine(), Sampling(temperature=3.0))
    assert len(fake_openai.requests) == 1


async def test_concurrent_requests_adapt_together(fake_openai: FakeOpenAI, engine):
    async def picky(request: dict[str, Any]):
        behaviour = error(400, "Unknown parameter: 'seed'.", param="seed") if "seed" in request else reply("ok")
        return await slow(0.05, behaviour)(request)

    fake_openai.default = picky
    e = engine()
    assert [c.text for c in await asyncio.gather(*(ask(e, Sampling(seed=i)) for i in range(8)))] == ["ok"] * 8


async def test_the_number_of_requests_in_flight_is_bounded(fake_openai: FakeOpenAI, engine):
    fake_openai.default = slow(0.05, reply())
    e = engine(limits=RateLimits(concurrent=3))
    await asyncio.gather(*(ask(e) for _ in range(12)))
    assert fake_openai.most_in_flight == 3


async def test_the_token_budget_ends_the_work(fake_openai: FakeOpenAI, engine):
    e = engine(budget=AnswerBudget(tokens=30))
    await ask(e)
    await ask(e)
    with pytest.raises(BudgetExceeded, match="raise it") as caught:
        await ask(e)
    assert caught.value.cause == "tokens"
    assert len(fake_openai.requests) == 2


async def test_the_cost_budget_ends_the_work(fake_openai: FakeOpenAI, engine):
    e = engine(budget=AnswerBudget(cost_usd=0.02), prices=Prices(1000.0, 1000.0))
    await ask(e)
    await ask(e)
    with pytest.raises(BudgetExceeded) as caught:
        await ask(e)
    assert caught.value.cause == "cost"
    with pytest.raises(EngineError, match="needs prices"):
        engine(budget=AnswerBudget(cost_usd=1.0))


async def test_missing_usage_is_counted_never_guessed(fake_openai: FakeOpenAI, engine):
    fake_openai.default = reply("ok", usage=None)
    e = engine(prices=Prices(1.0, 1.0))
    assert (await ask(e)).usage == Usage(0, 0, 0, None)
    assert e.stats()["without_usage"] == 1
    with pytest.raises(EngineError, match="budget cannot be kept"):
        await ask(engine(budget=AnswerBudget(tokens=100)))


async def test_the_key_is_sent_and_never_shown(
    fake_openai: FakeOpenAI, engine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    caplog.set_level("DEBUG")
    fake_openai.script += [error(500, f"broken, key {KEY}"), error(401, f"Incorrect API key provided: {KEY}.")]
    e = engine()
    with pytest.raises(EngineError) as caught:
        await ask(e)
    assert fake_openai.headers[0]["Authorization"] == f"Bearer {KEY}"
    chain = "".join(traceback.format_exception(caught.value))
    for text in (str(caught.value), chain, repr(e), str(e.identity()), str(e.stats()), caplog.text):
        assert KEY not in text
    assert caught.value.__context__ is None
    monkeypatch.setenv("OPENAI_API_KEY", KEY + "ENV")
    fake_openai.script.clear()
    await ask(engine(api_key=None))
    assert fake_openai.headers[-1]["Authorization"] == f"Bearer {KEY}ENV"


async def test_a_local_endpoint_needs_no_key_and_openai_does(engine, monkeypatch: pytest.MonkeyPatch):
    assert (await ask(engine(api_key=None))).text == "hello"
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    with pytest.raises(EngineError, match="set OPENAI_API_KEY"):
        engine(api_key=None, base_url=None)


async def test_wrong_arguments_say_what_to_write(engine):
    with pytest.raises(EngineError, match="http://"):
        engine(base_url="localhost:8000")
    with pytest.raises(EngineError, match="positive"):
        RateLimits(concurrent=0)
    with pytest.raises(EngineError, match="0 or more"):
        Prices(-1.0, 1.0)


async def test_user_info_in_the_url_is_not_shown(engine):
    e = engine(base_url="https://user:hunter2@example.org:8443/v1")
    assert e.identity()["host"] == "example.org"
    assert "hunter2" not in repr(e) + str(e.identity())


async def test_the_missing_package_is_named(engine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    with pytest.raises(MissingDependency, match=r"pip install 'clawgym\[openai\]'"):
        engine()


async def test_a_cancelled_request_frees_its_slot(fake_openai: FakeOpenAI, engine):
    fake_openai.script.append(slow(5, reply()))
    e = engine(limits=RateLimits(concurrent=1))
    task = asyncio.create_task(ask(e))
    await fake_openai.arrived.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await ask(e)).text == "hello"
