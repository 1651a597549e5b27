"""The tool loop, with a real client, a scripted endpoint and real sandboxes."""

from __future__ import annotations

import asyncio
import json
from datetime import datetime
from typing import Any

import pytest

from clawgym.agents import ToolLoopAgent, make_agent
from clawgym.engines import AnswerBudget, Completion, Prices, ReplayEngine, Sampling
from clawgym.errors import AgentError, EngineError, SandboxDied
from clawgym.records import Limits, Step, ToolCall, Turn, Usage

from ..engines.fake_openai import FakeOpenAI, call, error, reply, slow
from .conftest import Attempt, kill_from_outside, make_task


def loop(server: FakeOpenAI, **options: Any):
    return make_agent("tool-loop", **{"model": "m", "base_url": server.base_url, "api_key": "k", **options})


def calls(*items: dict[str, Any], text: str | None = None):
    return reply(text, tool_calls=list(items), finish_reason="tool_calls")


def bash(command: str, id: str = "x"):
    return call("bash", {"command": command}, id)


def agent_steps(attempt: Attempt) -> list[Step]:
    return [s for s in attempt.steps if s.source == "agent"]


def check_history(request: dict[str, Any]) -> None:
    """Each tool call is followed directly by exactly one result; ids are unique."""
    messages = request["messages"]
    ids = [c["id"] for m in messages for c in m.get("tool_calls") or ()]
    assert len(set(ids)) == len(ids)
    waiting: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            assert message["tool_call_id"] == waiting.pop(0)
        else:
            assert not waiting
            waiting = [c["id"] for c in message.get("tool_calls") or ()]
    assert not waiting


async def test_episode_with_tool_calls(fake_openai: FakeOpenAI, work):
    usage = {"prompt_tokens": 10, "completion_tokens": 5}
    fake_openai.script += [
        calls(bash("cd /tmp; export X=42; pwd"), text="I look around."),
        calls(
            bash("echo $X; pwd; false", "same"),
            call("write_file", {"path": "sub/out.txt", "content": "42\n"}, "same"),
            call("read_file", {"path": "sub/out.txt"}, ""),
        ),
        reply("", tool_calls=[call("submit", {"message": "done"})], usage=usage, reasoning_content="finished"),
    ]
    attempt = await work(seed=5)
    agent = loop(fake_openai, prices=Prices(1.0, 2.0))
    report = await attempt.run(agent)
    assert (report.stop, report.cause, report.final_message) == ("submitted", None, "done")
    assert report.usage == Usage(30, 15, 0, pytest.approx(60e-6))
    assert await attempt.file("sub/out.txt") == "42\n"

    assert [s.source for s in attempt.steps] == ["system", "agent", "agent", "agent"]
    assert attempt.context.task.workspace in attempt.steps[0].message
    assert fake_openai.requests[0]["messages"][1] == {"role": "user", "content": attempt.context.task.instruction}
    one, two, three = agent_steps(attempt)
    assert one.message == "I look around."
    assert one.model == "m"
    assert one.usage == Usage(10, 5, 0, pytest.approx(20e-6))
    assert one.observations[0].content == "/tmp\n[exit code 0; cwd /tmp]"
    assert two.observations[0].content == "42\n/tmp\n[exit code 1; cwd /tmp]"
    assert [o.call_id for o in two.observations] == [c.id for c in two.tool_calls]
    assert two.observations[1].content == "[wrote 3 bytes]"
    assert two.observations[2].content == "42\n"
    assert three.reasoning == "finished"
    assert len({c.id for s in attempt.steps for c in s.tool_calls}) == 5
    for step in attempt.steps:
        assert datetime.fromisoformat(step.timestamp).utcoffset().total_seconds() == 0  # type: ignore[union-attr]

    assert len({r["seed"] for r in fake_openai.requests}) == 3
    assert {t["function"]["name"] for t in fake_openai.requests[0]["tools"]} == {
        "bash",
        "read_file",
        "write_file",
        "edit_file",
        "submit",
    }
    for request in fake_openai.requests:
        check_history(request)
    assert [m["content"] for m in fake_openai.requests[2]["messages"] if m["role"] == "tool"] == [
        o.content for s in (one, two) for o in s.observations
    ]
    await agent.aclose()


