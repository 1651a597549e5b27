"""Agents that speak ACP: a program of the official SDK, and real agent programs that are installed.

Needs the package ``agent-client-protocol``.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import clawgym
from clawgym.agents.blackbox import BlackBoxAgent
from clawgym.agents.programs.install import installed
from clawgym.agents.programs.releases import RELEASES
from clawgym.errors import AgentError
from clawgym.pool import Pool, sequences_of
from clawgym.pool.check import check, trace_of
from clawgym.records import Outcome
from clawgym.registry import agents

from ..conftest import benchmark
from ..rollouts import episode_of

acp = pytest.importorskip("acp", reason="needs ACP: clawgym interop check acp")

bench = benchmark("agents")
PROGRAMS = {
    "qwen-code": "qwen-code --acp",
    "gemini-cli": "gemini-cli --acp",
    "opencode": "opencode acp",
}
"""Programs of ``clawgym agents install`` that speak it -> their command."""


async def episode(
    command: str, script: Any, task: Any, model_folder: Path, tmp_path: Path, backend: Any, **own: Any
) -> Any:
    from clawgym.gateway.server import Gateway

    with Pool(tmp_path / "pool.db") as pool:
        async with Gateway(bench.ScriptedModel(model_folder, script), pool) as gateway:
            agent = BlackBoxAgent(agents.make("acp", command=command), gateway=gateway, spare=0, **own)
            try:
                return await episode_of(task, agent, backend)
            finally:
                await agent.aclose()


@pytest.mark.timeout(400)
@pytest.mark.parametrize("program", PROGRAMS)
async def test_an_installed_program(
    program: str, backend: Any, model_folder: Path, tmp_path: Path, record_property: Callable[..., None]
) -> None:
    """It solves a task, with a second message in the same session; what the model sampled is exact."""
    try:
        installed(RELEASES[program])
    except AgentError as error:
        pytest.skip(str(error))
    task = clawgym.load("terminal-basic").tasks[0]
    script = bench.Script(program, [task])
    found = await episode(
        PROGRAMS[program], script, task, model_folder, tmp_path, backend, follow_ups=["Now check your work."]
    )
    assert found.outcome is Outcome.SOLVED, (found.cause, found.error)
    assert found.final_message == "It is done."
    assert check("e", trace_of(found.turns)).status == "exact"
    assert len(sequences_of(found.turns)) == 1
    title = RELEASES[program].title
    record_property("held", f"{title} {RELEASES[program].version} solves a task by ACP, with exact tokens")


PROGRAM = """
import json, os, subprocess, sys, urllib.request

def send(**message):
    print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)

def update(**one):
    send(method="session/update", params={"sessionId": "s", "update": one})

def model(text):
    body = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": text}]}
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]

def text(said):
    return {"type": "text", "text": said}

mode = sys.argv[1]
for line in sys.stdin:
    asked = json.loads(line)
    if asked.get("method") == "initialize":
        if mode == "ends at once":
            sys.exit("no settings")
        send(id=asked["id"], result={"protocolVersion": 1, "agentCapabilities": {}})
    elif asked.get("method") == "session/new":
        send(id=asked["id"], result={"sessionId": "s"})
    elif asked.get("method") == "session/prompt":
        turn = asked["id"]
        if mode == "dies":
            sys.exit(3)
        if mode == "large":
            update(sessionUpdate="agent_message_chunk", content=text("x" * (9 << 20)))
            send(id=turn, result={"stopReason": "end_turn"})
        if mode == "deep":
            print("[" * 200_000, flush=True)
            send(id=turn, result={"stopReason": "end_turn"})
        if mode == "no answer":
            send(id=turn, result={"stopReason": 7})
        if mode == "refuses":
            send(id=turn, error={"code": -32000, "message": "log in first"})
        if mode == "works":
            update(sessionUpdate="agent_message_chunk", content=text("before"))
            call = {"toolCallId": "1", "title": "run"}
            update(sessionUpdate="tool_call", **call)
            options = [
                {"optionId": "no", "name": "no", "kind": "reject_once"},
                {"optionId": "yes", "name": "yes", "kind": "allow_once"},
            ]
            permission = {"sessionId": "s", "toolCall": call, "options": options}
            send(id=77, method="session/request_permission", params=permission)
    elif asked.get("id") == 77:
        assert asked["result"]["outcome"] == {"outcome": "selected", "optionId": "yes"}, asked
        said = model(asked_for := "what now?")
        subprocess.run(said, shell=True, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        update(sessionUpdate="agent_message_chunk", content=text("I ran "))
        update(sessionUpdate="agent_message_chunk", content=text("it."))
        send(id=turn, result={"stopReason": "end_turn"})
"""


class Says:
    """The model solves the task with one command."""

    agent = "pi"

    def __init__(self, task: Any) -> None:
        self._command = bench.solution_command(task)

    def say(self, prompt: str, n: int) -> str:
        return self._command


@pytest.mark.parametrize(
    ("mode", "outcome", "cause"),
    [
        ("works", Outcome.SOLVED, None),
        ("ends at once", Outcome.INFRA, "no settings"),
        ("dies", Outcome.FAILED, "agent-stopped"),
        ("large", Outcome.FAILED, None),
        ("deep", Outcome.FAILED, None),
        ("no answer", Outcome.FAILED, "agent-stopped"),
        ("refuses", Outcome.FAILED, "agent-stopped"),
    ],
)
async def test_a_program_of_the_sandbox(
    mode: str,
    outcome: Outcome,
    cause: str | None,
    backend: Any,
    model_folder: Path,
    tmp_path: Path,
    record_property: Callable[..., None],
) -> None:
    task = clawgym.load("terminal-basic").tasks[0]
    task = dataclasses.replace(task, limits=dataclasses.replace(task.limits, agent_seconds=60))
    command = shlex.join(["python3", "-c", PROGRAM, mode])
    found = await episode(command, Says(task), task, model_folder, tmp_path, backend)
    assert found.outcome is outcome, (found.cause, found.error)
    assert (found.cause or "") == "" if cause is None else cause in str(found.cause), found.cause
    if mode == "works":
        assert found.final_message == "I ran it."
        assert len(found.turns) == 1
        record_property("held", "a program of the sandbox finds its model in `OPENAI_BASE_URL` and gets permissions")


def test_commands_that_cannot_be_read() -> None:
    for command in ("", "'", "aider-not-closed '"):
        with pytest.raises(AgentError):
            agents.make("acp", command=command)
