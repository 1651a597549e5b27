"""The messages dialect with the real ``anthropic`` client."""

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
async def client_of(setup):
    base_url = setup.base_url.removesuffix("/v1")
    async with anthropic.AsyncAnthropic(base_url=base_url, api_key=setup.session.secret, max_retries=0) as client:
        yield client


async def create(setup, messages=ASK, **more):
    async with client_of(setup) as client:
        return await client.messages.create(model="policy", max_tokens=200, messages=messages, **more)


async def stream(setup, messages=ASK, **more):
    """Return the raw events, and the message that the client builds from them."""
    async with client_of(setup) as client:
        events = []
        async with client.messages.stream(model="policy", max_tokens=200, messages=messages, **more) as answer:
            async for event in answer:
                events.append(event)
            return events, await answer.get_final_message()


def sent(answer):
    """The content of a message as a client sends it back."""
    return [block.model_dump(exclude_none=True) for block in answer.content]


async def test_response_and_stored_turn(make_gateway):
    setup = await make_gateway("the total is four")
    answer = await create(setup, system="be brief", extra_body={"temperature": 0.7, "top_k": 5})
    assert [block.model_dump(exclude_none=True) for block in answer.content] == [
        {"type": "text", "text": "the total is four"}
    ]
    assert (answer.role, answer.stop_reason, answer.stop_sequence) == ("assistant", "end_turn", None)
    (seen,), (turn,) = setup.engine.seen, setup.turns
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (len(seen.prompt), len(seen.sampled))
    assert (seen.sampling.temperature, seen.sampling.top_k, seen.sampling.max_tokens) == (0.7, 5, 200)
    assert turn.messages == ({"role": "system", "content": "be brief"}, *ASK)
    assert answer.id.startswith("msg_")
    assert answer.id == turn.id


async def test_tool_use_blocks_and_results_continue_turn(make_gateway):
    setup = await make_gateway([f"Look\n{CALL}\n{OTHER}", "done"])
    answer = await create(setup, tools=TOOLS)
    assert answer.stop_reason == "tool_use"
    text, one, other = answer.content
    assert (text.text, one.name, one.input, other.input) == ("Look", "exec", {"command": "ls"}, {"command": "pwd"})
    results = [
        {"type": "tool_result", "tool_use_id": one.id, "content": "a.csv"},
        {"type": "tool_result", "tool_use_id": other.id, "content": [{"type": "text", "text": "/root"}]},
        {"type": "text", "text": "go on"},
    ]
    await create(
        setup, [*ASK, {"role": "assistant", "content": sent(answer)}, {"role": "user", "content": results}], tools=TOOLS
    )
    first, second = setup.turns
    assert second.parent == 0
    assert [m["role"] for m in second.messages] == ["tool", "tool", "user"]
    assert [m["content"] for m in second.messages] == ["a.csv", "/root", "go on"]
    start = setup.engine.seen[0].prompt + tuple(setup.engine.seen[0].sampled)
    assert setup.engine.seen[1].prompt[: len(start)] == start
    assert first.reply["tool_calls"][0]["id"] == one.id


async def test_thinking_blocks_if_requested(make_gateway):
    setup = await make_gateway([THOUGHT + "four", "five"])
    answer = await create(setup, thinking=THINK)
    thought, text = answer.content
    assert (thought.thinking, text.text) == ("two and two", "four")
    assert thought.signature
    again = [*ASK, {"role": "assistant", "content": sent(answer)}, {"role": "user", "content": "and?"}]
    await create(setup, again, thinking=THINK)
    assert setup.turns[1].parent == 0


async def test_reasoning_is_recorded_if_not_requested(make_gateway):
    setup = await make_gateway([THOUGHT + "four", "five"])
    answer = await create(setup)
    assert [b.type for b in answer.content] == ["text"]
    again = [*ASK, {"role": "assistant", "content": sent(answer)}, {"role": "user", "content": "and?"}]
    await create(setup, again)
    assert setup.turns[0].reply["reasoning_content"] == "two and two"
    assert setup.turns[1].parent == 0


async def test_stream_equals_response(make_gateway):
    setup = await make_gateway(f"{THOUGHT}Look\n{CALL}\n{OTHER}", pause=0.0005)
    events, answer = await stream(setup, tools=TOOLS, thinking=THINK)
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
    (seen,) = setup.engine.seen
    assert answer.stop_reason == "tool_use"
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (len(seen.prompt), len(seen.sampled))
    (turn,) = setup.turns
    assert [c["id"] for c in turn.reply["tool_calls"]] == [b.id for b in answer.content[2:]]


async def test_text_streams_token_by_token(make_gateway):
    setup = await make_gateway("the total is four")
    setup.engine.before_end = asyncio.Event()
    got = ""
    async with client_of(setup) as client:
        async with client.messages.stream(model="policy", max_tokens=50, messages=ASK) as answer:
            async for text in answer.text_stream:
                got += text
                if not setup.engine.before_end.is_set():
                    assert not setup.turns, "the engine has not ended, and text is here"
                    setup.engine.before_end.set()
    assert got == "the total is four"


