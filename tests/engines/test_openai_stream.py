"""Streams of the openai engine, against a scripted endpoint."""

from __future__ import annotations

import asyncio
import json
import traceback
from collections.abc import Mapping
from contextlib import aclosing
from typing import Any

import pytest

from clawgym.engines import AnswerBudget, CallDelta, Delta, OpenAIEngine, Prices, RateLimits, TextEngine
from clawgym.engines._chunks import Chunks
from clawgym.errors import BudgetExceeded, ContextLengthExceeded, EngineError
from clawgym.records import Usage

from .fake_openai import USAGE, WORDS, FakeOpenAI, chunk, error, raw, slow, streamed
from .test_openai import HELLO, KEY, TOOL, engine

__all__ = ["engine"]

BODY: Mapping[str, Any] = {"messages": HELLO}


@pytest.fixture(autouse=True)
def streams(fake_openai: FakeOpenAI) -> None:
    fake_openai.default = streamed()


async def collect(engine: OpenAIEngine, body: Mapping[str, Any] = BODY, got: list[Delta] | None = None) -> list[Delta]:
    got = [] if got is None else got
    async for delta in engine.stream(body):
        got.append(delta)
    return got


async def test_pieces_come_as_they_are_sent(fake_openai: FakeOpenAI, engine) -> None:
    e = engine(prices=Prices(prompt=1.0, completion=10.0))
    assert isinstance(e, TextEngine)
    fake_openai.script.append(streamed(pause=0.05))
    seen: list[int] = []
    got: list[Delta] = []
    async for delta in e.stream(BODY):
        got.append(delta)
        seen.append(fake_openai.in_flight)
    cost = pytest.approx((10 + 50) / 1e6)
    assert got == [Delta("hel"), Delta("lo"), Delta(finish_reason="stop", usage=Usage(10, 5, 0, cost))]
    assert seen[0] == 1, "the first piece comes while the answer is under way"
    assert e.usage == got[-1].usage
    assert fake_openai.requests[0] == {
        "model": "m",
        "messages": HELLO,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def test_all_parameters_except_the_model_are_passed_on(fake_openai: FakeOpenAI, engine) -> None:
    asked = {
        "model": "other",
        "n": 1,
        "tools": [TOOL],
        "stop": ["x"],
        "max_tokens": 5,
        "chat_template_kwargs": {"a": 1},
    }
    await collect(engine(extra_body={"reasoning_effort": "low"}), BODY | asked)
    sent = fake_openai.requests[0]
    assert sent["model"] == "m"
    assert "n" not in sent
    assert {
        name: sent[name] for name in ("tools", "stop", "max_tokens", "chat_template_kwargs", "reasoning_effort")
    } == {
        "tools": [TOOL],
        "stop": ["x"],
        "max_tokens": 5,
        "chat_template_kwargs": {"a": 1},
        "reasoning_effort": "low",
    }


async def test_reasoning_and_calls(fake_openai: FakeOpenAI, engine) -> None:
    def piece(index: int | None, id: str | None = None, name: str | None = None, arguments: str | None = None):
        return chunk(tool_calls=[{"index": index, "id": id, "function": {"name": name, "arguments": arguments}}])

    fake_openai.script.append(
        streamed(
            chunk(reasoning_content="hm"),
            chunk(reasoning="?"),
            piece(0, "a", "bash", ""),
            piece(0, arguments='{"x":'),
            piece(0, arguments="1}"),
            piece(1, "b", "ls", "{}"),
            chunk("tool_calls", USAGE),
        )
    )
    got = await collect(engine())
    assert got[:2] == [Delta(reasoning="hm"), Delta(reasoning="?")]
    assert [c for d in got for c in d.calls] == [
        CallDelta(0, "a", "bash", ""),
        CallDelta(0, arguments='{"x":'),
        CallDelta(0, arguments="1}"),
        CallDelta(1, "b", "ls", "{}"),
    ]
    assert got[-1] == Delta(finish_reason="tool_calls", usage=Usage(10, 5))


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_refusals_are_tried_again(fake_openai: FakeOpenAI, engine, status: int) -> None:
    fake_openai.script.extend([error(status, headers={"retry-after-ms": "10"}), error(status)])
    e = engine()
    assert "".join(d.text for d in await collect(e)) == "hello"
    assert e.stats()["retries"] == 2
    assert e.stats()["throttled"] == 2 * (status == 429)


@pytest.mark.parametrize(
    "broken",
    [
        streamed(WORDS[0], cut=True),
        streamed(WORDS[0]),
        streamed({"error": {"message": "overloaded", "code": 503}}),
        streamed(WORDS[0], {"error": {"message": "overloaded"}}),
    ],
    ids=["cut", "ended", "error", "error after the role"],
)
async def test_a_stream_that_breaks_before_its_first_piece_is_begun_again(
    fake_openai: FakeOpenAI, engine, broken
) -> None:
    fake_openai.script.append(broken)
    assert "".join(d.text for d in await collect(engine())) == "hello"
    assert len(fake_openai.requests) == 2


@pytest.mark.parametrize(
    "broken",
    [streamed(*WORDS[:2], cut=True), streamed(*WORDS[:2]), streamed(*WORDS[:2], {"error": {"message": "overloaded"}})],
    ids=["cut", "ended", "error"],
)
async def test_a_stream_that_breaks_later_is_not(fake_openai: FakeOpenAI, engine, broken) -> None:
    fake_openai.script.append(broken)
    got: list[Delta] = []
    e = engine()
    with pytest.raises(EngineError) as caught:
        await collect(e, got=got)
    assert got == [Delta("hel")]
    assert not caught.value.retryable
    assert len(fake_openai.requests) == 1
    assert e.stats()["without_usage"] == 1


async def test_half_of_a_surrogate_pair_is_replaced(fake_openai: FakeOpenAI, engine) -> None:
    half = json.dumps(chunk(content="a\ud83d"))  # some servers cut a character into two events
    fake_openai.script.append(streamed(half, *WORDS))
    assert "".join(d.text for d in await collect(engine())) == "a\ufffdhello"


async def test_refused_parameters_are_adapted(fake_openai: FakeOpenAI, engine) -> None:
    fake_openai.script.append(error(400, "Unknown parameter: 'stream_options'", param="stream_options"))
    fake_openai.script.append(error(400, "Unsupported parameter: 'max_tokens'", param="max_tokens"))
    e = engine()
    await collect(e, BODY | {"max_tokens": 7})
    assert fake_openai.requests[-1] == {"model": "m", "messages": HELLO, "stream": True, "max_completion_tokens": 7}
    assert e.identity()["adaptations"] == {"max_tokens": "sent as max_completion_tokens", "stream_options": "left out"}


async def test_budgets_hold(fake_openai: FakeOpenAI, engine) -> None:
    e = engine(budget=AnswerBudget(tokens=20))
    await collect(e)
    await collect(e)
    with pytest.raises(BudgetExceeded):
        await collect(e)
    fake_openai.default = streamed(*WORDS[:-1])
    with pytest.raises(EngineError, match="reports no token usage"):
        await collect(engine(budget=AnswerBudget(tokens=20)))
    assert (await collect(engine()))[-1] == Delta(finish_reason="stop")


async def test_closed_stream_ends_the_request_and_frees_its_slot(fake_openai: FakeOpenAI, engine) -> None:
    fake_openai.script.append(streamed(*[chunk(content="x")] * 100, pause=0.02))
    e = engine(limits=RateLimits(concurrent=1))
    async with aclosing(e.stream(BODY)) as deltas:
        async for _ in deltas:
            break
    assert "".join(d.text for d in await collect(e)) == "hello"
    for _ in range(100):
        if fake_openai.gone:
            break
        await asyncio.sleep(0.02)
    assert fake_openai.gone == 1


async def test_time_limits(fake_openai: FakeOpenAI, engine) -> None:
    fake_openai.script.append(slow(1.0, streamed()))
    with pytest.raises(EngineError, match=r"no first answer within 0\.3 s") as caught:
        await collect(engine(timeout=0.3, max_retries=0))
    assert caught.value.retryable
    fake_openai.script.append(streamed(*WORDS, pause=0.6))
    with pytest.raises(EngineError, match=r"no next part of the answer within 0\.3 s"):
        await collect(engine(timeout=0.3, max_retries=0))
    fake_openai.script.append(streamed(*[chunk(content="x")] * 8, *WORDS, pause=0.1))
    assert len(await collect(engine(timeout=0.5))) == 11, "a long answer may take longer than the limit"


async def test_errors_say_what_they_are_and_never_the_key(fake_openai: FakeOpenAI, engine) -> None:
    fake_openai.script.append(error(400, "too long", code="context_length_exceeded"))
    with pytest.raises(ContextLengthExceeded):
        await collect(engine())
    fake_openai.script.append(error(401, f"bad key {KEY}"))
    with pytest.raises(EngineError, match="OPENAI_API_KEY") as caught:
        await collect(engine())
    assert KEY not in "".join(traceback.format_exception(caught.value))
    assert caught.value.status == 401
    fake_openai.script.append(streamed("{not json"))
    with pytest.raises(EngineError, match="not JSON"):
        await collect(engine())
    fake_openai.script.append(raw("<html>hello</html>", content_type="text/html"))
    with pytest.raises(EngineError):
        await collect(engine(max_retries=0))


def in_one_piece(*events: str) -> Any:
    return raw("".join(f"data: {event}\n\n" for event in (*events, "[DONE]")), content_type="text/event-stream")


async def test_events_that_come_together_are_read_as_if_each_came_alone(fake_openai: FakeOpenAI, engine) -> None:
    words = [json.dumps(word) for word in WORDS]
    fake_openai.script.append(in_one_piece(*words))
    assert [delta.text for delta in await collect(engine())] == ["hel", "lo", ""]
    huge = words[1].replace('"hel"', '"hel", "x": 123456789012345678901234567890')  # more than orjson reads
    fake_openai.script.append(in_one_piece(words[0], huge, *words[2:]))
    assert [delta.text for delta in await collect(engine())] == ["hel", "lo", ""]
    for bad in (f"{words[1]},{words[2]}", "[1]", "{not json", '"text"'):
        fake_openai.script.append(in_one_piece(words[0], bad, *words[1:]))
        with pytest.raises(EngineError, match="not JSON of an object"):
            await collect(engine(max_retries=0))
    for first, second in (('{"a":1},{"b":[{}', "{}]}"), ('{"a":1},{"b":"}', '{"}'), ('{"a":[1', "2]}")):
        fake_openai.script.append(in_one_piece(words[0], first, second, *words[1:]))  # JSON only together
        with pytest.raises(EngineError, match="not JSON of an object"):
            await collect(engine(max_retries=0))


@pytest.mark.parametrize("field", ["choices", "usage"])
@pytest.mark.parametrize("value", [None, 3, "x", [], [None], {}, [{"delta": 3}], {"prompt_tokens": -1}])
def test_no_chunk_raises(field: str, value: Any) -> None:
    assert Chunks().take({field: value}) is None
