"""Find the turn that a history continues: documented rewrites match, other differences open a branch."""

from __future__ import annotations

import copy
import json
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clawgym.gateway.stitch import Node, Tree, message_keys, same_reply, tools_key, with_stored_ids


def said(content=None, *calls, reasoning=None):
    message = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [
            {"id": i, "type": "function", "function": {"name": n, "arguments": a}} for i, n, a in calls
        ]
    return message


def user(text):
    return {"role": "user", "content": text}


def result(call_id, text):
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def add(tree, parent, messages, reply, *, index, tools="", ids=(1,)):
    before = [] if parent is None else [parent.reply]
    keys = message_keys([*before, *messages])[len(before) :]
    node = Node(
        index=index,
        parent=parent,
        keys=tuple(keys),
        given=tuple(m if m["role"] == "assistant" else None for m in messages),
        reply=reply,
        tools=tools,
        role="main",
        ids=array("i", ids),
        sampled=len(ids),
    )
    tree.add(node)
    return node


def match(tree, messages, tools="", by_ids=True):
    return tree.match(messages, message_keys(messages), tools, by_ids=by_ids)


CALL = ("call1", "exec", '{"command": "ls"}')


@pytest.mark.parametrize(
    ("sampled", "replayed", "same"),
    [
        ("1.0", "1", True),
        ("4.450705672162731e+16", "44507056721627310", True),  # as JavaScript formats it
        ("12345678901234567890", "12345678901234567000", True),
        ("1" + 400 * "0", "1" + 400 * "0", True),
        ("1" + 400 * "0", "2" + 400 * "0", False),
        ("1" + 400 * "0", "null", False),
        ("1", "true", False),
        ("0", "false", False),
        ("1", "2", False),
    ],
)
def test_numbers_are_compared_as_doubles(sampled, replayed, same):
    replies = (said("hi", ("call1", "exec", f'{{"n": [{number}]}}')) for number in (sampled, replayed))
    assert (same_reply(*replies) is not None) == same


@pytest.mark.parametrize(
    ("replayed", "rewrites"),
    [
        (said("hi", CALL), set()),
        (said("hi ", CALL), {"spacing"}),
        (said("hi", ("c", *CALL[1:])), {"ids"}),
        (said("hi", ("call1", "exec", '{"command":"ls"}')), {"spacing"}),
        (said("hi", ("call1", "bash", '{"command": "ls"}')), {"alias"}),
        (said("hi", ("call1", "bash", '{"command":"ls"}')), {"alias", "spacing"}),
        (said("ho", CALL), None),
        (said("hi"), None),
        (said("hi", CALL, CALL), None),
        (said("hi", ("call1", "exec", '{"command": "ls -l"}')), None),
        (said("hi", ("call1", "exec", '{"command": "ls", "timeout": 1}')), None),
        (said("hi", CALL, reasoning="hm"), None),
    ],
)
def test_same_reply_rewrites(replayed, rewrites):
    found = same_reply(said("hi", CALL), replayed)
    assert found == (None if rewrites is None else frozenset(rewrites))


def test_reasoning_may_be_dropped_but_not_changed():
    assert same_reply(said("a", reasoning="because"), said("a")) == {"reasoning"}
    assert same_reply(said("a", reasoning="because"), said("a", reasoning="because")) == set()
    assert same_reply(said("a", reasoning="because"), said("a", reasoning="why not")) is None


def test_repaired_arguments_match():
    broken = said(None, ("c1", "exec", '{"command": "echo one'))
    assert same_reply(broken, said(None, ("c1", "exec", '{"command":"echo one"}'))) == {"repair"}
    assert same_reply(broken, said(None, ("c1", "bash", '{"command":"echo one"}'))) is None, "two doubts are too many"
    assert same_reply(broken, said(None, ("c1", "exec", "still broken"))) is None


def test_true_is_not_one():
    assert same_reply(said(None, ("c", "f", '{"a": 1}')), said(None, ("c", "f", '{"a": true}'))) is None


def test_history_continues_deepest_turn():
    tree = Tree()
    first = add(tree, None, [user("a")], said("b"), index=0)
    second = add(tree, first, [user("c")], said("d"), index=1)
    found = match(tree, [user("a"), said("b"), user("c"), said("d"), user("e")])
    assert (found.node, found.used) == (second, 4)
    edited = match(tree, [user("a"), said("b"), user("X"), said("d"), user("e")])
    assert (edited.node, edited.used) == (first, 2)
    assert match(tree, [user("a"), said("X"), user("c")]).node is None
    assert match(tree, [user("a")]).node is None
    assert match(tree, [user("a"), said("b"), user("c")], tools="other").node is None


def test_equal_replies_with_different_ids_are_ambiguous():
    tree = Tree()
    add(tree, None, [user("a")], said("b"), index=0, ids=(1, 2))
    add(tree, None, [user("a")], said("b"), index=1, ids=(1, 3))
    found = match(tree, [user("a"), said("b"), user("c")])
    assert found.node is None
    assert found.ambiguous


