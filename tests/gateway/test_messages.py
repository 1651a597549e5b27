"""Messages with the real ``anthropic`` client."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json

import aiohttp
import anthropic
import pytest

from clawgym.errors import ContextLengthExceeded
from clawgym.gateway.dialects import _sse

from .scripted import refused

TOOLS = [
    {
        "name": "exec",
        "description": "Run a command",
        "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    }
]
CALL = '<tool_call>\n{"name": "exec", "arguments": {"command": "ls"}}\n</tool_call>'
OTHER = CALL.replace("ls", "pwd")
THOUGHT = "<think>\ntwo and two\n</think>\n\n"
ASK = [{"role": "user", "content": "hello"}]
THINK = {"type": "enabled", "budget_tokens": 1024}


@contextlib.asynccontextmanager
async def client_of(desk):
    base_url = desk.base_url.removesuffix("/v1")
    async with anthropic.AsyncAnthropic(base_url=base_url, api_key=desk.session.secret, max_retries=0) as client:
        yield client


async def create(desk, messages=ASK, **more):
    async with client_of(desk) as client:
        return await client.messages.create(model="policy", max_tokens=200, messages=messages, **more)


async def stream(desk, messages=ASK, **more):
    """The raw events, and the message that the client makes of them."""
    async with client_of(desk) as client:
        events = []
        async with client.messages.stream(model="policy", max_tokens=200, messages=messages, **more) as answer:
            async for event in answer:
                events.append(event)
            return events, await answer.get_final_message()


def sent(answer):
    """A message's content as a client sends it back."""
    return [block.model_dump(exclude_none=True) for block in answer.content]


async def test_an_answer_and_its_record(desk):
    d = await desk("the total is four")
    answer = await create(d, system="be brief", extra_body={"temperature": 0.7, "top_k": 5})
    assert [block.model_dump(exclude_none=True) for block in answer.content] == [
        {"type": "text", "text": "the total is four"}
    ]
    assert (answer.role, answer.stop_reason, answer.stop_sequence) == ("assistant", "end_turn", None)
    (seen,), (turn,) = d.engine.seen, d.turns
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (len(seen.prompt), len(seen.sampled))
    assert (seen.sampling.temperature, seen.sampling.top_k, seen.sampling.max_tokens) == (0.7, 5, 200)
    assert turn.messages == ({"role": "system", "content": "be brief"}, *ASK)
    assert answer.id.startswith("msg_")
    assert answer.id == turn.id


async def test_calls_are_blocks_and_their_results_continue_the_turn(desk):
    d = await desk([f"Look\n{CALL}\n{OTHER}", "done"])
    answer = await create(d, tools=TOOLS)
    assert answer.stop_reason == "tool_use"
    text, one, other = answer.content
    assert (text.text, one.name, one.input, other.input) == ("Look", "exec", {"command": "ls"}, {"command": "pwd"})
    results = [
        {"type": "tool_result", "tool_use_id": one.id, "content": "a.csv"},
        {"type": "tool_result", "tool_use_id": other.id, "content": [{"type": "text", "text": "/root"}]},
        {"type": "text", "text": "go on"},
    ]
    await create(
        d, [*ASK, {"role": "assistant", "content": sent(answer)}, {"role": "user", "content": results}], tools=TOOLS
    )
    first, second = d.turns
    assert second.parent == 0
    assert [m["role"] for m in second.messages] == ["tool", "tool", "user"]
    assert [m["content"] for m in second.messages] == ["a.csv", "/root", "go on"]
    start = d.engine.seen[0].prompt + tuple(d.engine.seen[0].sampled)
    assert d.engine.seen[1].prompt[: len(start)] == start
    assert first.reply["tool_calls"][0]["id"] == one.id


async def test_thoughts_are_shown_to_who_asks(desk):
    d = await desk([THOUGHT + "four", "five"])
    answer = await create(d, thinking=THINK)
    thought, text = answer.content
    assert (thought.thinking, text.text) == ("two and two", "four")
    assert thought.signature
    again = [*ASK, {"role": "assistant", "content": sent(answer)}, {"role": "user", "content": "and?"}]
    await create(d, again, thinking=THINK)
    assert d.turns[1].parent == 0


