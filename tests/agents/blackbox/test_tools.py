"""A program with a shell on tasks that bring tools: it reaches the task by its tools alone, and what it executed is
recorded and graded. Real sandboxes; the program is a small agent in Python."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from clawgym.agents.blackbox import ModelLink
from clawgym.errors import AgentError
from clawgym.pool import sequences_of
from clawgym.records import EXECUTED, Dialogue, Outcome, TaskFile
from clawgym.rollout import transcript_payload
from clawgym.sandbox import Sandbox, SandboxSpec

from ...rollouts import episode_of
from ...tools.conftest import opened
from ...tools.tasks_with_tools import TINY, noting, tiny
from ..conftest import kill_from_outside
from .conftest import black_box

__all__ = ["black_box"]

pytest.importorskip("mcp")

AGENT = """
import json, os, sys, urllib.request

def post(url, body):
    headers = {"Authorization": "Bearer " + os.environ["KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    return json.load(urllib.request.urlopen(request))

def rpc(method, **params):
    return post(os.environ["TOOLS"], {"jsonrpc": "2.0", "id": 1, "method": method, "params": params})["result"]

def call(name, **arguments):
    return rpc("tools/call", name=name, arguments=arguments)["content"][-1]["text"]

def work(messages):
    listed = rpc("tools/list")["tools"]
    functions = [{"name": "mcp__task__" + t["name"], "parameters": t["inputSchema"]} for t in listed]
    tools = [{"type": "function", "function": function} for function in functions]
    while True:
        body = {"model": "policy", "messages": messages, "tools": tools}
        reply = post(os.environ["MODEL"] + "/chat/completions", body)["choices"][0]["message"]
        messages.append({k: v for k, v in reply.items() if v is not None})
        if not reply.get("tool_calls"):
            return
        for one in reply["tool_calls"]:
            name = one["function"]["name"].removeprefix("mcp__task__")
            text = call(name, **json.loads(one["function"]["arguments"]))
            messages.append({"role": "tool", "tool_call_id": one["id"], "content": text})

def main():
    history = os.path.expanduser("/tmp/history.json")
    messages = json.load(open(history)) if os.path.exists(history) else []
    messages.append({"role": "user", "content": sys.stdin.read()})
    work(messages)
    json.dump(messages, open(history, "w"))
"""
"""A small agent. A program of a test follows it."""
MARK = "0f3a-of-the-task"
LOOK = f"""
import os, socket
mark = {MARK[:5]!r} + {MARK[5:]!r}
found = [name for name in os.environ if mark in os.environ[name]]
for folder, _, files in os.walk("/"):
    if folder.split("/")[1] in ("proc", "sys", "usr", "dev"):
        continue
    for name in files:
        try:
            with open(os.path.join(folder, name), errors="replace") as file:
                found += [os.path.join(folder, name)] if mark in file.read(10**6) else []
        except OSError:
            pass
for entry in filter(str.isdigit, os.listdir("/proc")):
    try:
        line = open("/proc/" + entry + "/cmdline").read()
        found += ["process " + entry] if "ser" + "ver.py" in line else []
    except OSError:
        pass
for port in (9017, 9018, 8080):
    with socket.socket() as s:
        found += [port] if s.connect_ex(("127.0.0.1", port)) == 0 else []
print(found)
"""
"""Looks for the files, variables, processes and ports of the task."""


class Caller:
    """The adapter of a program in Python that is an MCP client."""

    name, version = "caller", "1"
    takes_tools = True

    def __init__(self, program: str = "main()") -> None:
        self.program = AGENT + program
        self.printed: list[str] = []
        self.before: Callable[[], Awaitable[None]] | None = None
        """Awaited before each message."""

    def spec(self, spec: SandboxSpec) -> SandboxSpec:
        return spec

    async def start(self, sandbox: Sandbox, link: ModelLink) -> Any:
        return RunningCaller(self, sandbox, link)

    def identity(self) -> dict[str, Any]:
        return {}


class RunningCaller:
    ended = False

    def __init__(self, claw: Caller, sandbox: Sandbox, link: ModelLink) -> None:
        self.claw, self.sandbox = claw, sandbox
        assert link.tools_url is not None
        self.env = {"MODEL": link.base_url, "TOOLS": link.tools_url, "KEY": link.api_key}

    async def ask(self, message: str) -> str:
        if self.claw.before is not None:
            await self.claw.before()
        argv = ["python3", "-c", self.claw.program]
        done = await self.sandbox.exec(
            argv, env=self.env, stdin=message.encode(), timeout=60, cwd=self.sandbox.spec.workdir
        )
        self.claw.printed.append(done.text)
        return "what the program says is not used"

    async def files(self) -> dict[str, bytes]:
        return {}

    async def aclose(self) -> None: ...


def calls(*made: tuple[str, dict[str, Any]]) -> str:
    bodies = [{"name": f"mcp__task__{name}", "arguments": arguments} for name, arguments in made]
    return "\n".join(f"<tool_call>\n{json.dumps(body)}\n</tool_call>" for body in bodies)


NOTE = calls(("note", {"line": "42"}))


async def test_task_is_solved_by_its_tools(black_box: Any) -> None:
    """The transcript has what was sampled and what was executed; verifiers get what was executed."""
    setup = await black_box([NOTE, "forty-two"], claw=Caller())
    episode = await setup.attempt(noting(tiny("two", "other_")))
    assert (episode.outcome, episode.error, episode.final_message) == (Outcome.SOLVED, "", "forty-two")
    assert len(sequences_of(episode.turns)) == 1
    acting = episode.steps[-2]
    assert [call.name for call in acting.tool_calls] == ["mcp__task__note"]
    executed = {"id": "task_1", "name": "note", "arguments": {"line": "42"}, "content": "noted", "sampled": True}
    assert acting.extra[EXECUTED] == [executed]
    assert transcript_payload(episode.steps)[-2:] == (
        {
            "role": "assistant",
            "content": acting.message,
            "tool_calls": [{"id": "task_1", "name": "note", "arguments": {"line": "42"}}],
            "results": [{"id": "task_1", "content": "noted"}],
        },
        {"role": "assistant", "content": "forty-two"},
    )
    assert setup.sandboxes == []


def secret() -> Any:
    """A task whose files, variables and server hold a mark."""
    server = dataclasses.replace(tiny(), files=(*TINY, TaskFile("hidden.txt", MARK.encode())), env={"OF_SERVER": MARK})
    return noting(inputs=(TaskFile("secret.txt", MARK.encode()),), tools=(server,), env={"OF_TASK": MARK})


async def test_shell_of_the_program_finds_nothing_of_the_task(black_box: Any, backend: Any) -> None:
    claw = Caller("main()\n" + LOOK)
    setup = await black_box([NOTE, "forty-two"], claw=claw)
    assert (await setup.attempt(secret())).outcome is Outcome.SOLVED
    assert claw.printed == ["[]\n"]

    async with opened(secret(), backend) as made:  # the same search in the sandbox of the server
        seen = (await made.sandbox.exec(["python3", "-c", LOOK])).text
    for what in ("OF_TASK", "secret.txt", "hidden.txt", "process "):
        assert what in seen


async def test_state_that_the_program_forges_is_not_graded(black_box: Any) -> None:
    forge = """
for path in ("notes.txt", "ended.txt", "/tools/one/notes.txt"):
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    open(path, "w").write("42\\n" if "notes" in path else "at rest")
main()
"""
    setup = await black_box(["forty-two"], claw=Caller(forge))
    episode = await setup.attempt(noting())
    assert episode.outcome is Outcome.FAILED
    assert episode.result.checks == {"noted": 0.0, "rest": 1.0, "said": 1.0}


async def test_call_of_the_shell_is_recorded_like_one_of_the_model(black_box: Any) -> None:
    """It is executed and graded by the same rules, and the transcript says that the model did not write it."""
    claw = Caller('print(call("note", line="42"), call("submit", message="x"), call("note"))\nmain()')
    setup = await black_box(["forty-two"], claw=claw)
    episode = await setup.attempt(noting())
    assert episode.outcome is Outcome.SOLVED
    (made, refused) = episode.steps[-1].extra[EXECUTED]
    assert (made["name"], made["content"], made["sampled"]) == ("note", "noted", False)
    assert (refused["arguments"], refused["sampled"]) == ({}, False)
    assert "there is no tool 'submit'" in claw.printed[0]


async def test_calls_without_a_reply_of_the_model_are_recorded(black_box: Any) -> None:
    setup = await black_box(["forty-two"], claw=Caller('call("note", line="42")'))
    episode = await setup.attempt(noting())
    assert (episode.turns, episode.outcome) == ((), Outcome.FAILED)
    assert [call["name"] for call in episode.steps[-1].extra[EXECUTED]] == ["note"]


FUNCTIONS = tuple(
    {"type": "function", "function": {"name": name, "description": "", "parameters": {"type": "object"}}}
    for name in ("book", "cancel")
)
TALK = Dialogue(
    (("system", "You work for a restaurant."), ("user", "Good evening.")),
    "script",
    {"lines": [{"text": "Book a table."}, {"text": "Cancel it.", "tools": ["cancel"]}]},
    functions=FUNCTIONS,
    withheld=("cancel",),
)


async def test_user_of_a_dialogue_answers_until_the_end(black_box: Any) -> None:
    """One conversation; the user's words are steps of the user, and verifiers get the calls by turn."""
    prompts: list[str] = []

    def say(prompt: str, n: int) -> str:
        prompts.append(prompt)
        said = ["Good evening!", calls(("book", {}), ("cancel", {})), "Booked.", calls(("cancel", {})), "Done."]
        return said[n]

    setup = await black_box(say, claw=Caller())
    episode = await setup.attempt(noting(tools=(), dialogue=TALK, instruction="Good evening."))
    assert (episode.error, episode.final_message) == ("", "Done.")
    assert len(sequences_of(episode.turns)) == 2  # the prompt changes when a withheld tool is offered
    assert "You work for a restaurant.\n\nGood evening." in prompts[0]
    assert "mcp__task__cancel" not in prompts[0].split("Good evening")[0]
    graded = [
        (m["role"], m["content"] if m["role"] == "user" else [call["name"] for call in m.get("tool_calls", ())])
        for m in transcript_payload(episode.steps)
        if m["role"] != "system"
    ]
    assert graded == [
        ("user", "Good evening."),
        ("assistant", []),
        ("user", "Book a table."),
        ("assistant", ["book"]),
        ("assistant", []),
        ("user", "Cancel it."),
        ("assistant", ["cancel"]),
        ("assistant", []),
    ]


async def test_sandbox_of_the_tools_that_dies_fails_the_episode(black_box: Any) -> None:
    claw = Caller()
    setup = await black_box([NOTE, "forty-two"], claw=claw)

    async def kill() -> None:
        (task,) = (s for s in setup.backend.sandboxes.values() if "/tools/one" in s.spec.readonly)
        await kill_from_outside(task)

    claw.before = kill
    episode = await setup.attempt(noting())
    assert (episode.outcome, episode.cause) == (Outcome.FAILED, "died")
    assert setup.sandboxes == []


async def test_program_that_is_no_mcp_client_is_refused(black_box: Any) -> None:
    setup = await black_box(["Done."])
    with pytest.raises(AgentError, match=r"use tool-loop .*\(claude-code, codex, gemini-cli, opencode, open"):
        await episode_of(noting(), setup.agent, setup.backend)
    assert setup.sandboxes == []
