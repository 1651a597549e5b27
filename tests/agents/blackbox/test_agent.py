"""One black box at work: what is recorded, and who is to blame for what."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from clawgym.agents.blackbox import BlackBoxAgent
from clawgym.engines import ReplayEngine, Sampling
from clawgym.errors import InfraError, SandboxError
from clawgym.gateway.sessions import SessionRequest
from clawgym.pool import sequences_of
from clawgym.records import GradingMode, Outcome

from ...gateway.scripted import refused
from ...rollouts import episode_of
from ...verifiers.tasks_for_tests import with_mode
from ..conftest import kill_from_outside
from .conftest import bash, task
from .hands import PROGRAM, hands, without

SOLVE = bash("mkdir output; echo 6 > output/sum.txt")
FRIENDLY = without(PROGRAM, ("sys.exit(text.decode())", 'return {"role": "assistant", "content": "All is well."}'))
"""As many agents are: a model that failed looks like an answer."""


async def test_what_an_episode_leaves(room: Any) -> None:
    it = await room([f"I add them up.\n{SOLVE}", "The sum is there.", "It still is."], follow_ups=["Look again."])
    group = it.pool.open_group(task_id="sum", size=1)
    episode = await it.attempt(sample=2, session=SessionRequest(group=group, sampling=Sampling(temperature=0.5)))
    assert (episode.outcome, episode.cause, episode.final_message) == (Outcome.SOLVED, None, "It still is.")

    steps = [(s.source, s.message, [c.arguments for c in s.tool_calls], [o.content for o in s.observations])
             for s in episode.steps]  # fmt: skip
    assert steps == [
        ("user", "Write the sum of input/numbers.txt to output/sum.txt.", [], []),
        ("agent", "I add them up.", [{"command": "mkdir output; echo 6 > output/sum.txt"}], [""]),
        ("agent", "The sum is there.", [], []),
        ("user", "Look again.", [], []),
        ("agent", "It still is.", [], []),
    ]
    assert [(t.role, t.flaw, t.parent) for t in episode.turns] == [("main", None, n) for n in (None, 0, 1)]
    assert len(sequences_of(episode.turns)) == 1
    assert [seen.sampled for seen in it.engine.seen] == [list(t.sampled_ids) for t in episode.turns]
    assert {(seen.sampling.temperature, seen.sampling.seed) for seen in it.engine.seen} == {(0.5, 7)}
    assert episode.usage.completion_tokens == sum(len(t.sampled_ids) for t in episode.turns)
    assert b"The sum is there." in episode.files["history.json"]

    stored = it.stored
    assert (stored.group, stored.channel, stored.sample, stored.seed) == (group, "train", 2, 7)
    assert (stored.task_id, stored.task_hash, stored.agent) == ("sum", task().content_hash, "hands 1")
    assert (stored.state, stored.outcome, stored.reward) == ("closed", "solved", 1.0)
    assert stored.rewards == {"strict": 1.0, "official": 1.0}
    assert it.pool.turns(stored.id) == episode.turns
    assert it.boxes == []


async def test_an_engine_and_a_pool_of_its_own(backend: Any) -> None:
    """Without a gateway; over text, nothing is exact, and it says so."""
    agent = BlackBoxAgent(hands(), ReplayEngine([]))
    try:
        episode = await episode_of(task(), agent, backend)
        assert episode.outcome is Outcome.INFRA
        assert "record more" in episode.error
        assert [t.flaw for t in episode.turns] == ["error"]
        assert set(agent.identity()) >= {"name", "version", "program_sha256", "engine"}
    finally:
        await agent.aclose()


@pytest.mark.parametrize(
    ("status", "program"), [(500, PROGRAM), (500, FRIENDLY), (503, PROGRAM), (401, FRIENDLY), (429, FRIENDLY)]
)
async def test_an_engine_that_fails_is_infra(room: Any, status: int, program: str) -> None:
    it = await room([SOLVE, refused(status)], claw=hands(program))
    episode = await it.attempt()
    assert (episode.outcome, episode.result) == (Outcome.INFRA, None)
    assert f"upstream said {status}" in episode.error
    assert [t.finish_reason for t in episode.turns] == ["tool_calls", "error"]
    assert (it.stored.state, it.stored.outcome, it.stored.reward) == ("closed", "infra", None)
    assert it.boxes == []


async def test_an_engine_that_breaks_is_infra(room: Any) -> None:
    it = await room([SOLVE, RuntimeError("CUDA error")], claw=hands(FRIENDLY))
    episode = await it.attempt()
    assert episode.outcome is Outcome.INFRA
    assert "the gateway failed (CUDA error)" in episode.error


async def test_a_gateway_with_no_room_is_infra(room: Any) -> None:
    it = await room(["Hello."], gateway={"streams": 1, "waiting": 0}, claw=hands(FRIENDLY))
    async with it.gateway.gate.turn():
        episode = await it.attempt()
    assert episode.outcome is Outcome.INFRA
    assert it.engine.seen == []


@pytest.mark.parametrize("program", [PROGRAM, FRIENDLY], ids=["honest", "friendly"])
async def test_a_request_that_the_model_refuses_has_failed(room: Any, program: str) -> None:
    it = await room([SOLVE, refused(400)], claw=hands(program))
    episode = await it.attempt()
    assert (episode.outcome, episode.cause) == (Outcome.FAILED, "model-400")
    assert it.stored.reward == 0.0


STUBBORN = without(
    PROGRAM,
    (
        "    if answer.status != 200:\n        sys.exit(text.decode())",
        "    if answer.status != 200:\n        return chat(messages)",
    ),
)
"""As many agents are: a model that failed is asked again, until something gives."""


async def test_a_failure_that_the_program_got_over_is_none(room: Any) -> None:
    it = await room([SOLVE, refused(503), "Done."], claw=hands(STUBBORN))
    episode = await it.attempt()
    assert episode.outcome is Outcome.SOLVED
    assert [t.finish_reason for t in episode.turns] == ["tool_calls", "error", "stop"]


@pytest.mark.parametrize(
    ("status", "outcome", "cause"),
    [(500, Outcome.INFRA, "engine: upstream said 500: wait"), (400, Outcome.FAILED, "model-400")],
)
async def test_tries_again_that_use_up_the_steps_are_the_failures_own(
    room: Any, status: int, outcome: Outcome, cause: str
) -> None:
    it = await room([SOLVE, refused(status)], claw=hands(STUBBORN))
    episode = await it.attempt(task(max_steps=5))
    assert (episode.outcome, episode.cause, len(episode.turns)) == (outcome, cause, 5)


async def test_a_history_that_no_longer_fits_is_truncated_and_graded(room: Any) -> None:
    it = await room([SOLVE, bash("seq 1 4000"), "Never said."], engine={"context_window": 2048})
    episode = await it.attempt()
    assert (episode.outcome, episode.cause) == (Outcome.SOLVED, None)  # what was done counts
    it.engine._say = lambda prompt, n: bash("seq 1 4000")
    episode = await it.attempt(sample=1)
    assert (episode.outcome, episode.cause) == (Outcome.TRUNCATED, "context")


@pytest.mark.parametrize("program", [PROGRAM, FRIENDLY], ids=["honest", "friendly"])
async def test_no_more_calls_than_the_task_allows(room: Any, program: str) -> None:
    it = await room([bash("true")], claw=hands(program))
    episode = await it.attempt(task(max_steps=3))
    assert (episode.outcome, episode.cause, len(episode.turns)) == (Outcome.TRUNCATED, "steps", 3)
    assert len(it.engine.seen) == 3


@pytest.mark.parametrize(
    ("program", "cause"),
    [
        ("import os; os.kill(os.getpid(), 9)", "agent-stopped"),
        ("import sys; sys.stdin.read(); raise SystemExit(3)", "agent-stopped"),
        ("import os; os.close(1); os.close(2); os._exit(1)", "agent-stopped"),
        ("this is no Python", "agent-stopped"),
    ],
)
async def test_a_program_that_ends_badly_has_failed(room: Any, program: str, cause: str) -> None:
    it = await room(["Never asked."], claw=hands(program))
    episode = await it.attempt()
    assert (episode.outcome, episode.cause, episode.turns) == (Outcome.FAILED, cause, ())
    assert (it.stored.outcome, it.stored.cause) == ("failed", cause)


async def test_a_box_that_dies_has_failed(room: Any) -> None:
    def say(prompt: str, n: int) -> str:
        (box,) = it.backend.sandboxes.values()
        deaths.append(asyncio.ensure_future(kill_from_outside(box)))
        return SOLVE

    deaths: list[Any] = []
    it = await room(say, engine={"pause": 0.05, "at_once": 4})
    episode = await it.attempt()
    assert (episode.outcome, episode.cause) == (Outcome.FAILED, "died")
    assert [t.finish_reason for t in episode.turns] == ["aborted"]
    assert it.stored.outcome == "failed"
    await asyncio.gather(*deaths)


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (r"import sys; sys.stdout.buffer.write(b'\xff\x00{]\x1b[2J' * 9)", "\\xff"),
        ("print('[' * 10**6)", "[[["),
        ("pass", ""),
        ("import sys; sys.stdout.write('x' * 50_000_000)", "xxx"),
    ],
)
async def test_what_the_program_says_is_only_text(room: Any, program: str, said: str) -> None:
    """Whatever it is, and however much, the work is graded as it is."""
    it = await room(["Never asked."], claw=hands(program))
    episode = await it.attempt()
    assert (episode.outcome, episode.cause) == (Outcome.FAILED, None)
    assert said in episode.final_message
    assert len(episode.final_message) < 2**20 + 200


@pytest.mark.parametrize("program", ["import time; time.sleep(99)", "while True: print('x' * 65536)"])
async def test_a_program_that_never_ends_is_truncated(room: Any, program: str) -> None:
    it = await room(["Never asked."], claw=hands(program))
    episode = await it.attempt(task(agent_seconds=1))
    assert (episode.outcome, episode.cause) == (Outcome.TRUNCATED, "time")
    assert it.stored.outcome == "truncated"


async def test_when_time_is_up_the_turn_under_way_ends_and_none_comes_after(room: Any) -> None:
    it = await room([SOLVE, "word " * 4000], engine={"pause": 0.02, "at_once": 4})
    episode = await it.attempt(task(agent_seconds=2))
    assert episode.outcome is Outcome.SOLVED  # graded all the same
    assert [(t.finish_reason, t.flaw) for t in episode.turns] == [("tool_calls", None), ("aborted", "aborted")]
    assert 0 < len(episode.turns[1].sampled_ids) < 4000
    assert it.engine.open == 0
    assert it.pool.turns(it.stored.id) == episode.turns
    assert it.boxes == []


STAYS = without(
    PROGRAM,
    ('print(messages[-1]["content"] or "")', """
