"""Roles of calls, determined from their texts alone; uncertain calls are unknown.

The requests have the structure of those by OpenClaw 2026.4.1 (see ``test_openclaw_roles.py``), with other texts.
"""

from __future__ import annotations

import json

import pytest

from clawgym.pool import sequences_of

MAIN = "You are a careful assistant."
HELP = "You are a helper for one small job."
TASK = "Count the words of every file below notes/ and sum them up."
JOB = "Look into notes/april.md and report how many words it has."
TOOLS = [{"type": "function", "function": {"name": n, "parameters": {"type": "object"}}} for n in ("exec", "spawn")]
SPAWN = f'<tool_call>\n{{"name": "spawn", "arguments": {{"task": "{JOB}"}}}}\n</tool_call>'
SUMMARY = "The words of january and february were counted: 120 in all so far."


def history(system, *texts):
    roles = ["user", "assistant"]
    return [{"role": "system", "content": system}] + [
        {"role": roles[n % 2], "content": text} for n, text in enumerate(texts)
    ]


@pytest.fixture
async def agent(make_gateway):
    """``await agent(say, (messages, tools), ...)`` returns the roles of the turns."""

    async def work(say, *calls, headers=None):
        setup = await make_gateway(say)
        for messages, tools in calls:
            await setup.chat(messages, extra_headers=headers or {}, **({"tools": tools} if tools else {}))
        return [turn.role for turn in setup.turns]

    return work


async def test_first_conversation_is_main(agent):
    more = history(MAIN, TASK, "ok", "go on")
    assert await agent("ok", (history(MAIN, TASK), TOOLS), (more, TOOLS)) == ["main", "main"]


async def test_restart_with_same_request_is_main(agent):
    edited = history(MAIN, TASK, "something it never said", "go on")
    assert await agent("ok", (history(MAIN, TASK), TOOLS), (edited, TOOLS)) == ["main", "main"]


async def test_different_request_of_same_agent_is_unknown(agent):
    assert await agent("ok", (history(MAIN, TASK), TOOLS), (history(MAIN, "Something else."), TOOLS)) == [
        "main",
        "unknown",
    ]


async def test_delegated_request_is_subagent(agent):
    calls = (history(MAIN, TASK), TOOLS), (history(HELP, JOB), TOOLS[:1]), (history(HELP, JOB, "ok", "more"), TOOLS[:1])
    roles = await agent(lambda p, n: [SPAWN, "ok", "ok"][n], *calls)
    assert roles == ["main", "subagent", "subagent"]


async def test_undelegated_request_is_unknown(agent):
    calls = (history(MAIN, TASK), TOOLS), (history(HELP, JOB), TOOLS[:1])
    assert await agent("ok", *calls) == ["main", "unknown"]


async def test_compaction_and_following_turn(agent):
    said = "January has 70 words and February has 50 words."
    calls = (
        (history(MAIN, TASK), TOOLS),
        (history("You summarise.", f"user: {TASK}\nassistant: {said}"), []),
        (history(MAIN, f"What happened so far: {SUMMARY}"), TOOLS),
    )
    roles = await agent(lambda p, n: [said, SUMMARY, "ok"][n], *calls)
    assert roles == ["main", "compaction", "main"]


async def test_summary_from_elsewhere_is_unknown(agent):
    calls = (history(MAIN, TASK), TOOLS), (history(MAIN, f"What happened so far: {SUMMARY}"), TOOLS)
    assert await agent("ok", *calls) == ["main", "unknown"]


SUMMER = "You sum up conversations. Only output the summary."
LOOKED = "I have looked into the notes of january, which are long."


def tool_call(name, number=0, **arguments):
    return {
        "id": f"call{number}",
        "type": "function",
        "function": {"name": name, "arguments": json.dumps(arguments, separators=(",", ":"))},
    }


def told(*parts):
    """A conversation as one text, as in a request for a summary."""
    return "<conversation>\n" + "\n\n".join(parts) + "\n</conversation>\n\nSum this up."


async def test_delegated_request_at_end_of_message(agent):
    first = f"[Sat 10:00] You are a sub-agent (depth 1/1).\n\n[Task]: {JOB}"
    again = [*history(HELP + " Other words.", first, "ok"), {"role": "user", "content": "go on"}]
    calls = (history(MAIN, TASK), TOOLS), (history(HELP, first), TOOLS[:1]), (again, TOOLS[:1])
    roles = await agent(lambda p, n: [SPAWN, "ok", "ok"][n], *calls)
    assert roles == ["main", "subagent", "subagent"], "its system prompt may change"


