"""Next states of turns, by index in the tree of turns."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawgym.records import (
    Desktop,
    Episode,
    Image,
    Observation,
    Outcome,
    Step,
    Task,
    ToolCall,
    Turn,
    VerifierResult,
    VerifierSpec,
)
from clawgym.rewards.states import judgeables, next_states

TASK = Task("count", "Count them.", VerifierSpec("reward_sh", ()))


def user(text: object) -> dict[str, object]:
    return {"role": "user", "content": text}


def tool(id: str, text: object = "ok") -> dict[str, object]:
    return {"role": "tool", "tool_call_id": id, "content": text}


def says(text: str | None, *calls: str) -> dict[str, object]:
    made = [
        {"id": id, "type": "function", "function": {"name": "bash", "arguments": f'{{"n":"{id}"}}'}} for id in calls
    ]
    return {"role": "assistant", "content": text, **({"tool_calls": made} if made else {})}


def turn(messages: list[dict[str, object]], reply: dict[str, object], **more: object) -> Turn:
    return Turn(messages=tuple(messages), reply=reply, flaw="text-only", **more)  # type: ignore[arg-type]


FIRST = turn([{"role": "system", "content": "s"}, user("Count them.")], says(None, "a", "b"))


def test_all_results_of_a_turn_are_its_next_state() -> None:
    turns = [
        FIRST,
        turn([tool("a", "1"), tool("b", "2"), user([{"type": "image", "sha256": "ab"}])], says("three"), parent=0),
        turn([user("no, four")], says("four"), parent=1),
    ]
    found = next_states(turns)
    assert [m.get("content") for m in found[0].messages[:2]] == ["1", "2"]
    assert found[0].images == ("ab",)
    assert found[1].messages == (user("no, four"),)
    assert set(found) == {0, 1}
    with_outcome = next_states(turns, outcome="2 of 3")
    assert with_outcome[2].messages == ()
    assert with_outcome[2].outcome == "2 of 3"
    assert with_outcome[0].outcome is None


def test_other_roles_neither_have_a_next_state_nor_are_one() -> None:
    turns = [
        FIRST,
        turn([user("sum up")], says("a summary"), parent=0, role="compaction"),
        turn([tool("a", "not this one")], says("x"), parent=0, role="subagent"),
        turn([tool("x")], says("y"), parent=2, role="unknown"),
        turn([tool("a"), tool("b")], says("done"), parent=0),
    ]
    assert set(next_states(turns, outcome="solved")) == {0, 4}
    assert next_states(turns)[0].messages == (tool("a"), tool("b"))


def test_branches_have_their_own_next_states() -> None:
    turns = [
        FIRST,
        turn([tool("a"), tool("b")], says("left"), parent=0),
        turn([tool("a"), tool("b"), user("hurry")], says("right", "c"), parent=0),
        turn([tool("c", "after right")], says("end"), parent=2),
    ]
    found = next_states(turns, outcome="failed")
    assert found[0].messages == (tool("a"), tool("b"))
    assert 1 not in found
    assert found[2].messages == (tool("c", "after right"),)
    assert found[3].outcome == "failed"


def test_an_aborted_turn_has_no_next_state_and_its_repetition_does_not_lend_it_one() -> None:
    turns = [
        FIRST,
        turn([tool("a"), tool("b")], says("cut off"), parent=0, finish_reason="aborted"),
        turn([tool("a"), tool("b")], says("whole"), parent=0),
        turn([user("go on")], says("fine"), parent=2),
    ]
    found = next_states(turns)
    assert set(found) == {0, 2}


def test_a_history_that_opened_a_branch_is_searched_for_the_reply() -> None:
    renamed = says(None, "a", "b")
    renamed["tool_calls"] = [{**c, "id": f"other-{c['id']}"} for c in renamed["tool_calls"]]  # type: ignore[attr-defined]
    root = turn([user("Count them."), renamed, tool("other-a", "1"), tool("other-b", "2")], says("three", "c"))
    assert next_states([FIRST, root])[0].messages == (tool("other-a", "1"), tool("other-b", "2"))
    twice = replace(root, messages=(*root.messages, *root.messages[1:]))
    assert next_states([FIRST, twice]) == {}  # which of them?
    said_again = turn([user("again")], says(None, "a", "b"), parent=0)
    assert 0 not in next_states([FIRST, turn([user("x")], says("y")), replace(said_again, parent=None), root])


def test_the_last_results_are_in_the_transcript_alone() -> None:
    calls = (ToolCall("call_1", "bash", {"n": "a"}), ToolCall("call_2", "bash", {"n": "b"}))
    seen = (Observation("one", "call_1"), Observation("two", "call_2", Image("cd", b"x")))
    step = Step("agent", "", "t", tool_calls=calls, observations=seen)
    found = next_states([FIRST], steps=[step])
    assert [m["tool_call_id"] for m in found[0].messages] == ["call_1", "call_2"]
    assert found[0].images == ("cd",)
    other = replace(step, tool_calls=(ToolCall("call_1", "bash", {"n": "z"}),))
    assert next_states([FIRST], steps=[other]) == {}
    assert next_states([FIRST], steps=[step, replace(other, observations=())]) == {}


@st.composite
def trees(draw: st.DrawFn) -> list[Turn]:
    turns: list[Turn] = []
    for index in range(draw(st.integers(0, 10))):
        parent = draw(st.one_of(st.none(), st.integers(0, index - 1))) if index else None
        role = draw(st.sampled_from(["main"] * 4 + ["subagent", "compaction", "unknown"]))
        results = [tool(f"{index}-{n}", f"result {index}-{n}") for n in range(draw(st.integers(0, 3)))]
        extra = draw(st.sampled_from([[], [user("hm")], [{"role": "system", "content": "s"}], [{"role": None}]]))
        reason = draw(st.sampled_from(["stop", "stop", "tool_calls", "aborted", "error", "length"]))
        reply = draw(st.sampled_from([says("a"), says("b", "c"), {"role": "assistant"}, {}]))
        turns.append(turn([*results, *extra], reply, parent=parent, role=role, finish_reason=reason))
    return turns


@given(trees(), st.sampled_from([None, "solved"]))
def test_next_states_are_those_of_finished_main_turns_and_come_from_their_own_continuation(
    turns: list[Turn], outcome: str | None
) -> None:
    found = next_states(turns, outcome=outcome)
    main = [n for n, t in enumerate(turns) if t.role == "main"]
    for index, state in found.items():
        assert state.turn == index
        assert index in main
        assert turns[index].finish_reason not in ("aborted", "error")
        assert (state.outcome is not None) == (index == main[-1] and outcome is not None)
        assert state.messages or state.outcome is not None
        children = [t for t in turns if t.parent == index and t.role == "main"]
        if state.messages and children:
            results = [m for m in children[0].messages if m.get("role") == "tool"]
            assert [m for m in state.messages if m.get("role") == "tool"] == results
        for message in state.messages:
            assert message.get("role") in ("user", "tool")


@given(trees(), st.data())
def test_turns_of_other_roles_change_nothing(turns: list[Turn], data: st.DataObject) -> None:
    """A turn that is not main, put anywhere, moves indices and no content."""
    place = data.draw(st.integers(0, len(turns)))
    moved = [replace(t, parent=t.parent + (t.parent >= place)) if t.parent is not None else t for t in turns]
    stranger = turn([tool("s", "secret")], says("a"), role="subagent")
    shifted = next_states([*moved[:place], stranger, *moved[place:]])
    assert {n - (n > place): s.messages for n, s in shifted.items()} == {
        n: s.messages for n, s in next_states(turns).items()
    }


def episode(**more: object) -> Episode:
    checks = {"a": 1.0, "b": 0.0}
    result = VerifierResult(checks, 0.5, 0.0, None)
    turns = (FIRST, turn([tool("a"), tool("b")], says("done"), parent=0))
    return replace(Episode("count", "h", 2, 0, "x", Outcome.FAILED, result=result, turns=turns), **more)  # type: ignore[arg-type]


def test_input_of_a_judge() -> None:
    first, second = judgeables(TASK, episode(), outcome=True)
    assert (first.episode, first.turn, second.turn) == ("count#2", 0, 1)
    assert first.setting == "terminal"
    assert first.history == FIRST.messages
    assert second.history == (*FIRST.messages, FIRST.reply, tool("a"), tool("b"))
    assert first.after.outcome is None
    assert second.after.outcome is not None
    assert "1 of 2 passed" in second.after.outcome
    assert len(judgeables(TASK, episode())) == 1
    assert len(judgeables(TASK, episode(outcome=Outcome.INFRA, result=None), outcome=True)) == 1
    assert judgeables("", episode().turns, id="chat-7")[0].setting == "chat"
    assert judgeables(replace(TASK, desktop=Desktop()), episode())[0].setting == "gui"
    with pytest.raises(ValueError, match="no outcome"):
        judgeables(TASK, episode().turns, outcome=True)
    with pytest.raises(ValueError, match="choose one of them"):
        judgeables(TASK, episode(), setting="robot")  # type: ignore[arg-type]


def test_judge_input_is_json() -> None:
    """The input of a judge can be serialised."""
    (first, *_) = judgeables(TASK, episode())
    json.dumps([first.history, first.action, first.after.messages])
    with pytest.raises(FrozenInstanceError):  # the judges of a pool share it
        first.task = ""  # type: ignore[misc]
