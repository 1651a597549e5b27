"""Properties of all dialects: any request is parsed or refused, and any reply is complete."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clawgym.engines.protocol import CallDelta, Delta
from clawgym.errors import EngineError
from clawgym.gateway.calls import Refusal, ReplyBuilder, chat_body
from clawgym.gateway.dialects.chat import ChatDialect
from clawgym.gateway.dialects.gemini import GeminiDialect
from clawgym.gateway.dialects.messages import MessagesDialect
from clawgym.gateway.dialects.responses import ResponsesDialect
from clawgym.gateway.stitch import same_reply

DIALECTS = (ChatDialect(), ResponsesDialect(), MessagesDialect(), GeminiDialect())
WORDS = ["user", "assistant", "tool", "text", "output_text", "image", "function", "reasoning", "tool_use", "auto", "x"]
leaves = st.none() | st.booleans() | st.integers(-3, 3) | st.floats(allow_nan=False) | st.sampled_from(WORDS)
values = leaves | st.text() | st.lists(leaves, max_size=2) | st.dictionaries(st.sampled_from(WORDS), leaves, max_size=2)
PICTURE = "data:image/png;base64,AAAA"
FUNCTION = {"name": "exec", "description": "x", "parameters": {"type": "object"}}
BODIES = [
    {
        "messages": [
            {"role": "system", "content": "a"},
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": PICTURE}}],
            },
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "r",
                "tool_calls": [{"id": "c", "type": "function", "function": {"name": "exec", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "c", "content": "a"},
        ],
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": {"type": "function", "function": {"name": "exec"}},
        "response_format": {"type": "json_schema", "json_schema": {"schema": {}}},
        "stop": ["x"],
        "n": 1,
        "temperature": 1,
        "max_tokens": 5,
    },
    {
        "input": [
            {
                "role": "user",
                "content": [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": PICTURE}],
            },
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
            {"type": "function_call", "call_id": "c", "name": "exec", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "a"},
        ],
        "instructions": "a",
        "tools": [{"type": "function", **FUNCTION}],
        "tool_choice": {"type": "function", "name": "exec"},
        "text": {"format": {"type": "json_schema", "name": "a", "schema": {}}},
        "reasoning": {"effort": "low"},
        "max_output_tokens": 5,
    },
    {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "r", "signature": "s"},
                    {"type": "text", "text": "a"},
                    {"type": "tool_use", "id": "c", "name": "exec", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "a"}]},
                    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}},
                ],
            },
        ],
        "system": [{"type": "text", "text": "a"}],
        "tools": [{"name": "exec", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "auto"},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "output_config": {"format": {"type": "json_schema", "schema": {}}},
        "stop_sequences": ["x"],
        "max_tokens": 5,
    },
    {
        "contents": [
            {"role": "user", "parts": [{"text": "a"}, {"inlineData": {"mimeType": "image/png", "data": "AAAA"}}]},
            {
                "role": "model",
                "parts": [
                    {"text": "r", "thought": True},
                    {"text": "a"},
                    {"functionCall": {"id": "c", "name": "exec", "args": {}}},
                ],
            },
            {"role": "user", "parts": [{"functionResponse": {"id": "c", "name": "exec", "response": {"output": "a"}}}]},
        ],
        "systemInstruction": {"parts": [{"text": "a"}]},
        "tools": [{"functionDeclarations": [{"name": "exec", "parameters": {"type": "OBJECT", "required": ["x"]}}]}],
        "toolConfig": {"functionCallingConfig": {"mode": "AUTO"}},
        "generationConfig": {
            "responseMimeType": "application/json",
            "responseSchema": {"type": "OBJECT"},
            "stopSequences": ["x"],
            "maxOutputTokens": 5,
            "topK": 3,
            "thinkingConfig": {"includeThoughts": True},
        },
    },
]
CASES = list(zip(DIALECTS, BODIES, strict=True))
good = {
    "messages": [{"role": "user", "content": "a"}],
    "input": "a",
    "contents": [{"role": "user", "parts": [{"text": "a"}]}],
    "generationConfig": {"thinkingConfig": {"includeThoughts": True}},
    "max_tokens": 5,
}


def places(value, path=()):
    """The path of every value in a JSON value."""
    yield path
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inside:
        yield from places(item, (*path, key))


def with_value(body, path, value):
    """A copy of ``body`` with ``value`` at ``path``, or without it if ``value`` is ``...``."""
    if not path:
        return value
    copy = dict(body) if isinstance(body, dict) else list(body)
    if len(path) == 1 and value is ...:
        del copy[path[0]]
    else:
        copy[path[0]] = with_value(copy[path[0]], path[1:], value)
    return copy


@pytest.mark.parametrize(("dialect", "body"), CASES)
def test_example_bodies_are_valid(dialect, body):
    call = dialect.call(body, None)
    assert [m["role"] for m in call.messages][-3:] in (["user", "assistant", "tool"], ["assistant", "tool", "user"])
    assert call.messages[-2 if dialect is not DIALECTS[2] else -3]["tool_calls"][0]["id"] == "c"
    assert len(call.images) == 1


@pytest.mark.parametrize(("dialect", "body"), CASES)
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_body_is_parsed_or_refused(dialect, body, data):
    for _ in range(data.draw(st.integers(1, 2))):
        path = data.draw(st.sampled_from([p for p in places(body) if p]))
        body = with_value(body, path, data.draw(st.just(...) | values))
    try:
        call = dialect.call(body, None)
    except Refusal as refusal:
        refused = refusal.status, bool(str(refusal))
    else:
        refused = 400, True
        assert {m["role"] for m in call.messages} <= {"system", "user", "assistant", "tool"}
        json.dumps(call.messages, ensure_ascii=False).encode()
        json.dumps([call.tools, call.tool_choice, call.response_format])
        for function in (tool["function"] for tool in call.tools):
            assert isinstance(function["name"], str)
    assert refused == (400, True)


@pytest.mark.parametrize(
    "asked",
    [
        {"tools": [{"type": "function", "function": FUNCTION}]},
        {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required"},
        {"tools": [{"type": "function", "function": FUNCTION}], "parallel_tool_calls": False},
        {"response_format": {"type": "json_object"}, "temperature": 0.5, "stop": ["x"], "seed": 3, "max_tokens": 5},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": PICTURE}}]}]},
        {},
    ],
)
def test_chat_body_equals_request(asked):
    body = {"messages": [{"role": "user", "content": "a"}], **asked}
    assert chat_body(ChatDialect().call(body, None)) == body


pieces = st.lists(
    st.sampled_from([Delta(text="a"), Delta(text="b "), Delta(reasoning="r"), "call", "more"]), max_size=12
)


def answer(kinds):
    """Deltas with numbered calls, as engines send them, and the message that they form."""
    out, index = [], -1
    for kind in kinds:
        if kind == "call":
            index += 1
            out.append(Delta(calls=(CallDelta(index, f"call{index}", "exec", "{"), CallDelta(index, arguments="}"))))
        elif kind != "more":
            out.append(kind)
        elif out and out[-1].calls:
            out.append(Delta(calls=(CallDelta(index, arguments=" "),)))
    reply = ReplyBuilder()
    for delta in out:
        reply.take(delta)
    return [*out, Delta(finish_reason="stop")], reply.message


async def said(deltas):
    for delta in deltas:
        yield delta


@settings(max_examples=150, deadline=None)
@given(pieces)
async def test_any_reply_is_complete_in_response_and_stream(kinds):
    deltas, message = answer(kinds)
    calls = [c["function"]["arguments"] for c in message.get("tool_calls", ())]

    body = {**good, "thinking": {"type": "adaptive"}}
    content = (await DIALECTS[2].whole(said(deltas), DIALECTS[2].call(body, None), body))["content"]
    assert "".join(b["text"] for b in content if b["type"] == "text") == (message["content"] or "")
    thoughts = "".join(b["thinking"] for b in content if b["type"] == "thinking")
    assert thoughts == message.get("reasoning_content", "")
    assert [b["input"] for b in content if b["type"] == "tool_use"] == [json.loads(c) for c in calls]

    output = (await DIALECTS[1].whole(said(deltas), DIALECTS[1].call(good, None), good))["output"]
    texts = {
        kind: "".join(i["content"][0]["text"] for i in output if i["type"] == kind) for kind in ("message", "reasoning")
    }
    assert texts == {"message": message["content"] or "", "reasoning": message.get("reasoning_content", "")}
    assert [i["arguments"] for i in output if i["type"] == "function_call"] == calls

    whole = await DIALECTS[3].whole(said(deltas), DIALECTS[3].call(good, None), good)
    parts = whole["candidates"][0]["content"]["parts"]
    assert "".join(p["text"] for p in parts if p.get("thought")) == message.get("reasoning_content", "")
    assert "".join(p["text"] for p in parts if "text" in p and "thought" not in p) == (message["content"] or "")
    assert [p["functionCall"]["args"] for p in parts if "functionCall" in p] == [json.loads(c) for c in calls]


@settings(max_examples=150, deadline=None)
@given(pieces)
async def test_reply_sent_back_is_same_reply(kinds):
    thoughts = [k for k in kinds if isinstance(k, Delta) and k.reasoning]
    deltas, message = answer([*thoughts, *(k for k in kinds if k not in thoughts)])
    if len(message) == 2 and message["content"] is None:
        return
    ask = [{"role": "user", "content": "a"}]
    body = {**good, "thinking": {"type": "adaptive"}}
    content = (await DIALECTS[2].whole(said(deltas), DIALECTS[2].call(body, None), body))["content"]
    again = DIALECTS[2].call({**good, "messages": [*ask, {"role": "assistant", "content": content}, *ask]}, None)
    assert same_reply(message, again.messages[1]) is not None

    output = (await DIALECTS[1].whole(said(deltas), DIALECTS[1].call(good, None), good))["output"]
    again = DIALECTS[1].call({"input": [*ask, *output, *ask]}, None)
    assert [m["role"] for m in again.messages] == ["user", "assistant", "user"]
    assert same_reply(message, again.messages[1]) == frozenset()

    shown = (await DIALECTS[3].whole(said(deltas), DIALECTS[3].call(good, None), good))["candidates"][0]["content"]
    again = DIALECTS[3].call({"contents": [*good["contents"], shown, *good["contents"]]}, None)
    assert same_reply(message, again.messages[1]) is not None


@pytest.mark.parametrize("dialect", DIALECTS[1:])
async def test_interleaved_calls_raise_engine_error(dialect):
    mixed = [Delta(calls=(CallDelta(n, f"c{n}", "exec", "{"),)) for n in (0, 1)]
    mixed.append(Delta(calls=(CallDelta(0, arguments="}"),)))
    with pytest.raises(EngineError, match="mixed"):
        await dialect.whole(said(mixed), dialect.call(good, None), good)


async def test_non_object_arguments_in_tool_use():
    deltas = [Delta(calls=(CallDelta(0, "c", "exec", "{broken"),)), Delta(finish_reason="tool_calls")]
    answer = await DIALECTS[2].whole(said(deltas), DIALECTS[2].call(good, None), good)
    assert answer["content"][0]["input"] == {"arguments": "{broken"}