async def test_stop_reasons(make_gateway):
    setup = await make_gateway("one two three four")
    async with client_of(setup) as client:
        cut = await client.messages.create(model="policy", max_tokens=2, messages=ASK)
    assert cut.stop_reason == "max_tokens"
    stopped = await create(setup, stop_sequences=["three", "never"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "three")
    assert stopped.content[0].text == "one two "
    _, streamed = await stream(setup, stop_sequences=["three"])
    assert (streamed.stop_reason, streamed.stop_sequence) == ("stop_sequence", "three")


async def test_count_tokens(make_gateway):
    setup = await make_gateway("four")
    asked = {"model": "policy", "messages": ASK, "system": "be brief", "tools": TOOLS}
    async with client_of(setup) as client:
        counted = await client.messages.count_tokens(**asked)
        answer = await client.messages.create(max_tokens=5, **asked)
    assert counted.input_tokens == answer.usage.input_tokens == len(setup.engine.seen[0].prompt)
    assert len(setup.turns) == 1, "counting is no turn"


async def test_system_blocks_drop_billing_line(make_gateway):
    setup = await make_gateway(["a", "b"])
    for n in range(2):
        system = [
            {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1; cch={n}{n};"},
            {"type": "text", "text": "You help.\n", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "Be brief."},
        ]
        more = [{"role": "assistant", "content": "a"}, {"role": "user", "content": "and?"}] * n
        await create(setup, [*ASK, *more], system=system)
    assert setup.turns[0].messages[0] == {"role": "system", "content": "You help.\nBe brief."}
    assert setup.turns[1].parent == 0


async def test_images_must_be_base64(make_gateway):
    setup = await make_gateway("four")
    picture = base64.b64encode(b"\x89PNG").decode()
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": picture}}
    with pytest.raises(anthropic.BadRequestError, match="takes none"):
        await create(setup, [{"role": "user", "content": [block, {"type": "text", "text": "what?"}]}])
    block["source"] = {"type": "url", "url": "http://127.0.0.1/x.png"}
    with pytest.raises(anthropic.BadRequestError, match="nothing is fetched"):
        await create(setup, [{"role": "user", "content": [block]}])
    assert not setup.engine.seen


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"messages": []}, "non-empty"),
        ({"messages": [{"role": "robot", "content": "x"}]}, r"messages\[0\].role"),
        ({"messages": [{"role": "user", "content": 3}]}, r"messages\[0\].content"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, r"messages\[0\].content\[0\].*document"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a"}]}]}, "name"),
        ({"messages": [*ASK, {"role": "assistant", "content": "The"}]}, "prefilled replies are not supported"),
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
async def test_unsupported_request_is_refused(make_gateway, asked, words):
    setup = await make_gateway("four")
    body = {"model": "policy", "max_tokens": 9, "messages": ASK, **asked}
    async with client_of(setup) as client:
        with pytest.raises(anthropic.BadRequestError, match=words) as caught:
            await client.post("/v1/messages", body=body, cast_to=object)
    assert caught.value.body["error"]["type"] == "invalid_request_error"
    assert not setup.engine.seen


async def test_tool_choice_none_and_no_parallel_calls(make_gateway):
    setup = await make_gateway([CALL, f"{CALL}\n{OTHER}"])
    answer = await create(setup, tools=TOOLS, tool_choice={"type": "none"})
    assert answer.content[0].text == CALL
    single = await create(setup, tools=TOOLS, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [b.type for b in single.content] == ["tool_use"]


async def test_anthropic_error_form(make_gateway):
    errors = [
        (ContextLengthExceeded("the prompt has 9 tokens"), anthropic.BadRequestError, "prompt is too long: the prompt"),
        (refused(429, retryable=True), anthropic.RateLimitError, "429"),
        (refused(500), anthropic.InternalServerError, "500"),
    ]
    for error, kind, words in errors:
        setup = await make_gateway(lambda *_, error=error: error)
        with pytest.raises(kind, match=words):
            await create(setup)
        with pytest.raises(kind, match=words):
            await stream(setup)


async def test_wrong_secret_is_refused(make_gateway):
    setup = await make_gateway("four")
    async with anthropic.AsyncAnthropic(
        base_url=setup.base_url.removesuffix("/v1"), api_key="x", max_retries=0
    ) as client:
        with pytest.raises(anthropic.AuthenticationError) as caught:
            await client.messages.create(model="policy", max_tokens=9, messages=ASK)
    assert caught.value.body["type"] == "error"


async def test_engine_failure_in_stream(make_gateway):
    setup = await make_gateway("one two three")

    async def dies(*_, **__):
        async for tokens in generate(*_, **__):
            yield tokens
            raise refused(500)

    generate, setup.engine.generate = setup.engine.generate, dies
    async with client_of(setup) as client:
        with pytest.raises(anthropic.APIStatusError, match="endpoint returned 500"):
            async with client.messages.stream(model="policy", max_tokens=50, messages=ASK) as answer:
                await answer.until_done()
    assert setup.turns[0].finish_reason == "error"


async def test_pings_keep_stream_alive(make_gateway, monkeypatch):
    monkeypatch.setattr(_sse, "KEEP_ALIVE_SECONDS", 0.02)
    setup = await make_gateway("four", pause=0.2)
    headers = {"x-api-key": setup.session.secret}
    body = {"model": "policy", "max_tokens": 9, "messages": ASK, "stream": True}
    async with (
        aiohttp.ClientSession(headers=headers) as http,
        http.post(f"{setup.base_url}/messages", json=body) as answer,
    ):
        text = await answer.text()
    assert 'event: ping\ndata: {"type":"ping"}\n\n' in text
    kinds = [json.loads(line[6:])["type"] for line in text.splitlines() if line.startswith("data: ")]
    assert [k for k in kinds if k != "ping"][-1] == "message_stop"