async def test_delegated_request_inside_message_is_no_evidence(agent):
    calls = (history(MAIN, TASK), TOOLS), (history(HELP, f"Judge this job: {JOB} Is it safe?"), [])
    assert await agent(lambda p, n: [SPAWN, "ok"][n], *calls) == ["main", "unknown"]


async def test_subagent_with_same_system_prompt(agent):
    calls = (history(MAIN, TASK), TOOLS), (history(MAIN, JOB), TOOLS), (history(MAIN, JOB, "ok", "go on"), TOOLS)
    roles = await agent(lambda p, n: [SPAWN, "ok", "ok"][n], *calls)
    assert roles == ["main", "subagent", "subagent"]


async def test_delegated_copy_of_first_request_is_unknown(agent):
    spawn = SPAWN.replace(JOB, TASK)
    calls = (history(MAIN, TASK), TOOLS), (history(MAIN, TASK), TOOLS)
    assert await agent(lambda p, n: [spawn, "ok"][n], *calls) == ["main", "unknown"]


async def test_request_delegated_by_unknown_call_is_unknown(agent):
    calls = (history(MAIN, TASK), TOOLS), (history(HELP, "Something else."), TOOLS), (history(HELP, JOB), TOOLS[:1])
    assert await agent(lambda p, n: ["ok", SPAWN, "ok"][n], *calls) == ["main", "unknown", "unknown"]


async def test_compaction_in_parts(agent):
    """The first part repeats the request; later ones only results, the summary so far, or both."""
    result = "february: 50 words, " * 30
    run = tool_call("exec", command="wc -w notes/*")
    work = [*history(MAIN, TASK), {"role": "assistant", "content": LOOKED, "tool_calls": [run]}]
    work.append({"role": "tool", "tool_call_id": "call0", "content": result})
    parts = "January was counted: 70 words in all its notes.", "February was counted: 50 words in all its notes."
    merged = "January has 70 words and february has 50 words; march is next."
    said = [LOOKED + '\n<tool_call>\n{"name": "exec", "arguments": {"command": "wc -w notes/*"}}\n</tool_call>', "done"]
    roles = await agent(
        lambda p, n: [*said, *parts, merged, "ok"][n],
        (history(MAIN, TASK), TOOLS),
        (work, TOOLS),
        (history(SUMMER, told(f"[User]: {TASK}", f"[Assistant]: {LOOKED}")), []),
        (history(SUMMER, told(f"[Tool result]: {result[:400]}\n[... cut]")), []),
        (history(SUMMER, told(*(f"[User]: {part}" for part in parts))), []),
        (history(MAIN, f"Before this point:\n<summary>\n{merged}\n\n## Files\nnone\n</summary>"), TOOLS),
    )
    assert roles == ["main", "main", "compaction", "compaction", "compaction", "main"]


async def test_compaction_of_turn_prefix(agent):
    second = "Now count the lines of the same files, please."
    calls = (
        (history(MAIN, TASK), TOOLS),
        (history(MAIN, TASK, LOOKED, second), TOOLS),
        (history(SUMMER, told(f"[User]: {second}", f"[Assistant]: {LOOKED} And again.")), []),
    )
    roles = await agent(lambda p, n: [LOOKED, f"{LOOKED} And again.", "ok"][n], *calls)
    assert roles == ["main", "main", "compaction"]


async def test_summary_without_history_is_unknown(agent):
    assert await agent("ok", (history(MAIN, TASK), TOOLS), (history(SUMMER, told()), [])) == ["main", "unknown"]


async def test_summary_by_unknown_call_is_no_evidence(agent):
    calls = (
        (history(MAIN, TASK), TOOLS),
        (history(SUMMER, told()), []),
        (history(MAIN, f"Before this point: {SUMMARY}"), TOOLS),
    )
    assert await agent(lambda p, n: ["ok", SUMMARY, "ok"][n], *calls) == ["main", "unknown", "unknown"]


async def test_subagent_continues_after_its_compaction(agent):
    calls = (
        (history(MAIN, TASK), TOOLS),
        (history(HELP, JOB), TOOLS[:1]),
        (history(SUMMER, told(f"[User]: {JOB}", f"[Assistant]: {LOOKED}")), []),
        (history(HELP, f"Before this point: {SUMMARY}"), TOOLS[:1]),
    )
    roles = await agent(lambda p, n: [SPAWN, LOOKED, SUMMARY, "ok"][n], *calls)
    assert roles == ["main", "subagent", "compaction", "subagent"]


async def test_memory_flush_turn_is_main(agent):
    """Another system prompt and other tools in the same conversation (OpenClaw's memory flush)."""
    flush = history(f"{MAIN} Keep what lasts.", TASK, LOOKED, "Store what lasts in memory/, or say NO_REPLY.")
    assert await agent(LOOKED, (history(MAIN, TASK), TOOLS), (flush, TOOLS[1:])) == ["main", "main"]