async def test_thoughts_that_nobody_asked_for_are_recorded_all_the_same(desk):
    d = await desk([THOUGHT + "four", "five"])
    answer = await create(d)
    assert [b.type for b in answer.content] == ["text"]
    again = [*ASK, {"role": "assistant", "content": sent(answer)}, {"role": "user", "content": "and?"}]
    await create(d, again)
    assert d.turns[0].reply["reasoning_content"] == "two and two"
    assert d.turns[1].parent == 0


async def test_the_stream_is_the_answer(desk):
    d = await desk(f"{THOUGHT}Look\n{CALL}\n{OTHER}", pause=0.0005)
    events, answer = await stream(d, tools=TOOLS, thinking=THINK)
    raw = [e for e in events if e.type in ("message_start", "content_block_start", "content_block_delta",
                                           "content_block_stop", "message_delta", "message_stop")]  # fmt: skip
    assert (raw[0].type, raw[-2].type, raw[-1].type) == ("message_start", "message_delta", "message_stop")
    places = [
        (e.type, e.index) for e in raw if e.type.startswith("content_block") and e.type.endswith(("start", "stop"))
    ]
    assert places == [(f"content_block_{what}", n) for n in range(4) for what in ("start", "stop")]
    assert [b.type for b in answer.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert (answer.content[0].thinking, answer.content[1].text) == ("two and two", "Look")
    assert [b.input for b in answer.content[2:]] == [{"command": "ls"}, {"command": "pwd"}]
    (seen,) = d.engine.seen
    assert answer.stop_reason == "tool_use"
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (len(seen.prompt), len(seen.sampled))
    (turn,) = d.turns
    assert [c["id"] for c in turn.reply["tool_calls"]] == [b.id for b in answer.content[2:]]


async def test_text_streams_token_by_token(desk):
    d = await desk("the total is four")
    d.engine.before_end = asyncio.Event()
    got = ""
    async with client_of(d) as client:
        async with client.messages.stream(model="policy", max_tokens=50, messages=ASK) as answer:
            async for text in answer.text_stream:
                got += text
                if not d.engine.before_end.is_set():
                    assert not d.turns, "the engine has not ended, and text is here"
                    d.engine.before_end.set()
    assert got == "the total is four"


async def test_what_ended_the_answer(desk):
    d = await desk("one two three four")
    async with client_of(d) as client:
        cut = await client.messages.create(model="policy", max_tokens=2, messages=ASK)
    assert cut.stop_reason == "max_tokens"
    stopped = await create(d, stop_sequences=["three", "never"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "three")
    assert stopped.content[0].text == "one two "
    _, streamed = await stream(d, stop_sequences=["three"])
    assert (streamed.stop_reason, streamed.stop_sequence) == ("stop_sequence", "three")


async def test_tokens_are_counted_as_they_are_sent(desk):
    d = await desk("four")
    asked = {"model": "policy", "messages": ASK, "system": "be brief", "tools": TOOLS}
    async with client_of(d) as client:
        counted = await client.messages.count_tokens(**asked)
        answer = await client.messages.create(max_tokens=5, **asked)
    assert counted.input_tokens == answer.usage.input_tokens == len(d.engine.seen[0].prompt)
    assert len(d.turns) == 1, "counting is no turn"


async def test_a_system_prompt_in_blocks_without_the_line_that_changes(desk):
    d = await desk(["a", "b"])
    for n in range(2):
        system = [
            {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1; cch={n}{n};"},
            {"type": "text", "text": "You help.\n", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "Be brief."},
        ]
        more = [{"role": "assistant", "content": "a"}, {"role": "user", "content": "and?"}] * n
        await create(d, [*ASK, *more], system=system)
    assert d.turns[0].messages[0] == {"role": "system", "content": "You help.\nBe brief."}
    assert d.turns[1].parent == 0


async def test_images_are_base64(desk):
    d = await desk("four")
    picture = base64.b64encode(b"\x89PNG").decode()
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": picture}}
    with pytest.raises(anthropic.BadRequestError, match="takes none"):
        await create(d, [{"role": "user", "content": [block, {"type": "text", "text": "what?"}]}])
    block["source"] = {"type": "url", "url": "http://127.0.0.1/x.png"}
    with pytest.raises(anthropic.BadRequestError, match="nothing is fetched"):
        await create(d, [{"role": "user", "content": [block]}])
    assert not d.engine.seen


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"messages": []}, "non-empty"),
        ({"messages": [{"role": "robot", "content": "x"}]}, r"messages\[0\].role"),
        ({"messages": [{"role": "user", "content": 3}]}, r"messages\[0\].content"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, r"messages\[0\].content\[0\].*document"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a"}]}]}, "name"),
        ({"messages": [*ASK, {"role": "assistant", "content": "The"}]}, "cannot be continued"),
        ({"system": [{"type": "image"}]}, r"system\[0\]"),
        ({"system": 3}, "'system'"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
        ({"tools": [{"input_schema": {}}]}, r"tools\[0\].name"),
        ({"tools": TOOLS, "tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "exec"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "some"}}, "tool_choice"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"max_tokens": None}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {}}}}, "response_format"),
    ],
)
async def test_what_cannot_be_done_is_refused(desk, asked, words):
    d = await desk("four")
    body = {"model": "policy", "max_tokens": 9, "messages": ASK, **asked}
    async with client_of(d) as client:
        with pytest.raises(anthropic.BadRequestError, match=words) as caught:
            await client.post("/v1/messages", body=body, cast_to=object)
    assert caught.value.body["error"]["type"] == "invalid_request_error"
    assert not d.engine.seen


async def test_tool_choice_none_and_one_call_at_a_time(desk):
    d = await desk([CALL, f"{CALL}\n{OTHER}"])
    answer = await create(d, tools=TOOLS, tool_choice={"type": "none"})
    assert answer.content[0].text == CALL
    single = await create(d, tools=TOOLS, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [b.type for b in single.content] == ["tool_use"]


async def test_errors_have_their_own_form(desk):
    errors = [
        (ContextLengthExceeded("the prompt has 9 tokens"), anthropic.BadRequestError, "prompt is too long: the prompt"),
        (refused(429, retryable=True), anthropic.RateLimitError, "429"),
        (refused(500), anthropic.InternalServerError, "500"),
    ]
    for error, kind, words in errors:
        d = await desk(lambda *_, error=error: error)
        with pytest.raises(kind, match=words):
            await create(d)
        with pytest.raises(kind, match=words):
            await stream(d)


async def test_a_wrong_secret_is_not_let_in(desk):
    d = await desk("four")
    async with anthropic.AsyncAnthropic(base_url=d.base_url.removesuffix("/v1"), api_key="x", max_retries=0) as client:
        with pytest.raises(anthropic.AuthenticationError) as caught:
            await client.messages.create(model="policy", max_tokens=9, messages=ASK)
    assert caught.value.body["type"] == "error"


async def test_an_upstream_that_dies_in_the_middle(desk):
    d = await desk("one two three")

    async def dies(*_, **__):
        async for tokens in generate(*_, **__):
            yield tokens
            raise refused(500)

    generate, d.engine.generate = d.engine.generate, dies
    async with client_of(d) as client:
        with pytest.raises(anthropic.APIStatusError, match="upstream said 500"):
            async with client.messages.stream(model="policy", max_tokens=50, messages=ASK) as answer:
                await answer.until_done()
    assert d.turns[0].finish_reason == "error"


async def test_silence_is_filled_with_pings(desk, monkeypatch):
    monkeypatch.setattr(_sse, "KEEP_ALIVE_SECONDS", 0.02)
    d = await desk("four", pause=0.2)
    headers = {"x-api-key": d.session.secret}
    body = {"model": "policy", "max_tokens": 9, "messages": ASK, "stream": True}
    async with aiohttp.ClientSession(headers=headers) as http, http.post(f"{d.base_url}/messages", json=body) as answer:
        text = await answer.text()
    assert 'event: ping\ndata: {"type":"ping"}\n\n' in text
    kinds = [json.loads(line[6:])["type"] for line in text.splitlines() if line.startswith("data: ")]
    assert [k for k in kinds if k != "ping"][-1] == "message_stop"
