"""Chat completions with the real ``openai`` client: what agents see, and what is recorded of it."""

from __future__ import annotations

import asyncio
import base64
import json

import aiohttp
import openai
import pytest

from clawgym.errors import ContextLengthExceeded
from clawgym.gateway.dialects import _sse
from clawgym.pool import EpisodeEnd
from clawgym.records import prompt_ids

from .scripted import refused

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "exec",
            "description": "Run a command",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
        },
    }
]
CALL = '<tool_call>\n{"name": "exec", "arguments": {"command": "ls"}}\n</tool_call>'
ASK = [{"role": "user", "content": "hello"}]


async def stream(desk, messages=ASK, **more):
    async with desk.openai() as client:
        chunks = []
        async for chunk in await client.chat.completions.create(model="policy", messages=messages, stream=True, **more):
            chunks.append(chunk)
        return chunks


def text_of(chunks):
    return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)


async def test_an_answer_and_its_record(desk):
    d = await desk("the total is four")
    answer = await d.chat(ASK, temperature=0.7, max_completion_tokens=50)
    assert answer.choices[0].message.content == "the total is four"
    assert answer.choices[0].finish_reason == "stop"
    (turn,), (seen,) = d.turns, d.engine.seen
    assert turn.context_ids == seen.prompt
    assert (list(turn.sampled_ids), list(turn.logprobs)) == (seen.sampled, seen.logprobs)
    assert (turn.flaw, turn.role, turn.policy_version, turn.id) == (None, "main", 0, answer.id)
    assert answer.usage.prompt_tokens == len(seen.prompt)
    assert answer.usage.completion_tokens == len(seen.sampled)
    assert (seen.sampling.temperature, seen.sampling.max_tokens) == (0.7, 50)
    assert turn.reply == {"role": "assistant", "content": "the total is four"}
    assert turn.messages == ({"role": "user", "content": "hello"},)


async def test_text_streams_token_by_token(desk):
    d = await desk("the total is four", pause=0.001)
    d.engine.before_end = asyncio.Event()
    async with d.openai() as client:
        got = ""
        answer = await client.chat.completions.create(model="policy", messages=ASK, stream=True)
        async for chunk in answer:
            got += chunk.choices[0].delta.content or ""
            if got == "the total" and not d.engine.before_end.is_set():
                assert not d.turns, "the engine has not ended, and text is here"
                d.engine.before_end.set()
        assert got == "the total is four"
        assert chunk.choices[0].finish_reason == "stop"


async def test_the_end_is_told_when_the_turn_is_stored(desk):
    d = await desk("four")
    async with d.openai() as client:
        async for chunk in await client.chat.completions.create(model="policy", messages=ASK, stream=True):
            if chunk.choices[0].finish_reason:
                assert len(d.turns) == 1


async def test_usage_comes_when_asked_for(desk):
    d = await desk("four")
    assert all(c.usage is None for c in await stream(d))
    chunks = await stream(d, stream_options={"include_usage": True})
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == len(d.engine.seen[1].sampled)
    assert all(c.usage is None for c in chunks[:-1])


@pytest.mark.parametrize("streamed", [False, True])
async def test_tool_calls(desk, streamed):
    d = await desk(f"I look.\n{CALL}\n{CALL.replace('ls', 'pwd')}")
    if streamed:
        chunks = await stream(d, tools=TOOLS)
        pieces = [c for chunk in chunks for c in chunk.choices[0].delta.tool_calls or ()]
        calls = {}
        for piece in pieces:
            call = calls.setdefault(piece.index, {"id": piece.id, "name": piece.function.name, "arguments": ""})
            call["arguments"] += piece.function.arguments or ""
        calls = [calls[n] for n in sorted(calls)]
        text, reason = text_of(chunks), chunks[-1].choices[0].finish_reason
    else:
        choice = (await d.chat(ASK, tools=TOOLS)).choices[0]
        calls = [
            {"id": c.id, "name": c.function.name, "arguments": c.function.arguments} for c in choice.message.tool_calls
        ]
        text, reason = choice.message.content, choice.finish_reason
    assert [(c["name"], json.loads(c["arguments"])) for c in calls] == [
        ("exec", {"command": "ls"}),
        ("exec", {"command": "pwd"}),
    ]
    assert len({c["id"] for c in calls}) == 2
    assert all(c["id"].isalnum() for c in calls)
    assert text.strip() == "I look."
    assert reason == "tool_calls"
    assert [c["id"] for c in d.turns[0].reply["tool_calls"]] == [c["id"] for c in calls]
    assert json.loads(d.pool.image(d.turns[0].tools).data) == TOOLS


