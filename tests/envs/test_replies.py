"""Any action of a policy becomes a message."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawgym.envs._replies import deltas_of, parser_of, reply_of
from clawgym.envs.spaces import AssistantText, JsonList
from clawgym.gateway.calls import ReplyBuilder, canonical_messages

TOOLS = [{"type": "function", "function": {"name": "exec", "parameters": {"type": "object"}}}]
FORMS = ["message", "hermes", "qwen3-coder"]

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
calls = st.fixed_dictionaries(
    {"function": st.fixed_dictionaries({"name": st.text(), "arguments": json_values})},
    optional={"id": json_values, "type": json_values},
)
messages = st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(["assistant", "user", 1]),
        "content": json_values,
        "tool_calls": st.lists(calls | json_values, max_size=3) | json_values,
        "reasoning_content": json_values,
    },
)


@pytest.mark.parametrize("form", FORMS)
@given(action=st.text() | messages.map(json.dumps) | json_values.map(json.dumps), number=st.integers(0, 99))
def test_any_action_gives_a_message_with_same_deltas(form: str, action: str, number: int) -> None:
    message, malformed = reply_of(action, parser_of(form), TOOLS, number)
    assert malformed >= 0
    assert canonical_messages([message], {}) == [message]
    json.dumps(message, ensure_ascii=False).encode()
    reply = ReplyBuilder()
    for delta in deltas_of(message):
        reply.take(delta)
    assert reply.message == {**message, "content": message["content"] or None}
    ids = [c["id"] for c in message.get("tool_calls", ())]
    assert len(set(ids)) == len(ids)
    assert all(i.isalnum() for i in ids)


@given(st.text())
def test_plain_text_becomes_message_without_calls(text: str) -> None:
    if not text.lstrip().startswith("{"):
        assert reply_of(text, None, TOOLS, 0) == ({"role": "assistant", "content": text}, 0)


@pytest.mark.parametrize(
    "action",
    [
        '{"content": 5}',
        '{"content": "a", "role": "user"}',
        '{"tool_calls": [{"name": "exec"}]}',
        '{"content": "a"',
        "{}",
        '{"content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]}',
        "{" * 100_000,
        '{"content": "a", "tool_calls": ' + "[" * 50_000 + "]" * 50_000 + "}",
    ],
)
def test_malformed_message_is_text_and_counted(action: str) -> None:
    message, malformed = reply_of(action, None, TOOLS, 0)
    assert (message, malformed) == ({"role": "assistant", "content": action}, 1)


def test_openai_message_is_parsed() -> None:
    said: dict[str, Any] = {"role": "assistant", "content": None, "reasoning": "hm", "refusal": None}
    said["tool_calls"] = [
        {"id": "x", "type": "function", "function": {"name": "exec", "arguments": '{"command": "ls"}'}},
        {"function": {"name": "exec", "arguments": {"command": "pwd"}}},
    ]
    message, malformed = reply_of(json.dumps(said), None, TOOLS, 7)
    assert malformed == 0
    assert (message["content"], message["reasoning_content"]) == (None, "hm")
    assert [json.loads(c["function"]["arguments"])["command"] for c in message["tool_calls"]] == ["ls", "pwd"]
    assert [c["id"] for c in message["tool_calls"]] == ["call000007000", "call000007001"]


def test_sampled_call_without_tools_is_text() -> None:
    sampled = '<tool_call>\n{"name": "exec", "arguments": {}}\n</tool_call>'
    assert reply_of(sampled, parser_of("hermes"), TOOLS, 0)[0]["tool_calls"]
    assert reply_of(sampled, parser_of("hermes"), [], 0)[0]["content"] == sampled


@pytest.mark.parametrize("form", FORMS)
def test_samples_include_text_and_calls(form: str) -> None:
    space, other = AssistantText(form, seed=1), AssistantText(form, seed=1)
    samples = [space.sample() for _ in range(50)]
    assert samples == [other.sample() for _ in range(50)]
    replies = [reply_of(s, parser_of(form), TOOLS, 0) for s in samples]
    assert all(space.contains(s) for s in samples)
    assert not any(malformed for _, malformed in replies)
    assert {"tool_calls" in message for message, _ in replies} == {True, False}


@given(st.text() | json_values.map(json.dumps))
def test_json_list_contains_lists_of_objects(text: str) -> None:
    try:
        value = json.loads(text)
        good = isinstance(value, list) and all(isinstance(v, dict) for v in value)
    except ValueError:
        good = False
    assert JsonList(10_000).contains(text) == good
    space = JsonList(10_000, seed=1)
    assert space.contains(space.sample())