async def test_episode_in_plain_text(fake_openai: FakeOpenAI, work):
    fake_openai.script += [
        reply("First I look.\n```bash\ncd /tmp\n```"),
        reply("Hm, what now?"),
        reply("```bash\npwd\necho 42 > ~-/out.txt\n```"),
        reply("It is done.\n<submit/>"),
    ]
    attempt = await work()
    report = await attempt.run(loop(fake_openai, protocol="text"))
    assert (report.stop, report.final_message) == ("submitted", "It is done.")
    assert await attempt.file("out.txt") == "42\n"
    one, two, three, four = agent_steps(attempt)
    assert one.tool_calls == (ToolCall("call_1_1", "bash", {"command": "cd /tmp"}),)
    assert "there is no bash block" in two.observations[0].content
    assert "<submit/>" in two.observations[0].content
    assert three.observations[0].content == "/tmp\n[exit code 0; cwd /tmp]"
    assert four.tool_calls[0].name == "submit"
    assert all("tools" not in r for r in fake_openai.requests)
    roles = [m["role"] for m in fake_openai.requests[-1]["messages"]]
    assert roles == ["system", "user", "assistant", "user", "assistant", "user", "assistant", "user"]


async def test_step_limit_ends_episode(fake_openai: FakeOpenAI, work):
    fake_openai.default = calls(bash("true"))
    attempt = await work(make_task(limits=Limits(max_steps=3)))
    report = await attempt.run(loop(fake_openai))
    assert (report.stop, report.cause) == ("budget", "steps")
    assert report.usage == Usage(30, 15)
    assert len(fake_openai.requests) == 3


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ({"budget": AnswerBudget(tokens=20)}, "tokens"),
        ({"budget": AnswerBudget(cost_usd=0.02), "prices": Prices(1000.0, 1000.0)}, "cost"),
    ],
)
async def test_exhausted_budget_ends_episode(fake_openai: FakeOpenAI, work, options: dict[str, Any], cause: str):
    fake_openai.default = calls(bash("echo x >> out.txt"))
    attempt = await work()
    report = await attempt.run(loop(fake_openai, **options))
    assert (report.stop, report.cause) == ("budget", cause)
    assert await attempt.file("out.txt") == "x\nx\n"


async def test_full_context_window_ends_episode(fake_openai: FakeOpenAI, work):
    fake_openai.script += [calls(bash("true")), error(400, "too long", code="context_length_exceeded")]
    attempt = await work()
    report = await attempt.run(loop(fake_openai))
    assert (report.stop, report.cause) == ("budget", "context")
    assert len(agent_steps(attempt)) == 1


async def test_malformed_calls_are_answered_and_valid_ones_run(fake_openai: FakeOpenAI, work):
    fake_openai.script += [
        calls(call("bash", '{"command": "ls'), bash("echo ran > out.txt", "b")),
        calls(call("bash", {"cmd": "ls"}), call("browse", {}, "b"), call("bash", {"command": "a\0b"}, "c")),
        calls(call("read_file", {"path": "none"}), call("read_file", {"path": "/"}, "b")),
        calls(call("write_file", {"path": "/", "content": ""}), call("write_file", {"path": "", "content": ""}, "b")),
        calls(call("write_file", {"path": "sur.txt", "content": "\ud800é"}), bash("echo \ud800", "b")),
        calls(call("submit", {}), text="bye"),
    ]
    attempt = await work()
    report = await attempt.run(loop(fake_openai))
    assert (report.stop, report.final_message) == ("submitted", "bye")
    assert await attempt.file("out.txt") == "ran\n"
    assert await attempt.file("sur.txt") == "\ufffdé"
    seen = [[o.content for o in s.observations] for s in agent_steps(attempt)]
    assert seen[0][1].startswith("These calls could not be read; arguments must be one JSON object:\nbash(")
    assert "'command'" in seen[1][0]
    assert "no tool 'browse'" in seen[1][1]
    assert "NUL" in seen[1][2]
    assert all(text.startswith("[error: ") for text in (*seen[2], *seen[3]))
    assert seen[4][0] == "[wrote 5 bytes]"
    for request in fake_openai.requests:
        check_history(request)
        json.dumps(request, ensure_ascii=False).encode()


async def test_repeated_malformed_replies_end_episode(fake_openai: FakeOpenAI, work):
    bad = calls(call("bash", "{"))
    fake_openai.script += [bad, bad, calls(bash("true")), bad, bad, bad]
    attempt = await work()
    report = await attempt.run(loop(fake_openai))
    assert (report.stop, report.cause) == ("error", "malformed")
    assert len(fake_openai.requests) == 6
    for request in fake_openai.requests:
        assert all(m.get("content") or m.get("tool_calls") for m in request["messages"])


@pytest.mark.parametrize("protocol", ["tools", "text"])
async def test_repeated_prose_submits(fake_openai: FakeOpenAI, work, protocol: str):
    fake_openai.default = reply("I have finished the task.")
    attempt = await work()
    report = await attempt.run(loop(fake_openai, protocol=protocol))
    assert (report.stop, report.cause, report.final_message) == ("submitted", None, "I have finished the task.")
    assert len(fake_openai.requests) == 3