async def test_one_call_at_a_time_when_asked(desk):
    d = await desk(f"{CALL}\n{CALL}", at_once=64)
    choice = (await d.chat(ASK, tools=TOOLS, parallel_tool_calls=False)).choices[0]
    assert len(choice.message.tool_calls) == 1
    assert choice.finish_reason == "tool_calls"
    (turn,) = d.turns
    text = d.engine._words.decode(list(turn.sampled_ids), skip_special_tokens=False)
    assert text.count("<tool_call>") == 1, "sampling ended with the call"
    assert turn.flaw is None


async def test_a_malformed_call_passes_as_text_and_is_counted(desk):
    broken = '<tool_call>\n{"name": "exec", "arguments": {"command": "ls"}\n</tool_call>'
    d = await desk(broken)
    choice = (await d.chat(ASK, tools=TOOLS)).choices[0]
    assert choice.message.tool_calls is None
    assert choice.message.content == broken
    assert d.turns[0].malformed_calls == 1
    assert d.gateway.stats()["malformed_calls"] == 1
    assert text_of(await stream(d, tools=TOOLS)) == broken


async def test_an_n_turn_conversation_continues_the_stored_ids(desk):
    import random

    d = await desk(lambda prompt, n: [CALL, "done, I say", "and more"][n], spell=random.Random(1))
    first = (await d.chat(ASK, tools=TOOLS)).choices[0].message
    history = [*ASK, first.model_dump(exclude_none=True)]
    history += [{"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "a.txt"}]
    second = (await d.chat(history, tools=TOOLS)).choices[0].message
    history += [{"role": "assistant", "content": second.content}, {"role": "user", "content": "go on"}]
    await d.chat(history, tools=TOOLS)
    turns = d.turns
    assert [t.parent for t in turns] == [None, 0, 1]
    for n, seen in enumerate(d.engine.seen):
        assert prompt_ids(turns, n) == seen.prompt
        assert turns[n].sampled_ids == tuple(seen.sampled)
    assert d.engine.seen[2].prompt[: len(d.engine.seen[1].prompt)] == d.engine.seen[1].prompt
    again = d.engine.encode(d.engine._words.decode(list(turns[0].sampled_ids), skip_special_tokens=False))
    assert len(again) != len(turns[0].sampled_ids), "this spelling cannot be had from the text"


async def test_reasoning_goes_out_and_comes_back(desk):
    d = await desk(lambda p, n: "<think>\nhow many?\n</think>\n\nfour")
    chunks = await stream(d)
    thought = "".join(getattr(c.choices[0].delta, "reasoning_content", None) or "" for c in chunks if c.choices)
    assert thought.strip() == "how many?"
    assert text_of(chunks).strip() == "four"
    reply = {"role": "assistant", "content": text_of(chunks), "reasoning_content": thought}
    await d.chat([*ASK, reply, {"role": "user", "content": "sure?"}])
    bare = {"role": "assistant", "content": text_of(chunks).strip()}
    await d.chat([*ASK, bare, {"role": "user", "content": "sure?!"}])
    assert [t.parent for t in d.turns] == [None, 0, 0]
    assert d.gateway.stats()["rewrites"].get("reasoning") == 1


async def test_unicode_split_across_tokens(desk):
    d = await desk("sum: 3 € 😀 naïve")
    assert text_of(await stream(d)) == "sum: 3 € 😀 naïve"


async def test_stop_strings_end_the_sampling(desk):
    d = await desk("one two STOP three")
    answer = await d.chat(ASK, stop="STOP")
    assert answer.choices[0].message.content == "one two "
    assert answer.choices[0].finish_reason == "stop"
    (turn,) = d.turns
    text = d.engine._words.decode(list(turn.sampled_ids), skip_special_tokens=False)
    assert "STOP" in text, "what was sampled is recorded"
    assert "three" not in text
    assert turn.flaw is None


async def test_the_length_that_was_asked_for(desk):
    d = await desk("one two three four five six seven")
    answer = await d.chat(ASK, max_tokens=3)
    assert answer.choices[0].finish_reason == "length"
    assert len(d.turns[0].sampled_ids) == 3


async def test_a_window_that_is_full(desk):
    d = await desk("x", context_window=200)
    await d.chat(ASK, max_tokens=8000)
    assert d.engine.seen[0].sampling.max_tokens == 200 - len(d.engine.seen[0].prompt), "the rest of the window"
    with pytest.raises(openai.BadRequestError) as refusal:
        await d.chat([{"role": "user", "content": "much " * 300}])
    assert refusal.value.code == "context_length_exceeded"
    assert "maximum context length is 200 tokens" in refusal.value.message, "what agents look for before they compact"
    assert len(d.engine.seen) == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 2),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "exec"}}),
        ("response_format", {"type": "json_object"}),
        ("logprobs", True),
        ("logit_bias", {"1": 5}),
        ("temperature", -1),
        ("stop", [""]),
        ("max_tokens", 0),
        ("messages", []),
        ("messages", [{"role": "wizard", "content": "x"}]),
        ("messages", [{"role": "user", "content": [{"type": "input_audio"}]}]),
        ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]}]),
        ("messages", [{"role": "assistant", "tool_calls": [{"id": "1"}]}]),
        ("tools", [{"type": "function"}]),
        ("tools", "exec"),
        ("seed", "one"),
    ],
)
async def test_what_cannot_be_done_is_refused_by_name(desk, field, value):
    d = await desk("x")
    body = {"model": "policy", "messages": ASK, "tools": TOOLS, field: value}
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {d.session.secret}"}) as client:
        async with client.post(f"{d.base_url}/chat/completions", json=body) as response:
            error = (await response.json())["error"]
            assert response.status == 400, error
            assert response.headers["x-should-retry"] == "false"
    assert field in error["message"]
    assert error["type"] == "invalid_request_error"
    assert not d.engine.seen
    assert not d.turns


