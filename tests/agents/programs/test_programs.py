"""The real agent programs, each in a real sandbox, with a scripted model. `make agents` installs and runs them."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import pytest

import clawgym
from clawgym.agents.blackbox import BlackBoxAgent, ModelLink
from clawgym.agents.programs.install import installed
from clawgym.agents.programs.releases import RELEASES
from clawgym.errors import AgentError, ClawGymError
from clawgym.gateway.server import Gateway
from clawgym.pool import Pool, sequences_of
from clawgym.pool.check import check, trace_of
from clawgym.records import EXECUTED, Outcome
from clawgym.registry import agents
from clawgym.sandbox import SandboxSpec

from ...conftest import benchmark
from ...rollouts import episode_of

bench = benchmark("agents")
ONE_MESSAGE = ("aider", "gemini-cli", "mini-swe-agent", "qwen-code", "terminus")
"""Agents that cannot resume a conversation, or do so with a rewritten history."""


@pytest.fixture(params=sorted(RELEASES))
def program(request: pytest.FixtureRequest) -> str:
    """The name of an installed program."""
    try:
        installed(RELEASES[request.param])
    except AgentError as error:
        pytest.skip(str(error))
    return request.param


@pytest.fixture
async def attempt(program: str, backend: Any, model_folder: Any, tmp_path: Any) -> Any:
    """``await attempt(say)`` lets the program work on the first task; ``say`` is that of a script."""

    async def work(say: Any = None, *, follow_ups: Any = (), **limits: Any) -> Any:
        task = clawgym.load("terminal-basic").tasks[0]
        if limits:
            task = dataclasses.replace(task, limits=dataclasses.replace(task.limits, **limits))
        script = bench.Script(program, [task])
        if say is not None:
            script.say = say
        model = bench.ScriptedModel(model_folder, script)
        with Pool(tmp_path / "pool.db") as pool:
            async with Gateway(model, pool) as gateway:
                agent = BlackBoxAgent(agents.make(program), gateway=gateway, follow_ups=follow_ups, spare=0)
                try:
                    return await episode_of(task, agent, backend)
                finally:
                    await agent.aclose()

    return work


async def test_episode_is_solved_and_exact(program: str, attempt: Any) -> None:
    """With a follow-up message in the same conversation: one training sequence, whose tokens are exact."""
    more = [] if program in ONE_MESSAGE else ["Now check your work."]
    episode = await attempt(follow_ups=more)
    assert episode.outcome is Outcome.SOLVED, episode.cause
    assert check("e", trace_of(episode.turns)).status == "exact"
    assert len(sequences_of(episode.turns)) == 1
    assert {turn.role for turn in episode.turns} == {"main"}


LOOK = (
    "tail -n +3 /proc/net/dev | sed 's/ *\\([^:]*\\):.*/interface:\\1/'; "
    "python3 -c 'import socket; socket.getaddrinfo(\"a.example\", 80)' 2>&1"
)


async def test_sandbox_has_no_network_but_the_gateway(program: str, attempt: Any, backend: Any) -> None:
    """Commands of the agent see the loopback alone, and find no other machine."""
    prompts: list[str] = []

    def say(prompt: str, n: int) -> str:
        prompts.append(prompt)
        if program == "terminus":
            return bench.typed(f"{LOOK}\n" if n == 0 else "", done=n > 0)
        last = bench.act(program, bench.SUBMIT) if program == "mini-swe-agent" else "No network."
        return bench.act(program, LOOK) if n == 0 else last

    if program == "aider":  # it runs no commands
        sandbox = await backend.create(agents.make(program).spec(SandboxSpec()))
        seen = (await sandbox.exec(["bash", "-c", LOOK])).text
        await sandbox.close()
    else:
        await attempt(say)
        seen = "\n".join(prompts)
    assert set(re.findall(r"interface:(\w+)", seen)) == {"lo"}
    assert "socket.gaierror" in seen


@pytest.mark.parametrize("lie", bench.LIES)
async def test_lies_of_the_model_do_not_break_the_episode(program: str, attempt: Any, lie: str) -> None:
    """Every episode ends with an outcome of its own, within its steps, and what was sampled is exact."""
    task = clawgym.load("terminal-basic").tasks[0]
    episode = await attempt(bench.Script(program, [task], lie).say, max_steps=8, agent_seconds=240)
    assert episode.outcome in (Outcome.SOLVED, Outcome.FAILED, Outcome.TRUNCATED), episode.error
    assert 1 <= len(episode.turns) <= 8
    assert check("e", trace_of(episode.turns)).status == "exact"
    if lie == "never stops":
        assert episode.outcome is not Outcome.SOLVED


async def test_sandbox_without_loopback_is_refused(program: str) -> None:
    link = ModelLink("http://127.0.0.1:9000/s/x/v1", "key", socket_path="/dev/listen-9000")
    with pytest.raises(AgentError, match="use --sandbox namespace or docker"):
        await agents.make(program).start(None, link)


def test_identity_names_versions_and_no_secrets(program: str) -> None:
    claw = agents.make(program)
    identity = claw.identity()
    assert identity[program] == claw.version
    assert identity["installation_sha256"] == claw.installation.digest
    assert claw.installation.folder.as_posix() not in str(identity)


async def test_task_that_brings_tools(program: str, backend: Any, model_folder: Any, tmp_path: Any) -> None:
    """MCP clients solve it with the task's tools: one training sequence with exact tokens. Others are refused."""
    task = next(t for t in clawgym.load("toolcall-basic").tasks if t.id.startswith("bank-transfer"))
    episode = await play(program, task, backend, model_folder, tmp_path)
    if episode is None:
        return
    solution = json.loads(task.solution[0].read())[:-1]
    assert episode.outcome is Outcome.SOLVED, (episode.cause, episode.error)
    assert check("e", trace_of(episode.turns)).status == "exact"
    assert len(sequences_of(episode.turns)) == 1
    executed = [call for step in episode.steps for call in step.extra.get(EXECUTED, ())]
    assert [(c["name"], c["arguments"]) for c in executed] == [(c["name"], c["arguments"]) for c in solution]
    assert all(call["sampled"] and not call["content"].startswith("[error") for call in executed)


