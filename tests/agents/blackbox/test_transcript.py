"""Turns of the gateway as steps: one step per turn, results with their calls, no message twice."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from clawgym.agents.blackbox.transcript import steps_of, with_executed
from clawgym.gateway.tool_server import ExecutedCall
from clawgym.records import EXECUTED, Observation, Step, ToolCall, Turn, executed_step

TASK = "Write 42 into out.txt."


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def result(call: str, text: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call, "content": text}


def reply(text: str | None, *calls: tuple[str, str, str], **more: Any) -> dict[str, Any]:
    made = [{"id": i, "type": "function", "function": {"name": n, "arguments": a}} for i, n, a in calls]
    return {"role": "assistant", "content": text, **({"tool_calls": made} if made else {}), **more}


def turn(*messages: dict[str, Any], reply: dict[str, Any], parent: int | None = None, **more: Any) -> Turn:
    return Turn(messages=messages, reply=reply, parent=parent, flaw="text-only", **more)


def said(steps: list[Step]) -> list[tuple[str, str]]:
    return [(step.source, step.message) for step in steps]


def test_steps_of_episode_with_tools_and_follow_up() -> None:
    calls = ("c1", "bash", '{"command": "ls"}'), ("c2", "read", '{"path": "a"}')
    turns = [
        turn(system("Be good."), user(TASK), reply=reply("I look.", *calls, reasoning_content="Hm.")),
        turn(result("c2", "of a"), result("c1", [{"type": "text", "text": "a\n"}]), reply=reply("Done."), parent=0),
        turn(user("Go on."), reply=reply(None), parent=1),
        turn(user("Go on."), reply=reply("No."), parent=2, finish_reason="error"),
    ]
    steps = list(steps_of(turns, TASK))
    assert said(steps) == [
        ("system", "Be good."),
        ("agent", "I look."),
        ("agent", "Done."),
        ("user", "Go on."),
        ("agent", ""),
        ("user", "Go on."),  # a real repetition is kept
        ("agent", "No."),
    ]
    look = steps[1]
    assert [(c.id, c.name, c.arguments) for c in look.tool_calls] == [
        ("c1", "bash", {"command": "ls"}),
        ("c2", "read", {"path": "a"}),
    ]
    assert [(o.call_id, o.content) for o in look.observations] == [("c1", "a\n"), ("c2", "of a")]
    assert look.reasoning == "Hm."
    assert steps[-1].extra == {"finish_reason": "error"}


def test_repeated_messages_of_branch_are_skipped() -> None:
    turns = [
        turn(system("Be good."), user(TASK), reply=reply("One.")),
        turn(system("Be good."), user(TASK), reply=reply("Another.")),
        turn(system("Sum up."), user(f"He said: {TASK}"), reply=reply("He wants 42."), role="compaction"),
        turn(system("Be good."), user("Before: He wants 42."), reply=reply("Yes.")),
    ]
    steps = list(steps_of(turns, TASK))
    assert said(steps) == [
        ("system", "Be good."),
        ("agent", "One."),
        ("agent", "Another."),
        ("system", "Sum up."),
        ("user", f"He said: {TASK}"),
        ("agent", "He wants 42."),
        ("user", "Before: He wants 42."),
        ("agent", "Yes."),
    ]
    assert [step.extra for step in steps[3:6]] == [{"role": "compaction"}] * 3


def test_stripped_instruction_is_not_repeated() -> None:
    assert said(list(steps_of([turn(user(TASK), reply=reply("Yes."))], f"\n {TASK}\n"))) == [("agent", "Yes.")]


def test_non_object_arguments_are_kept() -> None:
    for text in ("", "[1]", "null", '{"a": ', "[" * 100_000):
        (step,) = steps_of([turn(reply=reply(None, ("c", "bash", text)))], TASK)
        assert step.tool_calls[0].arguments == {"arguments": text}


TEXTS = st.text(max_size=8)
CONTENT = (
    TEXTS
    | st.none()
    | st.lists(
        st.fixed_dictionaries({"type": st.just("text"), "text": TEXTS})
        | st.fixed_dictionaries({"type": st.just("image"), "sha256": st.just("0" * 64)}),
        max_size=3,
    )
)
IDS = st.sampled_from(["c1", "c2", "c3", ""])
MESSAGES = (
    st.builds(system, TEXTS)
    | st.builds(user, CONTENT)
    | st.builds(result, IDS, CONTENT)
    | st.builds(reply, TEXTS, st.tuples(IDS, TEXTS, TEXTS))
)
REPLIES = st.builds(reply, TEXTS | st.none()) | st.builds(
    reply, TEXTS | st.none(), st.tuples(IDS, TEXTS, TEXTS | st.just('{"command": "ls"}'))
)


def executed(name: str, turns: int, content: str | None = "ok", /, **arguments: Any) -> ExecutedCall:
    seen = None if content is None else Observation(content)
    return ExecutedCall(ToolCall(f"task_{name}{turns}", name, arguments), turns, seen)


def test_executed_calls_belong_to_the_turn_that_wrote_them() -> None:
    """By name without the program's prefix, and by arguments without the program's own; also before it is stored."""
    one = ("c1", "mcp__task__add", '{"a": 1, "risk": "LOW"}'), ("c2", "Bash", '{"command": "ls"}')
    turns = [
        turn(user(TASK), reply=reply("", *one)),
        turn(result("c1", "1"), reply=reply("", ("c3", "mcp__task__add", '{"a": 1}')), parent=0),
        turn(result("c3", "1"), reply=reply("Done."), parent=1),
    ]
    made = [executed("add", 0, a=1), executed("add", 2, a=1.0), executed("add", 2, None, a=1), executed("rm", 3)]
    steps = with_executed(list(steps_of(turns, TASK)), 0, made)
    calls = [[(c["name"], c["sampled"], c["content"]) for c in step.extra[EXECUTED]] for step in steps]
    assert calls == [[("add", True, "ok")], [("add", True, "ok")], [("add", False, None), ("rm", False, "ok")]]
    assert [len(step.tool_calls) for step in steps] == [2, 1, 0]
    seen = [executed_step(step) for step in steps]
    assert [[c.name for c in step.tool_calls] for step in seen] == [["add"], ["add"], ["add", "rm"]]
    assert [len(step.observations) for step in seen] == [1, 1, 1]


def test_calls_of_a_later_message_are_not_given_to_an_earlier_turn() -> None:
    turns = [turn(user("And?"), reply=reply("", ("c1", "task_add", "{}")))]
    (step,) = with_executed(list(steps_of(turns, TASK, asked={"And?"})), 4, [executed("add", 5), executed("add", 4)])
    assert [call["sampled"] for call in step.extra[EXECUTED]] == [True, False]
    assert with_executed([], 0, []) == []
    (alone,) = with_executed([], 0, [executed("add", 0)])
    assert (alone.source, alone.extra[EXECUTED][0]["sampled"]) == ("agent", False)


def test_messages_that_a_program_adds_to_a_dialogue_are_of_the_system() -> None:
    turns = [
        turn(user("Hello."), user("<reminder>"), reply=reply("Hi.")),
        turn(user("Yes."), user("<reminder>"), reply=reply("Done."), parent=0),
    ]
    steps = list(steps_of(turns, TASK, asked={"Hello.", "Yes."}))
    assert said(steps) == [("system", "<reminder>"), ("agent", "Hi."), ("agent", "Done.")]


@st.composite
def episodes(draw: st.DrawFn) -> list[Turn]:
    turns: list[Turn] = []
    for n in range(draw(st.integers(0, 5))):
        parent = draw(st.none() | st.integers(0, n - 1)) if n else None
        role: Any = draw(st.sampled_from(["main", "main", "subagent", "unknown"]))
        messages = draw(st.lists(MESSAGES, max_size=4))
        turns.append(turn(*messages, reply=draw(REPLIES), parent=parent, role=role))
    return turns


@given(episodes(), TEXTS)
def test_steps_of_arbitrary_turns(turns: list[Turn], instruction: str) -> None:
    steps = list(steps_of(turns, instruction))
    agents = [step for step in steps if step.source == "agent"]
    assert [step.message for step in agents] == [turn.reply["content"] or "" for turn in turns]
    for step, of in zip(agents, turns, strict=True):
        calls = of.reply.get("tool_calls", [])
        assert [(c.id, c.name) for c in step.tool_calls] == [(c["id"], c["function"]["name"]) for c in calls]
        assert {o.call_id for o in step.observations} <= {c["id"] for c in calls}
        assert step.extra == ({} if of.role == "main" else {"role": of.role})
    others = [step for step in steps if step.source != "agent"]
    given_ = [m for of in turns for m in of.messages if m["role"] in ("user", "system")]
    assert len(others) <= len(given_)
    assert all(not step.tool_calls and not step.observations for step in others)
    news = {(step.source, step.message.strip()) for step in others} | {("user", instruction.strip())}
    texts = {(m["role"], "".join(p.get("text", "") for p in m["content"]) if isinstance(m["content"], list)
              else m["content"] or "") for m in given_}  # fmt: skip
    assert {(role, text.strip()) for role, text in texts} <= news  # no message is missing