print("bye", flush=True)
if os.fork() == 0:
    os.setsid()
    for n in (0, 1, 2):
        os.close(n)
    while True:
        try:
            chat(messages)
            heard = "answer"
        except BaseException as error:
            heard = repr(error)
        with open("/tmp/heard", "a") as log:
            log.write(heard + "\\n")
"""),
)  # fmt: skip
"""Leaves somebody behind who goes on asking the model."""


async def test_a_graded_box_that_still_runs_has_no_model(room: Any) -> None:
    """``live`` grading: the box is not stopped before; its session is."""
    claw = hands(STAYS)
    it = await room([SOLVE, "Done."], claw=claw)
    calls: list[int] = []

    class Looks(claw.start.__globals__["RunningHands"]):
        async def files(self) -> dict[str, bytes]:
            calls.append(len(it.engine.seen))
            before = (await self.box.exec(["cat", "/tmp/heard"])).output
            last = before
            while len(last.splitlines()) < len(before.splitlines()) + 3:  # it did go on
                last = (await self.box.exec(["cat", "/tmp/heard"])).output
            calls.append(len(it.engine.seen))
            return {"heard": last[len(before) :]}

    claw.start.__globals__["RunningHands"] = Looks
    episode = await it.attempt(with_mode(task(max_steps=10_000), GradingMode.LIVE))
    assert episode.outcome is Outcome.SOLVED
    assert calls[0] == calls[1] == len(it.engine.seen)
    assert b"answer" not in episode.files["heard"].splitlines()[1:]
    assert len(it.pool.turns(it.stored.id)) == len(episode.turns)


async def test_an_attempt_that_is_interrupted_leaves_nothing_open(room: Any) -> None:
    it = await room(["word " * 4000], engine={"pause": 0.02, "at_once": 4})
    attempt = asyncio.ensure_future(it.attempt())
    await it.engine.called.wait()
    attempt.cancel()
    with pytest.raises(asyncio.CancelledError):
        await attempt
    assert (it.stored.state, it.stored.outcome) == ("closed", "infra")
    assert [t.finish_reason for t in it.pool.turns(it.stored.id)] == ["aborted"]
    assert it.engine.open == 0
    assert it.boxes == []


def broken(part: str, error: Exception) -> Any:
    """A Claw that raises ``error`` in one of its methods."""
    claw = hands()
    running = claw.start.__globals__["RunningHands"]

    async def fail(*_: Any) -> Any:
        raise error

    setattr(claw if part == "start" else running, part, fail)
    return claw


@pytest.mark.parametrize("part", ["start", "aclose"])
async def test_mistake_of_a_claw_outside_its_work_is_raised(room: Any, part: str) -> None:
    it = await room(["Done."], claw=broken(part, KeyError("a mistake")))
    with pytest.raises(KeyError, match="a mistake"):
        await it.attempt()
    assert it.boxes == []


@pytest.mark.parametrize("part", ["ask", "files"])
async def test_mistake_of_a_claw_at_work_fails_the_episode(room: Any, part: str) -> None:
    it = await room(["Done."], claw=broken(part, KeyError("a mistake")))
    episode = await it.attempt()
    assert (episode.outcome, episode.cause) == (Outcome.FAILED, "agent-exception")
    assert "KeyError: 'a mistake'" in episode.error
    assert it.boxes == []
    assert (it.stored.state, it.stored.outcome) == ("closed", "failed")


@pytest.mark.parametrize(
    ("part", "error", "outcome", "cause"),
    [
        ("start", InfraError("no luck: try again"), Outcome.INFRA, "setup: no luck: try again"),
        ("start", SandboxError("the disk is full: ask for more"), Outcome.INFRA, None),
        ("ask", InfraError("no luck: try again"), Outcome.INFRA, "host: no luck: try again"),
        ("ask", SandboxError("too many processes"), Outcome.FAILED, "agent-stopped"),
        ("files", SandboxError("a link"), Outcome.SOLVED, None),
    ],
)
async def test_what_a_claws_exceptions_mean(
    room: Any, part: str, error: Exception, outcome: Outcome, cause: str | None
) -> None:
    it = await room([SOLVE, "Done."], claw=broken(part, error))
    episode = await it.attempt()
    assert episode.outcome is outcome
    assert cause is None or episode.cause == cause
    assert it.boxes == []