@pytest.mark.parametrize(
    ("name", "start"), [("BFCL", "parallel_0"), ("BFCL", "multi_turn_base_0"), ("tau2-bench", "retail-0")]
)
async def test_dialogue_of_a_published_set(
    program: str, name: str, start: str, backend: Any, model_folder: Any, tmp_path: Any, monkeypatch: Any
) -> None:
    """The user's answers are messages of one conversation, and the set's own checks accept the calls."""
    monkeypatch.setenv("CLAWGYM_USER_MODEL", "script")
    try:
        tasks = clawgym.load(name).tasks
    except ClawGymError as error:
        pytest.skip(str(error))
    task = next(task for task in tasks if task.id == start)
    episode = await play(program, task, backend, model_folder, tmp_path)
    if episode is not None:
        assert episode.outcome is Outcome.SOLVED, (episode.cause, episode.error)
        assert check("e", trace_of(episode.turns)).status == "exact"


async def play(program: str, task: Any, backend: Any, model_folder: Any, tmp_path: Any) -> Any:
    """The episode of ``program`` whose model makes the calls of the task's solution; None if the program is refused."""
    solution = json.loads(task.solution[0].read())
    extra = {"summary": "work", "security_risk": "LOW"} if program == "openhands" else {}

    def called(prompt: str, call: Any) -> str:
        found = re.findall(rf'"name": ?"([\w-]*?{call["name"]})"', prompt)
        assert found, call
        name = next((one for one in found if "task_" in one), found[0])  # not the program's own, such as grep
        return bench.call_of(name, {**call["arguments"], **extra})

    def say(prompt: str, n: int) -> str:
        if task.limits.max_steps == 1:
            return "\n".join(called(prompt, call) for call in solution[:-1])
        if solution[n]["name"] == "submit":
            return solution[n].get("arguments", {}).get("message") or "Done."
        return called(prompt, solution[n])

    script = bench.Script(program, [task])
    script.say = say
    with Pool(tmp_path / "pool.db") as pool:
        async with Gateway(bench.ScriptedModel(model_folder, script), pool) as gateway:
            agent = BlackBoxAgent(agents.make(program), gateway=gateway, spare=0)
            try:
                if agent.takes_tools:
                    return await episode_of(task, agent, backend)
                with pytest.raises(AgentError, match="brings others"):
                    await episode_of(task, agent, backend)
                return None
            finally:
                await agent.aclose()