async def test_replayed_conversation_without_tools_is_unknown(agent):
    judge = history("You judge conversations.", TASK, LOOKED, "Was that good?")
    assert await agent(LOOKED, (history(MAIN, TASK), TOOLS), (judge, [])) == ["main", "unknown"]


async def test_history_without_beginning(agent):
    kept = [history(MAIN, "x")[0], {"role": "user", "content": "And now?"}]
    kept += [{"role": "assistant", "content": LOOKED}, {"role": "user", "content": "go on"}]
    assert await agent(LOOKED, (history(MAIN, TASK), TOOLS), (kept, TOOLS)) == ["main", "main"]
    kept[2] = {"role": "assistant", "content": "It never said this, however long it is."}
    assert await agent(LOOKED, (history(MAIN, TASK), TOOLS), (kept, TOOLS)) == ["main", "unknown"]


async def test_subagent_report_in_history_continues_turn(make_gateway):
    """OpenClaw puts a line before a sub-agent's report in the history."""
    setup = await make_gateway("ok")
    report = "[Sat 10:00] A task is done. Result: 31 words."
    line = "[Inter-session message] sourceSession=agent:main:subagent:1 sourceChannel=webchat sourceTool=x\n"
    await setup.chat(history(MAIN, TASK), tools=TOOLS)
    await setup.chat(history(MAIN, TASK, "ok", report), tools=TOOLS)
    await setup.chat(history(MAIN, TASK, "ok", line + report, "ok", "And now?"), tools=TOOLS)
    await setup.chat(history(MAIN, TASK, "ok", "Some line.\n" + report, "ok", "And now?"), tools=TOOLS)
    assert [turn.parent for turn in setup.turns] == [None, 0, 1, 0]


async def test_internal_context_of_openclaw_continues_turn(make_gateway):
    """OpenClaw 2026.9.6 ends every call with a user message that the next call does not have."""
    setup = await make_gateway("ok")
    conversation = history(MAIN, TASK)
    for n in range(3):
        mark = "OPENCLAW_INTERNAL_CONTEXT>>>"
        passing = {"role": "user", "content": f"<<<BEGIN_{mark}\nthe time is 10:0{n}\n<<<END_{mark}"}
        await setup.chat([*conversation, passing], tools=TOOLS)
        conversation += [{"role": "assistant", "content": "ok"}, {"role": "user", "content": "go on"}]
    turns = setup.turns
    assert [(turn.role, turn.parent) for turn in turns] == [("main", None), ("main", 0), ("main", 1)]
    (sample,) = sequences_of(turns)
    assert sample.ids == (*setup.engine.seen[2].prompt, *setup.engine.seen[2].sampled), "each reply saw what it saw"
    assert setup.gateway.stats()["rewrites"] == {"context": 2}
    conversation[1] = {"role": "user", "content": "Another task, which was never given."}
    await setup.chat(conversation, tools=TOOLS)
    assert setup.turns[3].parent is None


async def test_other_transient_user_message_opens_branch(make_gateway):
    setup = await make_gateway("ok")
    ephemeral = {"role": "user", "content": "<<<BEGIN_CONTEXT>>> the time is 10:00 <<<END_CONTEXT>>>"}
    conversation = history(MAIN, TASK)
    for _ in range(3):
        await setup.chat([*conversation, ephemeral], tools=TOOLS)
        conversation += [{"role": "assistant", "content": "ok"}, {"role": "user", "content": "go on"}]
    turns = setup.turns
    assert [(turn.role, turn.parent) for turn in turns] == [("main", None)] * 3
    samples = sequences_of(turns)
    assert [sample.turns for sample in samples] == [(0,), (1,), (2,)], "a row a turn, each exactly what was sampled"
    assert [sample.ids for sample in samples] == [(*s.prompt, *s.sampled) for s in setup.engine.seen]
    assert setup.gateway.stats()["branches"] == 3


async def test_declared_role_can_only_downgrade(agent):
    first = (history(MAIN, TASK), TOOLS)
    assert await agent("ok", first, headers={"x-clawgym-role": "main"}) == ["main"]
    assert await agent("ok", first, headers={"x-clawgym-role": "compaction"}) == ["unknown"]
    assert await agent("ok", first, headers={"x-clawgym-role": "king"}) == ["unknown"]
    elsewhere = (history(MAIN, "Something else."), TOOLS)
    roles = await agent("ok", first, elsewhere, headers={"x-clawgym-role": "main"})
    assert roles == ["main", "unknown"], "its word makes nothing main"
