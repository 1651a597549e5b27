"""Tool servers in real sandboxes: order and ids of answers, bounds, and attribution of failures."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import time
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from clawgym.errors import InfraError, SandboxDied, TaskError
from clawgym.records import Observation, TaskFile, ToolServer
from clawgym.sandbox import Backend
from clawgym.tools import CallRefused

from ..conftest import usable
from .conftest import Opened, leaves_nothing, opened, sandboxes
from .tasks_with_tools import LIMITS, call, noting, tiny

pytest.importorskip("mcp")
TWO = noting(tiny("two", "b_"))
SUBMIT = ["submit"]
OWN = ["echo", "add", "note", "sleep", "do"]


@pytest.fixture
async def two(backend: Backend):
    async with opened(TWO, backend) as made:
        yield made


async def do(made: Opened, what: str, prefix: str = "") -> str:
    (text,) = await made(call(f"{prefix}do", what=what))
    return text


async def test_the_tools_of_all_servers_and_submit(two: Opened) -> None:
    functions = [tool["function"] for tool in two.tools.schemas]
    assert [f["name"] for f in functions] == [*OWN, *(f"b_{name}" for name in OWN), *SUBMIT]
    assert functions[0]["description"] == "It can echo."
    assert functions[1]["parameters"]["required"] == ["a", "b"]


async def test_order_and_ids_are_kept_and_servers_work_at_once(two: Opened) -> None:
    calls = [
        call("sleep", "same", seconds=1.8),
        call("note", "2", line="after the sleep"),
        call("b_sleep", "same", seconds=1.8),
        call("nothing", "4"),
        call("b_echo", "5", text="é\n"),
        call("add", "", a="x", b=1),
    ]
    heard: list[Observation] = []
    began = time.monotonic()
    seen = await two.tools.call_all(calls, on_observation=heard.append)
    assert time.monotonic() - began < 3.5
    assert [one.call_id for one in seen] == [c.id for c in calls]
    assert [type(one) is CallRefused for one in seen] == [False, False, False, True, False, True]
    assert [one.content for one in seen[:3]] == ["slept", "noted", "slept"]
    assert seen[4].content == "é\n"
    assert sorted(map(id, heard)) == sorted(map(id, seen))
    assert heard[0].call_id in ("4", "")  # what needs no server is there at once


async def test_each_server_has_a_sandbox_of_its_own_and_the_first_has_the_tasks(backend: Backend) -> None:
    task = dataclasses.replace(TWO, inputs=(TaskFile("notes.txt", b"from the task\n"),))
    async with opened(task, backend) as made:
        assert len(sandboxes(backend)) == 2
        await made(call("note", line="one"), call("b_note", line="two"))
        assert await made.sandbox.get(f"{task.workspace}/notes.txt") == b"from the task\none\n"
        (other,) = [sandbox for id, sandbox in backend.sandboxes.items() if id != made.sandbox.id]  # type: ignore[attr-defined]
        assert await other.get(f"{task.workspace}/notes.txt") == b"two\n"
        assert (await other.exec(["ls", "/tools"])).text == "two\n"
        assert (await made.sandbox.exec(["touch", "/tools/one/x"])).exit_code != 0
    assert not sandboxes(backend)


async def test_results_that_are_more_than_text(two: Opened) -> None:
    assert await do(two, "image") == "[image, image/png, 3 bytes: not shown]"
    assert await do(two, "structure") == '{"n": 1}'
    assert await do(two, "fail") == "[error: it went wrong]"
    big = await do(two, "big")
    assert (big[0], big[-1]) == ("a", "z")
    assert "bytes left out" in big
    assert len(big) < LIMITS.output_bytes + 100
    assert await do(two, "surrogate") == "a\ufffdb"
    (text,) = await two(call("echo", text="\ud800é\0"))
    assert text == "\ufffdé\0"


async def test_hostile_server_output_is_harmless(two: Opened) -> None:
    assert await do(two, "rubbish") == "after the rubbish"
    assert "no result" in await do(two, "nonsense")
    assert '"error"' in await do(two, "ask back")  # a server that wants a model gets none
    assert await do(two, "stderr") == "written"
    assert await two(call("echo", text="on")) == ["on"]


async def test_a_call_that_takes_too_long(two: Opened) -> None:
    began = time.monotonic()
    slow, other = await two(call("sleep", seconds=3.4), call("b_echo", text="x"))
    assert slow == "[error: sleep took over 2 seconds]"
    assert other == "x"
    assert time.monotonic() - began < 3.3
    assert await two(call("echo", text="late")) == ["late"]  # its answer to the first call is nobody's
    assert await two(call("sleep", seconds=2.5), timeout=9) == ["slept"]


async def test_ended_server_is_reported_and_others_continue(two: Opened) -> None:
    assert await do(two, "die") == "[error: the tools of 'one' are gone (it ended); it wrote: I am dying]"
    assert "are gone" in (await two(call("echo", text="x")))[0]
    assert await two(call("b_echo", text="x"), call("submit")) == ["x", "submitted"]


@pytest.mark.parametrize(
    ("what", "why", "pieces"),
    [("long line", "over 4 MiB", 4 * 2**20 // 2**18), ("flood", "nobody asked for", 16 * 2**20 // 2**14)],
)
async def test_server_output_is_bounded(two: Opened, what: str, why: str, pieces: int) -> None:
    """A server that exceeds them is disconnected, without blocking others."""
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    waiting = asyncio.ensure_future(others())
    (text,) = await two(call("do", what=what), timeout=60)
    waiting.cancel()
    assert why in text
    assert turns > pieces / 2
    assert await two(call("b_echo", text="x")) == ["x"]


async def test_sandbox_death_is_raised(backend: Backend) -> None:
    async with opened(noting(limits=dataclasses.replace(LIMITS, command_seconds=20)), backend) as made:
        await backend.supervised.ask("kill", made.sandbox.id)  # type: ignore[attr-defined]
        with pytest.raises(SandboxDied):
            await made(call("echo", text="x"))


async def test_a_call_that_is_cancelled_leaves_the_session_in_order(two: Opened) -> None:
    heard: list[Observation] = []
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await two.tools.call_all(
                [call("echo", "1", text="x"), call("sleep", "2", seconds=1)], on_observation=heard.append
            )
    assert [(one.call_id, one.content) for one in heard] == [("1", "x")]
    assert await two(call("echo", text="on")) == ["on"]


def bad(*servers: ToolServer) -> Any:
    return noting(tools=servers, limits=dataclasses.replace(LIMITS, setup_seconds=4))


@pytest.mark.parametrize(
    ("task", "error", "part"),
    [
        (bad(ToolServer("x", ("no-such-program",))), InfraError, "no-such-program: No such file"),
        (bad(ToolServer("x", ("sh", "-c", "echo broken >&2; exit 3"))), InfraError, "it wrote: broken"),
        (bad(ToolServer("x", ("cat",))), InfraError, "did not answer|does not speak MCP"),
        (bad(ToolServer("x", ("sleep", "60"))), InfraError, "did not answer within 2 s"),
        (bad(tiny(), tiny("two")), TaskError, "'echo' of server 'two': is called like a tool of 'one'"),
        (bad(tiny(EXTRA_TOOLS='{"submit": {"type": "object"}}')), TaskError, "tool of every task"),
        (bad(tiny(EXTRA_TOOLS='{"x": {"type": "object", "properties": {"a": {"type": 7}}}}')), TaskError, "no JSON S"),
        (
            bad(tiny(EXTRA_TOOLS=json.dumps({f"t{n}": {"type": "object"} for n in range(200)}))),
            TaskError,
            "over 128 tools",
        ),
    ],
)
async def test_servers_that_cannot_be_offered(backend: Backend, task: Any, error: type, part: str) -> None:
    with pytest.raises(error, match=part):
        async with opened(task, backend):
            pass
    assert not sandboxes(backend)


async def test_names_that_models_cannot_write_are_changed(backend: Backend) -> None:
    server = tiny(EXTRA_TOOLS='{"files/read.all": {"type": "object"}}')
    async with opened(noting(tools=(server,)), backend) as made:
        assert "files_read_all" in [tool["function"]["name"] for tool in made.tools.schemas]
        assert await made(call("files_read_all", what="name")) == ["'name'"]  # the server knows it by its own


async def test_closing_lets_servers_end_and_is_idempotent(backend: Backend) -> None:
    async with opened(TWO, backend) as made:
        await asyncio.gather(made.tools.aclose(), made.tools.aclose())
        assert await made.sandbox.get(f"{TWO.workspace}/ended.txt") == b"at rest"
        assert sandboxes(backend) == {made.sandbox.id}
        assert "are gone" in (await made(call("echo", text="x")))[0]


async def test_interrupted_opening_leaves_no_sandbox(backend: Backend) -> None:
    async def open_and_wait() -> None:
        async with opened(noting(tiny("two", "b_"), tiny("three", "c_")), backend):
            await asyncio.sleep(60)

    await leaves_nothing(backend, open_and_wait, 0.0, 0.02, 0.05, 0.1, 0.2, 0.4)


NAMES = ["echo", "b_echo", "add", "b_add", "nothing", "submit"]
plans = st.lists(st.tuples(st.sampled_from(NAMES), st.text(max_size=3), st.integers(0, 99)), max_size=8)


def test_any_mixture_of_calls_is_answered_in_order() -> None:
    """Calls of any names in any order, with any ids: each has its answer at its place."""
    with asyncio.Runner() as runner:

        async def prepare() -> tuple[Any, Opened]:
            stack = contextlib.AsyncExitStack()
            backend = await stack.enter_async_context(usable("namespace"))
            return stack, await stack.enter_async_context(opened(TWO, backend))

        stack, made = runner.run(prepare())

        @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
        @given(plans)
        def mixture(plan: list[tuple[str, str, int]]) -> None:
            calls, expected = [], []
            for name, id, number in plan:
                arguments: dict[str, Any] = {"text": str(number)} if name.endswith("echo") else {"a": number, "b": 1}
                calls.append(call(name, id, **({} if name == "submit" else arguments)))
                answer = {"submit": "submitted", "nothing": None}.get(name, str(number + name.endswith("add")))
                expected.append((id, answer))
            seen = runner.run(made.tools.call_all(calls))
            assert [(one.call_id, None if type(one) is CallRefused else one.content) for one in seen] == expected

        try:
            mixture()
        finally:
            runner.run(stack.aclose())
