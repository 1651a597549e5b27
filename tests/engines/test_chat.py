"""Parsing completions of an untrusted endpoint."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from clawgym.engines.chat import Problem, parse_completion, storable

any_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@given(any_json, any_json, any_json, any_json)
def test_no_json_value_breaks_the_reader(content: Any, calls: Any, usage: Any, arguments: Any):
    function = {"name": "bash", "arguments": arguments}
    message = {"content": content, "tool_calls": [calls, {"id": content, "function": function}]}
    payload = {"choices": [{"message": message, "finish_reason": content}], "usage": usage, "model": calls}
    for value in (payload, content, {"choices": content}, {"error": content}, {"choices": [message]}):
        parsed = parse_completion(value)
        if isinstance(parsed, Problem):
            parsed.message.encode()
        else:
            completion, _ = parsed
            (completion.text + "".join(completion.malformed_calls)).encode()
            assert completion.usage.prompt_tokens >= 0


def test_lone_surrogates_are_replaced_and_pairs_joined():
    assert storable(json.loads(r'{"a\ud800": ["\ud83d\ude00", 1, null]}')) == {"a\ufffd": ["\U0001f600", 1, None]}


def test_deep_nesting_is_a_problem_not_a_crash():
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    parsed = parse_completion({"choices": [{"message": {"tool_calls": [deep]}}]})
    assert isinstance(parsed, Problem)


def test_nan_is_not_json():
    call = {"function": {"name": "f", "arguments": '{"x": NaN}'}}
    parsed = parse_completion({"choices": [{"message": {"tool_calls": [call]}}]})
    assert not isinstance(parsed, Problem)
    assert parsed[0].malformed_calls == ('f({"x": NaN})',)


def test_content_parts_are_joined():
    content = [{"type": "text", "text": "a"}, {"type": "image_url"}, {"type": "text", "text": "b"}]
    parsed = parse_completion({"choices": [{"message": {"content": content}}]})
    assert not isinstance(parsed, Problem)
    assert parsed[0].text == "ab"
