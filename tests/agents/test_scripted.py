"""noop, oracle, script and sloppy, in real sandboxes."""

from __future__ import annotations

import pytest

from clawgym.agents import NoopAgent, OracleAgent, ScriptAgent, SloppyAgent
from clawgym.agents.oracle import SOLUTION_DIR
from clawgym.errors import AgentError, SandboxDied
from clawgym.records import Limits, TaskFile

from .conftest import kill_from_outside, make_task


async def test_noop_changes_nothing(work):
    attempt = await work()
    report = await attempt.run(NoopAgent())
    assert report.stop == "submitted"
    assert attempt.steps == []
    assert (await attempt.sandbox.exec(["ls", "-A", attempt.context.task.workspace])).output == b""


async def test_oracle_runs_solution_and_removes_it(work):
    solution = (
        TaskFile("solve.sh", b'pwd > where.txt\ncp "$(dirname "$0")/data/answer" out.txt\nexit 3\n'),
        TaskFile("data/answer", b"42\n"),
    )
    attempt = await work(make_task(solution=solution))
    report = await attempt.run(OracleAgent())
    assert report.stop == "submitted"
    assert await attempt.file("out.txt") == "42\n"
    assert await attempt.file("where.txt") == attempt.context.task.workspace + "\n"
    assert not await attempt.exists(SOLUTION_DIR)
    (step,) = attempt.steps
    assert step.tool_calls[0].name == "bash"
    assert "exit code 3" in step.observations[0].content
    assert step.observations[0].call_id == step.tool_calls[0].id


async def test_oracle_keeps_services_running(work):
    solve = b"(while :; do date +%N > beat.txt; sleep 0.05; done) > /dev/null 2>&1 &\n"
    attempt = await work(make_task(solution=(TaskFile("solve.sh", solve),)))
    await attempt.run(OracleAgent())
    await attempt.sandbox.exec(["sleep", "0.3"])
    first = await attempt.file("beat.txt")
    await attempt.sandbox.exec(["sleep", "0.3"])
    assert await attempt.file("beat.txt") != first


async def test_solution_may_use_whole_agent_time(work):
    task = make_task(
        solution=(TaskFile("solve.sh", b"sleep 1.5; echo 42 > out.txt"),), limits=Limits(command_seconds=0.5)
    )
    attempt = await work(task)
    await attempt.run(OracleAgent())
    assert await attempt.file("out.txt") == "42\n"


async def test_missing_solution_raises_agent_error(work):
    attempt = await work(make_task(solution=()))
    with pytest.raises(AgentError, match=r"add solution/solve\.sh"):
        await attempt.run(OracleAgent())


async def test_script_runs_unchanged_and_is_removed(work):
    script = b"set -e\ncat <<'END_OF_SCRIPT'\n$HOME `x` \\\nEND_OF_SCRIPT\nread line < /dev/null || true\n"
    script += "printf 'é\\n' > out.txt\nfalse\necho never > out.txt".encode()
    attempt = await work()
    await attempt.run(ScriptAgent(script, "wrong-1"))
    assert await attempt.file("out.txt") == "é\n"
    (step,) = attempt.steps
    assert step.observations[0].content.startswith("$HOME `x` \\\n[exit code 1; ")
    assert not await attempt.exists("/tmp/.clawgym-script")


def test_script_must_be_text():
    with pytest.raises(AgentError, match="UTF-8"):
        ScriptAgent(b"\xff")
    with pytest.raises(AgentError, match="NUL"):
        ScriptAgent(b"a\0b")
    assert ScriptAgent(b"a").identity() != ScriptAgent(b"b").identity()


async def test_sandbox_death_is_raised_and_step_is_recorded(work):
    attempt = await work()
    await kill_from_outside(attempt.sandbox)
    with pytest.raises(SandboxDied):
        await attempt.run(ScriptAgent(b"echo 1"))
    assert len(attempt.steps) == 1
    assert attempt.steps[0].observations == ()


async def test_sloppy_solves_half_and_is_deterministic(work):
    attempt = await work(make_task())
    answers = {}
    for seed in range(12):
        for _ in range(2):
            attempt.steps.clear()
            again = type(attempt)(
                type(attempt.context)(
                    attempt.context.task, attempt.sandbox, attempt.context.tools, seed, 0, attempt.steps.append
                ),
                attempt.steps,
            )
            await again.run(SloppyAgent())
            answers.setdefault(seed, []).append(await attempt.file("out.txt"))
    assert all(len(set(texts)) == 1 for texts in answers.values())
    right = sum(texts[0] == "42\n" for texts in answers.values())
    assert 2 <= right <= 10


async def test_sloppy_needs_reference_and_wrong_solutions(work):
    attempt = await work(make_task(wrong_solutions=()))
    with pytest.raises(AgentError, match="terminal-basic"):
        await attempt.run(SloppyAgent())