async def test_what_the_session_was_opened_with_wins(desk):
    from clawgym.engines.protocol import Sampling

    d = await desk("x", session={"sampling": Sampling(temperature=1.0, seed=7)})
    await d.chat(ASK, temperature=0.1, seed=1, top_p=0.5)
    sampling = d.engine.seen[0].sampling
    assert (sampling.temperature, sampling.seed, sampling.top_p) == (1.0, 7, 0.5)


async def test_greedy_turns_are_not_trained(desk):
    d = await desk("x")
    await d.chat(ASK, temperature=0)
    assert d.turns[0].flaw == "greedy"


async def test_models_and_health(desk):
    d = await desk("x", gateway={"model": "tiny"})
    async with d.openai() as client:
        assert [m.id async for m in client.models.list()] == ["tiny"]
    async with aiohttp.ClientSession() as client:
        async with client.get(d.base_url.split("/s/")[0] + "/healthz") as response:
            assert await response.json() == {"status": "ok"}


async def test_only_the_right_secret_opens_a_session(desk):
    d = await desk("x")
    other = await d.gateway.open_session()
    for key, url in [
        ("wrong", d.base_url),
        (other.secret, d.base_url),
        (d.session.secret, d.gateway.base_url("nobody")),
    ]:
        with pytest.raises(openai.AuthenticationError) as refusal:
            async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
                await client.chat.completions.create(model="policy", messages=ASK)
        assert "no such session, or this is not its key" in str(refusal.value)
    assert not d.engine.seen


async def test_a_closed_session_is_closed(desk):
    d = await desk("x")
    await d.chat(ASK)
    await d.gateway.close_session(d.session.id, EpisodeEnd(outcome="solved", reward=1.0))
    with pytest.raises(openai.APIStatusError) as refusal:
        await d.chat(ASK)
    assert refusal.value.status_code in (401, 403)
    assert d.pool.episode(d.session.id).reward == 1.0