async def test_complaint_names_token_limit(fake_openai: FakeOpenAI, work):
    fake_openai.script.append(reply("", tool_calls=[call("bash", '{"comm')], finish_reason="length"))
    fake_openai.script.append(calls(call("submit", {})))
    attempt = await work()
    await attempt.run(loop(fake_openai))
    assert "cut off at the token limit" in agent_steps(attempt)[0].observations[0].content


async def test_model_is_told_of_shell_restart(fake_openai: FakeOpenAI, work):
    fake_openai.script += [
        calls(bash("sleep 60")),
        calls(bash("exit 7")),
        calls(bash("head -c 300000 /dev/zero | tr '\\0' x")),
        calls(bash("echo still here")),
        calls(call("submit", {})),
    ]
    attempt = await work(make_task(limits=Limits(command_seconds=1.0, max_steps=8)))
    await attempt.run(loop(fake_openai))
    slept, ended, long, after, _ = [s.observations[0].content for s in agent_steps(attempt)]
    assert "exit code 124" in slept
    assert "timed out" in slept
    assert "exit code 7" in ended
    assert "started afresh" in ended
    assert "bytes of output left out" in long
    assert len(long) < 70_000
    assert after.startswith("still here\n[exit code 0; ")


async def test_sandbox_death_is_raised_and_step_is_recorded(fake_openai: FakeOpenAI, work):
    attempt = await work()

    async def kill(request: dict[str, Any]):
        await kill_from_outside(attempt.sandbox)
        return await calls(bash("echo 1"), text="now")(request)

    fake_openai.script += [calls(bash("true")), kill]
    with pytest.raises(SandboxDied):
        await attempt.run(loop(fake_openai))
    last = attempt.steps[-1]
    assert (last.message, last.observations) == ("now", ())
    assert last.tool_calls[0].arguments == {"command": "echo 1"}


async def test_cancelled_step_is_recorded(fake_openai: FakeOpenAI, work):
    fake_openai.script.append(calls(bash("echo 1"), bash("sleep 4", "b")))
    attempt = await work()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.5):
            await attempt.run(loop(fake_openai))
    (step,) = agent_steps(attempt)
    assert len(step.tool_calls) == 2
    assert len(step.observations) == 1
    fake_openai.script.append(slow(5, reply()))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await attempt.run(loop(fake_openai))


async def test_engine_error_is_raised(fake_openai: FakeOpenAI, work):
    fake_openai.default = error(401)
    attempt = await work()
    with pytest.raises(EngineError):
        await attempt.run(loop(fake_openai))


async def test_adaptations_are_recorded(fake_openai: FakeOpenAI, work):
    fake_openai.script += [error(400, "Unknown parameter: 'seed'.", param="seed"), calls(call("submit", {}))]
    attempt = await work()
    await attempt.run(loop(fake_openai))
    assert agent_steps(attempt)[0].extra == {"adaptations": {"seed": "left out"}}


async def test_exact_turns_are_recorded_and_given_seed_is_used(work):
    class Exact(ReplayEngine):
        seeds: list[int | None] = []  # noqa: RUF012

        async def complete(self, messages, *, tools=(), sampling):
            self.seeds.append(sampling.seed)
            return Completion("", (ToolCall("a", "submit", {}),), turn=Turn((1,), (2,), (-0.5,)))

    attempt = await work(seed=2**40 + 3)
    await attempt.run(ToolLoopAgent(Exact([]), sampling=Sampling(seed=11)))
    await attempt.run(ToolLoopAgent(Exact([])))
    assert attempt.turns == [Turn((1,), (2,), (-0.5,))] * 2
    assert Exact.seeds == [11, 3]


async def test_replay_engine_needs_no_endpoint(work):
    script = [
        Completion("", (ToolCall("a", "bash", {"command": "echo 42 > out.txt"}),)),
        Completion("", (ToolCall("a", "submit", {}),)),
    ]
    attempt = await work()
    await attempt.run(ToolLoopAgent(ReplayEngine(script), system_prompt="Be {brief}."))
    assert await attempt.file("out.txt") == "42\n"
    assert attempt.steps[0].message.startswith("Be {brief}.\n\n")


def test_identity_holds_settings_and_no_api_key(fake_openai: FakeOpenAI):
    manifest = loop(fake_openai, api_key="sk-verysecret12345", sampling=Sampling(temperature=0.0)).identity()
    assert manifest["name"] == "tool-loop"
    assert manifest["engine"]["model"] == "m"
    assert manifest["sampling"]["temperature"] == 0.0
    assert "verysecret" not in json.dumps(manifest)
    assert manifest["system_prompt_sha256"] != loop(fake_openai, protocol="text").identity()["system_prompt_sha256"]


def test_unknown_protocol_is_refused():
    with pytest.raises(AgentError, match="'tools' or 'text'"):
        ToolLoopAgent(ReplayEngine([]), protocol="xml")  # type: ignore[arg-type]
