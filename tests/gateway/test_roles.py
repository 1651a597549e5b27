"""What a call is for, from the words alone; what is unsure is unknown."""

from __future__ import annotations

import pytest

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
async def agent(desk):
    """``await agent(say, (messages, tools), ...)`` -> the roles that the turns got."""

    async def work(say, *calls, headers=None):
        d = await desk(say)
        for messages, tools in calls:
            await d.chat(messages, extra_headers=headers or {}, **({"tools": tools} if tools else {}))
        return [turn.role for turn in d.turns]

    return work


async def test_the_first_conversation_is_main(agent):
    more = history(MAIN, TASK, "ok", "go on")
    assert await agent("ok", (history(MAIN, TASK), TOOLS), (more, TOOLS)) == ["main", "main"]


async def test_a_new_start_with_the_same_request_is_main(agent):
    edited = history(MAIN, TASK, "something it never said", "go on")
    assert await agent("ok", (history(MAIN, TASK), TOOLS), (edited, TOOLS)) == ["main", "main"]


async def test_another_request_of_the_same_agent_is_unknown(agent):
    assert await agent("ok", (history(MAIN, TASK), TOOLS), (history(MAIN, "Something else."), TOOLS)) == [
        "main",
        "unknown",
    ]


async def test_a_job_that_was_given_in_a_call_is_a_subagents(agent):
    calls = (history(MAIN, TASK), TOOLS), (history(HELP, JOB), TOOLS[:1]), (history(HELP, JOB, "ok", "more"), TOOLS[:1])
    roles = await agent(lambda p, n: [SPAWN, "ok", "ok"][n], *calls)
    assert roles == ["main", "subagent", "subagent"]


async def test_a_job_that_nobody_gave_is_unknown(agent):
    calls = (history(MAIN, TASK), TOOLS), (history(HELP, JOB), TOOLS[:1])
    assert await agent("ok", *calls) == ["main", "unknown"]


async def test_a_compaction_and_what_comes_after_it(agent):
    said = "January has 70 words and February has 50 words."
    calls = (
        (history(MAIN, TASK), TOOLS),
        (history("You summarise.", f"user: {TASK}\nassistant: {said}"), []),
        (history(MAIN, f"What happened so far: {SUMMARY}"), TOOLS),
    )
    roles = await agent(lambda p, n: [said, SUMMARY, "ok"][n], *calls)
    assert roles == ["main", "compaction", "main"]


async def test_a_summary_that_was_not_written_here_is_unknown(agent):
    calls = (history(MAIN, TASK), TOOLS), (history(MAIN, f"What happened so far: {SUMMARY}"), TOOLS)
    assert await agent("ok", *calls) == ["main", "unknown"]


async def test_what_an_agent_says_can_only_take_away(agent):
    first = (history(MAIN, TASK), TOOLS)
    assert await agent("ok", first, headers={"x-clawgym-role": "main"}) == ["main"]
    assert await agent("ok", first, headers={"x-clawgym-role": "compaction"}) == ["unknown"]
    assert await agent("ok", first, headers={"x-clawgym-role": "king"}) == ["unknown"]
    elsewhere = (history(MAIN, "Something else."), TOOLS)
    roles = await agent("ok", first, elsewhere, headers={"x-clawgym-role": "main"})
    assert roles == ["main", "unknown"], "its word makes nothing main"