@pytest.mark.parametrize(
    ("error", "kind", "retried"),
    [
        (refused(429, retryable=True), openai.RateLimitError, True),
        (refused(500, retryable=True), openai.InternalServerError, True),
        (refused(401), openai.InternalServerError, True),
        (refused(422), openai.UnprocessableEntityError, False),
        (ContextLengthExceeded("too long: shorten it"), openai.BadRequestError, False),
        (RuntimeError("secret detail"), openai.InternalServerError, True),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
async def test_errors_of_the_upstream_are_errors_of_the_sdk(desk, error, kind, retried, streamed):
    d = await desk(lambda *_: error)
    with pytest.raises(kind) as raised:
        await (stream(d) if streamed else d.chat(ASK))
    assert raised.value.response.headers["x-should-retry"] == ("true" if retried else "false")
    assert "secret detail" not in str(raised.value)
    if not isinstance(error, RuntimeError):
        assert [t.finish_reason for t in d.turns] == ["error"]


async def test_an_engine_that_dies_in_the_middle(desk):
    class Dies:
        def __call__(self, prompt, n):
            return "one two three four"

    d = await desk(Dies(), pause=0.01)
    original = d.engine.generate

    async def dying(*args, **kwargs):
        async for n, tokens in _numbered(original(*args, **kwargs)):
            if n == 2:
                raise refused(500)
            yield tokens

    d.engine.generate = dying
    with pytest.raises(openai.APIError, match="upstream said 500"):
        await stream(d)
    (turn,) = d.turns
    assert (turn.finish_reason, turn.flaw, len(turn.sampled_ids)) == ("error", "error", 2)


async def _numbered(items):
    n = 0
    async for item in items:
        yield n, item
        n += 1


async def test_an_agent_that_leaves_stops_the_engine_and_leaves_a_record(desk):
    d = await desk("word " * 500, pause=0.005)
    async with d.openai() as client:
        answer = await client.chat.completions.create(model="policy", messages=ASK, stream=True)
        async for chunk in answer:
            if chunk.choices[0].delta.content:
                break
        await answer.close()
    for _ in range(500):
        if d.turns and not d.gateway.gate.running:
            break
        await asyncio.sleep(0.02)
    (turn,) = d.turns
    assert (turn.finish_reason, turn.flaw) == ("aborted", "aborted")
    assert list(turn.sampled_ids) == d.engine.seen[0].sampled
    assert len(turn.sampled_ids) < 500
    assert d.engine.open == 0
    assert d.gateway.gate.running == 0


async def test_silence_is_kept_alive(desk, monkeypatch):
    monkeypatch.setattr(_sse, "KEEP_ALIVE_SECONDS", 0.02)
    d = await desk("four", pause=0.05)
    body = {"model": "policy", "messages": ASK, "stream": True}
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {d.session.secret}"}) as client:
        async with client.post(f"{d.base_url}/chat/completions", json=body) as response:
            raw = (await response.read()).decode()
    assert ": keep-alive\n\n" in raw
    assert raw.endswith("data: [DONE]\n\n")
    for event in raw.strip().split("\n\n"):
        assert event.startswith((": keep-alive", "data: {", "data: [DONE]"))
    assert text_of(await stream(d)) == "four", "the SDK does not mind"


async def test_images_are_named_by_their_content(desk):
    png = b"\x89PNG\r\n\x1a\nnot really"
    url = "data:image/png;base64," + base64.b64encode(png).decode()
    d = await desk("x")
    parts = [{"type": "text", "text": "what is this?"}, {"type": "image_url", "image_url": {"url": url}}]
    with pytest.raises(openai.BadRequestError):
        await d.chat([{"role": "user", "content": parts}])  # this model reads text only
    assert not d.engine.seen


async def test_a_gateway_that_was_killed_goes_on(desk, model_folder, pool):
    from clawgym.gateway.server import Gateway

    d = await desk(lambda p, n: ["first", "second"][min(n, 1)])
    first = (await d.chat(ASK)).choices[0].message.content
    async with Gateway(d.engine, pool) as another:
        await another.listen()
        async with openai.AsyncOpenAI(base_url=another.base_url(d.session), api_key=d.session.secret) as client:
            history = [*ASK, {"role": "assistant", "content": first}, {"role": "user", "content": "more"}]
            await client.chat.completions.create(model="policy", messages=history)
    turns = d.turns
    assert [t.parent for t in turns] == [None, 0]
    assert prompt_ids(turns, 1) == d.engine.seen[1].prompt


async def test_sessions_that_are_quiet_leave_memory_and_come_back(desk):
    d = await desk("four")
    d.gateway.sessions._resident = 3
    await d.chat(ASK)
    for _ in range(10):
        await d.gateway.open_session()
    assert len(d.gateway.sessions) <= 3
    await d.chat([*ASK, {"role": "assistant", "content": "four"}, {"role": "user", "content": "sure?"}])
    assert [t.parent for t in d.turns] == [None, 0]


async def test_any_openai_endpoint_is_an_upstream_for_text(desk):
    from clawgym.engines import OpenAIEngine

    behind = await desk(f"I look.\n{CALL}")
    engine = OpenAIEngine("policy", base_url=behind.base_url, api_key=behind.session.secret)
    front = await desk(None, engine=engine)
    chunks = await stream(front, tools=TOOLS, stream_options={"include_usage": True})
    assert text_of(chunks).strip() == "I look."
    assert chunks[-1].usage.completion_tokens == len(behind.engine.seen[0].sampled)
    (turn,) = front.turns
    assert (turn.flaw, turn.finish_reason, turn.sampled_ids) == ("text-only", "tool_calls", ())
    assert turn.reply["tool_calls"][0]["function"]["name"] == "exec"
    await engine.aclose()


async def test_an_adapter_of_the_session_reaches_the_engine(desk):
    d = await desk("x", session={"adapter": "lora-a"})
    await d.chat(ASK)
    assert d.engine.seen[0].adapter == "lora-a"


async def test_an_answer_that_a_schema_shaped_is_not_trained(desk):
    d = await desk('{"a": 1}')
    d.engine.constrains = True
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    assert (await d.chat(ASK, response_format=wanted)).choices[0].message.content == '{"a": 1}'
    assert d.engine.seen[0].sampling.json_schema == schema
    assert d.turns[0].flaw == "constrained"


async def test_text_may_be_asked_for_by_name(desk):
    d = await desk("hello")
    assert (await d.chat(ASK, response_format={"type": "text"})).choices[0].message.content == "hello"
    assert d.turns[0].flaw is None
