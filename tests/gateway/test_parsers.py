"""Parse replies into reasoning, content and calls, however the text is split."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clawgym.gateway.parsers import ReplyParser, StopStrings
from clawgym.registry import parsers

SCHEMA = {
    "type": "object",
    "properties": {
        "command": {"type": "string"},
        "count": {"type": "integer"},
        "ratio": {"type": "number"},
        "force": {"type": "boolean"},
        "items": {"type": "array"},
        "options": {"type": "object"},
        "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "either": {"type": ["integer", "string"]},
    },
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "x", "parameters": SCHEMA}}
    for name in ("exec", "read")
]
STYLES = ("hermes", "qwen3-coder")


def hermes(name="exec", arguments='{"command": "ls"}'):
    return f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {arguments}}}\n</tool_call>'


def coder(name="exec", /, **values):
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


class Read:
    """Parse a reply in the given chunks."""

    def __init__(self, pieces, style="hermes", tools=TOOLS, *, reasoning=False):
        pieces = [pieces] if isinstance(pieces, str) else pieces
        self.parser = ReplyParser(style and parsers.make(style), tools, reasoning=reasoning)
        self.deltas = [d for piece in pieces for d in self.parser.push(piece)] + self.parser.finish()

    @property
    def content(self):
        return self.parser.content

    @property
    def reasoning(self):
        return self.parser.reasoning

    @property
    def calls(self):
        return [(c["function"]["name"], c["function"]["arguments"]) for c in self.parser.calls]

    @property
    def outcome(self):
        return self.content, self.reasoning, self.calls, self.parser.malformed


def cut(text, seed, longest=7):
    rng = random.Random(seed)
    pieces = []
    while text:
        n = rng.randint(1, longest)
        pieces.append(text[:n])
        text = text[n:]
    return pieces


@pytest.mark.parametrize("reply", ["", "four", "  four \n", "a < b, <tool", "</think> and <think> here", "{}"])
def test_reply_without_markers_is_text(reply):
    assert Read(reply).outcome == (reply or None, None, [], 0)


def test_reasoning_is_stripped_of_spaces_at_markers():
    read = Read("\n<think>\nhm\n\nyes\n</think>\n\nfour\n")
    assert read.outcome == ("four\n", "hm\n\nyes", [], 0)


def test_reasoning_opened_by_prompt():
    assert Read("hm\n</think>\n\nfour", reasoning=True).outcome == ("four", "hm", [], 0)


def test_unclosed_reasoning_is_reasoning():
    assert Read(f"<think>\nhm {hermes()} </thi").outcome == (None, f"hm {hermes()} </thi", [], 0)


def test_think_marker_only_at_start():
    assert Read("say <think>a</think>").content == "say <think>a</think>"


def test_arguments_are_kept_as_sampled():
    arguments = '{ "command" : "l\\u0073",\n"deep": [1, {"a": null}] }'
    assert Read(hermes(arguments=arguments)).outcome == (None, None, [("exec", arguments)], 0)


def test_content_is_none_with_calls_only():
    text = f"<think>\nhm\n</think>\n\n{hermes()}\n{hermes('read')}\n\n"
    assert Read(text).outcome == (None, "hm", [("exec", '{"command": "ls"}'), ("read", '{"command": "ls"}')], 0)


def test_text_before_between_and_after_calls():
    read = Read(f"Look:\n{hermes()}\nand\n{hermes('read')}\ndone\n")
    assert read.content == "Look:\n\nand\n\ndone\n"
    assert [name for name, _ in read.calls] == ["exec", "read"]


def test_call_ids_are_alphanumeric_and_unique():
    ids = [c["id"] for c in Read(hermes() * 50).parser.calls]
    assert len(set(ids)) == 50
    assert all(i.isalnum() and i.isascii() for i in ids)


def test_call_of_unknown_tool_is_parsed():
    assert Read(hermes("nobody")).calls == [("nobody", '{"command": "ls"}')]


@pytest.mark.parametrize("style", STYLES)
def test_calls_are_text_without_tools_or_parser(style):
    reply = hermes() if style == "hermes" else coder(command="ls")
    assert Read(reply, style, ()).outcome == (reply, None, [], 0)
    assert Read(reply, None).outcome == (reply, None, [], 0)


def test_markers_inside_json_strings():
    arguments = json.dumps({"command": 'echo "</tool_call><tool_call>" \\ </think>'})
    assert Read(hermes(arguments=arguments) + hermes()).calls == [("exec", arguments), ("exec", '{"command": "ls"}')]


MALFORMED = [
    "<tool_call>\nls\n</tool_call>",
    "<tool_call></tool_call>",
    "<tool_call>\n{}\n</tool_call>",
    '<tool_call>\n{"name": "exec"}\n</tool_call>',
    '<tool_call>\n{"name": "", "arguments": {}}\n</tool_call>',
    '<tool_call>\n{"name": 3, "arguments": {}}\n</tool_call>',
    '<tool_call>\n{"name": "exec", "arguments": []}\n</tool_call>',
    '<tool_call>\n{"name": "exec", "arguments": "{}"}\n</tool_call>',
    '<tool_call>\n{"name": "exec", "arguments": {"a": NaN}}\n</tool_call>',
    '<tool_call>\n{"name": "exec", "arguments": {"a": 1,}}\n</tool_call>',
    '<tool_call>\n{"name": "exec", "arguments": {"a": "\\ud800"}}\n</tool_call>',
    '<tool_call>\n{"name": "exec", "arguments": {"a": "line\nend"}}\n</tool_call>',
    '<tool_call>\n{"name": "exec", "arguments": {"a": 1]}\n</tool_call>',
    "<tool_call>\n{'name': 'exec', 'arguments': {}}\n</tool_call>",
    '<tool_call>\n{"name": "exec", "arguments": {}} and\n</tool_call>',
    '<tool_call>\n[{"name": "exec", "arguments": {}}]\n</tool_call>',
    '<tool_call>\n{"name": "exec", "arguments": {}}{}\n</tool_call>',
    '<tool_call>\n{"name": "exec", "arguments": {"a": ' + "[" * 5000 + "]" * 5000 + "}}\n</tool_call>",
    '<tool_call>\n{"name": "exec", "arguments": {"a": ' + "9" * 5000 + "}}\n</tool_call>",
    "<tool_call>\n<function=exec>\n</function>\n</tool_call>",
]


@pytest.mark.parametrize("broken", MALFORMED)
def test_malformed_call_is_text_and_next_call_is_parsed(broken):
    text = f"Look:\n\n{broken}\n\n{hermes('read')}"
    assert Read(text).outcome == (f"Look:\n\n{broken}", None, [("read", '{"command": "ls"}')], 1)


@pytest.mark.parametrize("end", range(len("<tool_call>"), len(hermes()) - 1, 3))
def test_incomplete_call_is_text(end):
    assert Read("Look: " + hermes()[:end]).outcome == ("Look: " + hermes()[:end], None, [], 1)


def test_call_is_passed_on_only_when_complete():
    parser = ReplyParser(parsers.make("hermes"), TOOLS)
    text = hermes()
    told = [parser.push(char) for char in text]
    assert not any(told[:-1])
    first, second = told[-1]
    assert (first.calls[0].index, first.calls[0].name, first.calls[0].arguments) == (0, "exec", "")
    assert (second.calls[0].id, second.calls[0].arguments) == (None, '{"command": "ls"}')


def test_text_and_reasoning_are_passed_on_at_once():
    parser = ReplyParser(parsers.make("hermes"), TOOLS)
    assert [d.reasoning for d in parser.push("<think>hm")] == ["hm"]
    assert [d.text for d in parser.push("</think>Lo")] == ["Lo"]
    assert [d.text for d in parser.push("ok <to")] == ["ok"]
    assert [d.text for d in parser.push("tal>")] == [" <total>"]


# The qwen3-coder format


def test_values_are_converted_by_schema():
    text = coder(
        command="5", count="5", ratio="2.5", force="True", items='[1, "a"]', options='{"a": null}', maybe="null",
        either="7", other="8",
    )  # fmt: skip
    ((name, arguments),) = Read(text, "qwen3-coder").calls
    assert name == "exec"
    assert json.loads(arguments) == {
        "command": "5", "count": 5, "ratio": 2.5, "force": True, "items": [1, "a"], "options": {"a": None},
        "maybe": None, "either": 7, "other": "8",
    }  # fmt: skip


def test_value_that_fits_no_type_stays_text():
    ((_, arguments),) = Read(coder(count="five", force="perhaps", items="{}", either="x"), "qwen3-coder").calls
    assert json.loads(arguments) == {"count": "five", "force": "perhaps", "items": "{}", "either": "x"}


def test_values_keep_newlines_and_spaces():
    value = "\n  if a < b:\n\tprint('é')\n\n"
    ((_, arguments),) = Read(coder(command=value), "qwen3-coder").calls
    assert json.loads(arguments) == {"command": value}


def test_function_without_parameters_and_unknown_function():
    assert Read(coder("nobody"), "qwen3-coder").calls == [("nobody", "{}")]


@pytest.mark.parametrize(
    "broken",
    [
        "<tool_call>\n<function=exec>\n<parameter=command>\nls\n</function>\n</tool_call>",
        "<tool_call>\n<function=exec>\n<parameter=command>\nls\n</parameter>\n</tool_call>",
        "<tool_call>\n<function=exec>\nls\n</function>\n</tool_call>",
        "<tool_call>\n<function=>\n</function>\n</tool_call>",
        "<tool_call>\n<function=a b>\n</function>\n</tool_call>",
        f"<tool_call>\n<function={'a' * 300}>\n</function>\n</tool_call>",
        "<tool_call>\n<function=exec>\n<parameter=command>\n<tool_call>\n</parameter>\n</function>\n</tool_call>",
        '<tool_call>\n{"name": "exec", "arguments": {}}\n</tool_call>',
        "<tool_call>\n<function=exec>\n</function>\n<function=read>\n</function>\n</tool_call>",
        "<tool_call>\n<function=exec>\n<parameter=ratio>\n1e999\n</parameter>\n</function>\n</tool_call>",
    ],
)
def test_malformed_qwen3_coder_calls(broken):
    good = coder("read", command="ls")
    read = Read(f"Look: {broken}\n{good}", "qwen3-coder")
    assert read.outcome == (f"Look: {broken}", None, [("read", '{"command": "ls"}')], 1)


# Any chunks give the same message

PARTS = [
    "<tool_call>", "</tool_call>", "<think>", "</think>", "<function=exec>", "</function>", "<parameter=count>",
    "<parameter=", "</parameter>", "\n", " ", "{", "}", "[", "]", '"', "\\", ":", ",", "name", '"name": "exec"',
    '"arguments": {}', "5", "<", ">", "/", "é😀", "text", hermes(), coder(count="3"), coder(command="</thin"),
    hermes(arguments='{"a": "</tool_call>"}'),
]  # fmt: skip
replies = st.lists(st.sampled_from(PARTS), max_size=14).map("".join)


@settings(max_examples=400, deadline=None)
@given(replies, st.integers(0, 99), st.sampled_from(STYLES), st.booleans())
def test_message_does_not_depend_on_chunks(reply, seed, style, reasoning):
    whole = Read(reply, style, reasoning=reasoning)
    pieces = Read(cut(reply, seed), style, reasoning=reasoning)
    assert pieces.outcome == whole.outcome
    assert Read(list(reply), style, reasoning=reasoning).outcome == whole.outcome
    assert "".join(d.text for d in pieces.deltas) == (whole.content or "")
    assert "".join(d.reasoning for d in pieces.deltas) == (whole.reasoning or "")
    arguments = {}
    for delta in pieces.deltas:
        for piece in delta.calls:
            arguments[piece.index] = arguments.get(piece.index, "") + piece.arguments
    assert list(arguments.values()) == [a for _, a in whole.calls]


@settings(max_examples=400, deadline=None)
@given(replies, st.sampled_from(STYLES))
def test_reply_without_call_and_reasoning_is_text(reply, style):
    read = Read(reply, style)
    if not read.calls and not reply.lstrip().startswith("<think>"):
        assert (read.content or "") == reply
    for _, arguments in read.calls:
        assert isinstance(json.loads(arguments), dict)
        json.dumps(json.loads(arguments), ensure_ascii=False).encode()


names = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=20)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])) | st.sampled_from(PARTS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(names, st.dictionaries(names, values, max_size=3)), min_size=1, max_size=3), st.integers(0, 9)
)
def test_every_valid_hermes_call_is_parsed(calls, seed):
    written = [(name, json.dumps(arguments, ensure_ascii=seed % 2 == 0)) for name, arguments in calls]
    text = "\n".join(hermes(name, arguments) for name, arguments in written)
    assert Read(cut(text, seed)).outcome == (None, None, written, 0)


plain = st.text(st.characters(exclude_categories=["Cs"])).filter(lambda t: "<" not in t)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from(["command", "path", "free text"]), plain), st.integers(0, 9))
def test_every_valid_qwen3_coder_call_is_parsed(values, seed):
    ((name, arguments),) = Read(cut(coder("exec", **values), seed), "qwen3-coder").calls
    assert (name, json.loads(arguments)) == ("exec", values)


# Hostile replies: each takes minutes with a parser that reads text repeatedly


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(
    "unit",
    [
        '<tool_call>{"',
        '<tool_call>{"</tool_call>',
        '<tool_call>{"":"</tool_call>',
        "<tool_call><function=a><parameter=b></tool_call>",
        "<tool_call><function=a><parameter=b>\n</parameter>",
        "<tool_call>",
        "<think>",
        "<",
        "\n",
        "</parameter>",
        "[",
    ],
)
@pytest.mark.parametrize("before", ["", "<tool_call>", '<tool_call>{"name": "', "<tool_call><function=a><parameter=b>"])
def test_long_hostile_reply_in_linear_time(style, unit, before):
    text = before + unit * (300_000 // len(unit))
    whole = Read(text, style)
    assert whole.calls == []
    assert "".join(((whole.reasoning or "") + (whole.content or "")).split()) in (
        "".join(text.split()),
        "".join(text.split()).removeprefix("<think>"),
    )
    assert Read(cut(text, 0, 4000), style).outcome == whole.outcome


@pytest.mark.parametrize("style", STYLES)
def test_long_arguments_in_small_chunks(style):
    value = "<b>\\n{}]</b>" * 20_000
    text = hermes(arguments=json.dumps({"command": value})) if style == "hermes" else coder(command=value)
    read = Read(cut(text, 1), style)
    assert json.loads(read.calls[0][1]) == {"command": value}
    assert read.parser.malformed == 0


# Stop strings


@settings(max_examples=500, deadline=None)
@given(
    st.text("abc", max_size=30),
    st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4),
    st.integers(0, 99),
)
def test_stop_strings_cut_at_first_complete_one(text, stops, seed):
    ends = [end for end in range(len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)]
    wanted = text
    if ends:
        wanted = text[: ends[0] - max(len(stop) for stop in stops if text[: ends[0]].endswith(stop))]
    cutter = StopStrings(stops)
    got, met = "", False
    for piece in cut(text, seed):
        more, met = cutter.push(piece)
        got += more
        assert wanted.startswith(got), "what is told stays true"
    assert (got + cutter.finish(), met) == (wanted, bool(ends))


def test_nothing_is_held_without_stop_strings():
    assert StopStrings(()).push("abc") == ("abc", False)


def test_text_after_stop_is_dropped():
    cutter = StopStrings(["END"])
    assert cutter.push("aEN") == ("a", False)
    assert cutter.push("Db") == ("", True)
    assert cutter.push("c") == ("", True)
    assert cutter.finish() == ""