def test_equal_replies_with_same_ids_match():
    tree = Tree()
    add(tree, None, [user("a")], said("b"), index=0)
    again = add(tree, None, [user("a")], said("b"), index=1)
    found = match(tree, [user("a"), said("b"), user("c")])
    assert (found.node, found.ambiguous) == (again, False)


def test_turn_without_ids_is_not_continued_by_ids():
    tree = Tree()
    node = add(tree, None, [user("a")], said("b"), index=0, ids=())
    history = [user("a"), said("b"), user("c")]
    assert match(tree, history).node is None
    assert match(tree, history, by_ids=False).node is node


def test_results_are_matched_by_call_position():
    reply = said(None, ("x1", "f", "{}"), ("x2", "g", "{}"))
    tree = Tree()
    first = add(tree, None, [user("a")], reply, index=0)
    second = add(tree, first, [result("x1", "1"), result("x2", "2")], said("ok"), index=1)
    renamed = said(None, ("y1", "f", "{}"), ("y2", "g", "{}"))
    rest = [said("ok"), user("b")]
    found = match(tree, [user("a"), renamed, result("y1", "1"), result("y2", "2"), *rest])
    assert found.node is second
    assert found.rewrites == {"ids"}
    swapped = match(tree, [user("a"), renamed, result("y2", "1"), result("y1", "2"), *rest])
    assert swapped.node is first, "results of other calls are other messages"
    assert with_stored_ids([result("y2", "2")], reply, renamed) == [result("x2", "2")]


def test_different_tools_open_branch():
    tools = [{"type": "function", "function": {"name": "a"}}]
    assert tools_key([]) == ""
    assert tools_key(tools) == tools_key(copy.deepcopy(tools))
    assert tools_key(tools) != tools_key(tools * 2)


TEXT = st.text(max_size=6)
ARGUMENTS = st.dictionaries(TEXT, st.one_of(st.integers(), TEXT, st.booleans(), st.none(), st.lists(st.integers())))


@st.composite
def replies(draw):
    calls = draw(st.lists(st.tuples(st.sampled_from("fgh"), ARGUMENTS), max_size=3))
    return said(
        draw(st.one_of(st.none(), TEXT)),
        *((f"c{n}", name, json.dumps(arguments)) for n, (name, arguments) in enumerate(calls)),
        reasoning=draw(st.one_of(st.none(), TEXT)),
    )


def rewritten(reply, draw):
    """``reply`` after random documented rewrites."""
    out = copy.deepcopy(reply)
    if draw(st.booleans()):
        out.pop("reasoning_content", None)
    if out["content"] and draw(st.booleans()):
        out["content"] = out["content"].strip()
    for n, call in enumerate(out.get("tool_calls", ())):
        function = call["function"]
        if draw(st.booleans()):
            call["id"] = f"renamed{n}"
        if draw(st.booleans()):
            function["arguments"] = json.dumps(json.loads(function["arguments"]), separators=(",", ":"), indent=1)
        if draw(st.booleans()):
            function["name"] = "alias"
    return out


@st.composite
def sessions(draw):
    """A tree of turns, and for each the history that an agent would send to continue it."""
    tree = Tree()
    histories: list[tuple[Node | None, list]] = [(None, [])]
    for index in range(draw(st.integers(1, 8))):
        parent, history = draw(st.sampled_from(histories))
        last = history[-1] if history else {}
        new = [result(call["id"], draw(TEXT)) for call in last.get("tool_calls", ())]
        new.append(user(f"{index} {draw(TEXT)}"))
        reply = draw(replies())
        shown = rewritten(reply, draw)
        before = message_keys([*history, *new])[len(history) :]
        node = Node(index, parent, tuple(before), (None,) * len(new), reply, "", "main", array("i", [index]), 1)
        tree.add(node)
        histories.append((node, [*history, *new, shown]))
    return tree, histories[1:]


@settings(max_examples=400, deadline=None)
@given(sessions())
def test_rewritten_history_finds_every_turn(session):
    tree, histories = session
    for node, history in histories:
        found = match(tree, [*history, user("next")])
        assert found.node is node
        assert found.used == len(history)
        assert found.node.all_ids().tolist() == [n.index for n in reversed(list(node.path()))]


@settings(max_examples=300, deadline=None)
@given(sessions(), st.data())
def test_edited_history_does_not_continue_turn(session, data):
    tree, histories = session
    _, history = data.draw(st.sampled_from(histories))
    at = data.draw(st.integers(0, len(history) - 1))
    edited = copy.deepcopy(history)
    if edited[at]["role"] == "assistant":
        edited[at]["content"] = (edited[at]["content"] or "") + "!edited"
    else:
        edited[at]["content"] += "!edited"
    found = match(tree, [*edited, user("next")])
    assert found.used <= at
