"""Chat completions with the real ``openai`` client: responses, and the recorded turns."""

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


async def stream(setup, messages=ASK, **more):
    async with setup.openai() as client:
        chunks = []
        async for chunk in await client.chat.completions.create(model="policy", messages=messages, stream=True, **more):
            chunks.append(chunk)
        return chunks


def text_of(chunks):
    return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)


async def test_response_and_stored_turn(make_gateway):
    setup = await make_gateway("the total is four")
    answer = await setup.chat(ASK, temperature=0.7, max_completion_tokens=50)
    assert answer.choices[0].message.content == "the total is four"
    assert answer.choices[0].finish_reason == "stop"
    (turn,), (seen,) = setup.turns, setup.engine.seen
    assert turn.context_ids == seen.prompt
    assert (list(turn.sampled_ids), list(turn.logprobs)) == (seen.sampled, seen.logprobs)
    assert (turn.flaw, turn.role, turn.policy_version, turn.id) == (None, "main", 0, answer.id)
    assert answer.usage.prompt_tokens == len(seen.prompt)
    assert answer.usage.completion_tokens == len(seen.sampled)
    assert (seen.sampling.temperature, seen.sampling.max_tokens) == (0.7, 50)
    assert turn.reply == {"role": "assistant", "content": "the total is four"}
    assert turn.messages == ({"role": "user", "content": "hello"},)


async def test_text_streams_token_by_token(make_gateway):
    setup = await make_gateway("the total is four", pause=0.001)
    setup.engine.before_end = asyncio.Event()
    async with setup.openai() as client:
        got = ""
        answer = await client.chat.completions.create(model="policy", messages=ASK, stream=True)
        async for chunk in answer:
            got += chunk.choices[0].delta.content or ""
            if got == "the total" and not setup.engine.before_end.is_set():
                assert not setup.turns, "the engine has not ended, and text is here"
                setup.engine.before_end.set()
        assert got == "the total is four"
        assert chunk.choices[0].finish_reason == "stop"


async def test_end_is_sent_after_turn_is_stored(make_gateway):
    setup = await make_gateway("four")
    async with setup.openai() as client:
        async for chunk in await client.chat.completions.create(model="policy", messages=ASK, stream=True):
            if chunk.choices[0].finish_reason:
                assert len(setup.turns) == 1


async def test_usage_in_stream_if_requested(make_gateway):
    setup = await make_gateway("four")
    assert all(c.usage is None for c in await stream(setup))
    chunks = await stream(setup, stream_options={"include_usage": True})
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == len(setup.engine.seen[1].sampled)
    assert all(c.usage is None for c in chunks[:-1])


@pytest.mark.parametrize("streamed", [False, True])
async def test_tool_calls(make_gateway, streamed):
    setup = await make_gateway(f"I look.\n{CALL}\n{CALL.replace('ls', 'pwd')}")
    if streamed:
        chunks = await stream(setup, tools=TOOLS)
        pieces = [c for chunk in chunks for c in chunk.choices[0].delta.tool_calls or ()]
        calls = {}
        for piece in pieces:
            call = calls.setdefault(piece.index, {"id": piece.id, "name": piece.function.name, "arguments": ""})
            call["arguments"] += piece.function.arguments or ""
        calls = [calls[n] for n in sorted(calls)]
        text, reason = text_of(chunks), chunks[-1].choices[0].finish_reason
    else:
        choice = (await setup.chat(ASK, tools=TOOLS)).choices[0]
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
    assert [c["id"] for c in setup.turns[0].reply["tool_calls"]] == [c["id"] for c in calls]
    assert json.loads(setup.pool.image(setup.turns[0].tools).data) == TOOLS


async def test_no_parallel_tool_calls(make_gateway):
    setup = await make_gateway(f"{CALL}\n{CALL}", at_once=64)
    choice = (await setup.chat(ASK, tools=TOOLS, parallel_tool_calls=False)).choices[0]
    assert len(choice.message.tool_calls) == 1
    assert choice.finish_reason == "tool_calls"
    (turn,) = setup.turns
    text = setup.engine._words.decode(list(turn.sampled_ids), skip_special_tokens=False)
    assert text.count("<tool_call>") == 1, "sampling ended with the call"
    assert turn.flaw is None


async def test_malformed_call_is_text_and_counted(make_gateway):
    broken = '<tool_call>\n{"name": "exec", "arguments": {"command": "ls"}\n</tool_call>'
    setup = await make_gateway(broken)
    choice = (await setup.chat(ASK, tools=TOOLS)).choices[0]
    assert choice.message.tool_calls is None
    assert choice.message.content == broken
    assert setup.turns[0].malformed_calls == 1
    assert setup.gateway.stats()["malformed_calls"] == 1
    assert text_of(await stream(setup, tools=TOOLS)) == broken


async def test_conversation_continues_stored_ids(make_gateway):
    import random

    setup = await make_gateway(lambda prompt, n: [CALL, "done, I say", "and more"][n], spell=random.Random(1))
    first = (await setup.chat(ASK, tools=TOOLS)).choices[0].message
    history = [*ASK, first.model_dump(exclude_none=True)]
    history += [{"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "a.txt"}]
    second = (await setup.chat(history, tools=TOOLS)).choices[0].message
    history += [{"role": "assistant", "content": second.content}, {"role": "user", "content": "go on"}]
    await setup.chat(history, tools=TOOLS)
    turns = setup.turns
    assert [t.parent for t in turns] == [None, 0, 1]
    for n, seen in enumerate(setup.engine.seen):
        assert prompt_ids(turns, n) == seen.prompt
        assert turns[n].sampled_ids == tuple(seen.sampled)
    assert setup.engine.seen[2].prompt[: len(setup.engine.seen[1].prompt)] == setup.engine.seen[1].prompt
    again = setup.engine.encode(setup.engine._words.decode(list(turns[0].sampled_ids), skip_special_tokens=False))
    assert len(again) != len(turns[0].sampled_ids), "this spelling cannot be had from the text"


async def test_reasoning_round_trip(make_gateway):
    setup = await make_gateway(lambda p, n: "<think>\nhow many?\n</think>\n\nfour")
    chunks = await stream(setup)
    thought = "".join(getattr(c.choices[0].delta, "reasoning_content", None) or "" for c in chunks if c.choices)
    assert thought.strip() == "how many?"
    assert text_of(chunks).strip() == "four"
    reply = {"role": "assistant", "content": text_of(chunks), "reasoning_content": thought}
    await setup.chat([*ASK, reply, {"role": "user", "content": "sure?"}])
    bare = {"role": "assistant", "content": text_of(chunks).strip()}
    await setup.chat([*ASK, bare, {"role": "user", "content": "sure?!"}])
    assert [t.parent for t in setup.turns] == [None, 0, 0]
    assert setup.gateway.stats()["rewrites"].get("reasoning") == 1


async def test_unicode_split_across_tokens(make_gateway):
    setup = await make_gateway("sum: 3 € 😀 naïve")
    assert text_of(await stream(setup)) == "sum: 3 € 😀 naïve"


async def test_stop_strings_end_sampling(make_gateway):
    setup = await make_gateway("one two STOP three")
    answer = await setup.chat(ASK, stop="STOP")
    assert answer.choices[0].message.content == "one two "
    assert answer.choices[0].finish_reason == "stop"
    (turn,) = setup.turns
    text = setup.engine._words.decode(list(turn.sampled_ids), skip_special_tokens=False)
    assert "STOP" in text, "what was sampled is recorded"
    assert "three" not in text
    assert turn.flaw is None


async def test_max_tokens(make_gateway):
    setup = await make_gateway("one two three four five six seven")
    answer = await setup.chat(ASK, max_tokens=3)
    assert answer.choices[0].finish_reason == "length"
    assert len(setup.turns[0].sampled_ids) == 3


async def test_full_context_window(make_gateway):
    setup = await make_gateway("x", context_window=200)
    await setup.chat(ASK, max_tokens=8000)
    assert setup.engine.seen[0].sampling.max_tokens == 200 - len(setup.engine.seen[0].prompt), "the rest of the window"
    with pytest.raises(openai.BadRequestError) as refusal:
        await setup.chat([{"role": "user", "content": "much " * 300}])
    assert refusal.value.code == "context_length_exceeded"
    assert "maximum context length is 200 tokens" in refusal.value.message, "what agents look for before they compact"
    assert len(setup.engine.seen) == 1


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
async def test_unsupported_fields_are_refused_by_name(make_gateway, field, value):
    setup = await make_gateway("x")
    body = {"model": "policy", "messages": ASK, "tools": TOOLS, field: value}
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {setup.session.secret}"}) as client:
        async with client.post(f"{setup.base_url}/chat/completions", json=body) as response:
            error = (await response.json())["error"]
            assert response.status == 400, error
            assert response.headers["x-should-retry"] == "false"
    assert field in error["message"]
    assert error["type"] == "invalid_request_error"
    assert not setup.engine.seen
    assert not setup.turns


async def test_session_sampling_overrides_request(make_gateway):
    from clawgym.engines.protocol import Sampling

    setup = await make_gateway("x", session={"sampling": Sampling(temperature=1.0, seed=7)})
    await setup.chat(ASK, temperature=0.1, seed=1, top_p=0.5)
    sampling = setup.engine.seen[0].sampling
    assert (sampling.temperature, sampling.seed, sampling.top_p) == (1.0, 7, 0.5)


async def test_greedy_turn_has_flaw(make_gateway):
    setup = await make_gateway("x")
    await setup.chat(ASK, temperature=0)
    assert setup.turns[0].flaw == "greedy"


async def test_models_and_health(make_gateway):
    setup = await make_gateway("x", gateway={"model": "tiny"})
    async with setup.openai() as client:
        assert [m.id async for m in client.models.list()] == ["tiny"]
    async with aiohttp.ClientSession() as client:
        async with client.get(setup.base_url.split("/s/")[0] + "/healthz") as response:
            assert await response.json() == {"status": "ok"}


async def test_secret_is_required(make_gateway):
    setup = await make_gateway("x")
    other = await setup.gateway.open_session()
    for key, url in [
        ("wrong", setup.base_url),
        (other.secret, setup.base_url),
        (setup.session.secret, setup.gateway.base_url("nobody")),
    ]:
        with pytest.raises(openai.AuthenticationError) as refusal:
            async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
                await client.chat.completions.create(model="policy", messages=ASK)
        assert "no such session, or the wrong key" in str(refusal.value)
    assert not setup.engine.seen


async def test_closed_session_is_refused(make_gateway):
    setup = await make_gateway("x")
    await setup.chat(ASK)
    await setup.gateway.close_session(setup.session.id, EpisodeEnd(outcome="solved", reward=1.0))
    with pytest.raises(openai.APIStatusError) as refusal:
        await setup.chat(ASK)
    assert refusal.value.status_code in (401, 403)
    assert setup.pool.episode(setup.session.id).reward == 1.0


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
async def test_engine_errors_are_sdk_errors(make_gateway, error, kind, retried, streamed):
    setup = await make_gateway(lambda *_: error)
    with pytest.raises(kind) as raised:
        await (stream(setup) if streamed else setup.chat(ASK))
    assert raised.value.response.headers["x-should-retry"] == ("true" if retried else "false")
    assert "secret detail" not in str(raised.value)
    if not isinstance(error, RuntimeError):
        assert [t.finish_reason for t in setup.turns] == ["error"]


async def test_engine_failure_in_stream(make_gateway):
    class Dies:
        def __call__(self, prompt, n):
            return "one two three four"

    setup = await make_gateway(Dies(), pause=0.01)
    original = setup.engine.generate

    async def dying(*args, **kwargs):
        async for n, tokens in _numbered(original(*args, **kwargs)):
            if n == 2:
                raise refused(500)
            yield tokens

    setup.engine.generate = dying
    with pytest.raises(openai.APIError, match="endpoint returned 500"):
        await stream(setup)
    (turn,) = setup.turns
    assert (turn.finish_reason, turn.flaw, len(turn.sampled_ids)) == ("error", "error", 2)


async def _numbered(items):
    n = 0
    async for item in items:
        yield n, item
        n += 1


async def test_disconnect_aborts_sampling_and_is_recorded(make_gateway):
    setup = await make_gateway("word " * 500, pause=0.005)
    async with setup.openai() as client:
        answer = await client.chat.completions.create(model="policy", messages=ASK, stream=True)
        async for chunk in answer:
            if chunk.choices[0].delta.content:
                break
        await answer.close()
    for _ in range(500):
        if setup.turns and not setup.gateway.gate.running:
            break
        await asyncio.sleep(0.02)
    (turn,) = setup.turns
    assert (turn.finish_reason, turn.flaw) == ("aborted", "aborted")
    assert list(turn.sampled_ids) == setup.engine.seen[0].sampled
    assert len(turn.sampled_ids) < 500
    assert setup.engine.open == 0
    assert setup.gateway.gate.running == 0


async def test_comments_keep_stream_alive(make_gateway, monkeypatch):
    monkeypatch.setattr(_sse, "KEEP_ALIVE_SECONDS", 0.02)
    setup = await make_gateway("four", pause=0.05)
    body = {"model": "policy", "messages": ASK, "stream": True}
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {setup.session.secret}"}) as client:
        async with client.post(f"{setup.base_url}/chat/completions", json=body) as response:
            raw = (await response.read()).decode()
    assert ": keep-alive\n\n" in raw
    assert raw.endswith("data: [DONE]\n\n")
    for event in raw.strip().split("\n\n"):
        assert event.startswith((": keep-alive", "data: {", "data: [DONE]"))
    assert text_of(await stream(setup)) == "four", "the SDK does not mind"


async def test_images_are_stored_by_digest(make_gateway):
    png = b"\x89PNG\r\n\x1a\nnot really"
    url = "data:image/png;base64," + base64.b64encode(png).decode()
    setup = await make_gateway("x")
    parts = [{"type": "text", "text": "what is this?"}, {"type": "image_url", "image_url": {"url": url}}]
    with pytest.raises(openai.BadRequestError):
        await setup.chat([{"role": "user", "content": parts}])  # a text-only model
    assert not setup.engine.seen


async def test_new_gateway_continues_sessions_of_pool(make_gateway, model_folder, pool):
    from clawgym.gateway.server import Gateway

    setup = await make_gateway(lambda p, n: ["first", "second"][min(n, 1)])
    first = (await setup.chat(ASK)).choices[0].message.content
    async with Gateway(setup.engine, pool) as another:
        await another.listen()
        async with openai.AsyncOpenAI(base_url=another.base_url(setup.session), api_key=setup.session.secret) as client:
            history = [*ASK, {"role": "assistant", "content": first}, {"role": "user", "content": "more"}]
            await client.chat.completions.create(model="policy", messages=history)
    turns = setup.turns
    assert [t.parent for t in turns] == [None, 0]
    assert prompt_ids(turns, 1) == setup.engine.seen[1].prompt


async def test_idle_sessions_are_evicted_and_loaded(make_gateway):
    setup = await make_gateway("four")
    setup.gateway.sessions._resident = 3
    await setup.chat(ASK)
    for _ in range(10):
        await setup.gateway.open_session()
    assert len(setup.gateway.sessions) <= 3
    await setup.chat([*ASK, {"role": "assistant", "content": "four"}, {"role": "user", "content": "sure?"}])
    assert [t.parent for t in setup.turns] == [None, 0]


async def test_openai_endpoint_as_text_engine(make_gateway):
    from clawgym.engines import OpenAIEngine

    behind = await make_gateway(f"I look.\n{CALL}")
    engine = OpenAIEngine("policy", base_url=behind.base_url, api_key=behind.session.secret)
    front = await make_gateway(None, engine=engine)
    chunks = await stream(front, tools=TOOLS, stream_options={"include_usage": True})
    assert text_of(chunks).strip() == "I look."
    assert chunks[-1].usage.completion_tokens == len(behind.engine.seen[0].sampled)
    (turn,) = front.turns
    assert (turn.flaw, turn.finish_reason, turn.sampled_ids) == ("text-only", "tool_calls", ())
    assert turn.reply["tool_calls"][0]["function"]["name"] == "exec"
    await engine.aclose()


async def test_session_adapter_is_passed_to_engine(make_gateway):
    setup = await make_gateway("x", session={"adapter": "lora-a"})
    await setup.chat(ASK)
    assert setup.engine.seen[0].adapter == "lora-a"


async def test_constrained_turn_has_flaw(make_gateway):
    setup = await make_gateway('{"a": 1}')
    setup.engine.constrains = True
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    assert (await setup.chat(ASK, response_format=wanted)).choices[0].message.content == '{"a": 1}'
    assert setup.engine.seen[0].sampling.json_schema == schema
    assert setup.turns[0].flaw == "constrained"


async def test_response_format_text(make_gateway):
    setup = await make_gateway("hello")
    assert (await setup.chat(ASK, response_format={"type": "text"})).choices[0].message.content == "hello"
    assert setup.turns[0].flaw is None
