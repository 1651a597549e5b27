"""Episodes of a black-box agent: what is recorded, and the outcome of each failure."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from clawgym.agents.blackbox import BlackBoxAgent
from clawgym.engines import ReplayEngine, Sampling
from clawgym.errors import InfraError, SandboxError
from clawgym.gateway.request import SessionRequest
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
"""A program that returns a failed model call as an ordinary answer, as many agents do."""


async def test_episode_records_steps_turns_and_files(black_box: Any) -> None:
    setup = await black_box(
        [f"I add them up.\n{SOLVE}", "The sum is there.", "It still is."], follow_ups=["Look again."]
    )
    group = setup.pool.open_group(task_id="sum", size=1)
    episode = await setup.attempt(sample=2, session=SessionRequest(group=group, sampling=Sampling(temperature=0.5)))
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
    assert [seen.sampled for seen in setup.engine.seen] == [list(t.sampled_ids) for t in episode.turns]
    assert {(seen.sampling.temperature, seen.sampling.seed) for seen in setup.engine.seen} == {(0.5, 7)}
    assert episode.usage.completion_tokens == sum(len(t.sampled_ids) for t in episode.turns)
    assert b"The sum is there." in episode.files["history.json"]

    stored = setup.stored
    assert (stored.group, stored.channel, stored.sample, stored.seed) == (group, "train", 2, 7)
    assert episode.session == stored.id
    assert (stored.task_id, stored.task_hash, stored.agent) == ("sum", task().content_hash, "hands 1")
    assert (stored.state, stored.outcome, stored.reward) == ("closed", "solved", 1.0)
    assert stored.rewards == {"strict": 1.0, "official": 1.0}
    assert setup.pool.turns(stored.id) == episode.turns
    assert setup.sandboxes == []


async def test_agent_with_engine_and_own_gateway(backend: Any) -> None:
    """Without gateway=; a text engine has no exact tokens, and the turns say so."""
    agent = BlackBoxAgent(hands(), ReplayEngine([]))
    try:
        episode = await episode_of(task(), agent, backend)
        assert (episode.outcome, episode.cause) == (Outcome.FAILED, "model-422")  # nothing was recorded
        assert [t.flaw for t in episode.turns] == ["error"]
        assert set(agent.identity()) >= {"name", "version", "program_sha256", "engine"}
    finally:
        await agent.aclose()


@pytest.mark.parametrize(
    ("status", "program"), [(500, PROGRAM), (500, FRIENDLY), (503, PROGRAM), (401, FRIENDLY), (429, FRIENDLY)]
)
async def test_engine_failure_is_infra(black_box: Any, status: int, program: str) -> None:
    setup = await black_box([SOLVE, refused(status)], claw=hands(program))
    episode = await setup.attempt()
    assert (episode.outcome, episode.result) == (Outcome.INFRA, None)
    assert f"endpoint returned {status}" in episode.error
    assert [t.finish_reason for t in episode.turns] == ["tool_calls", "error"]
    assert (setup.stored.state, setup.stored.outcome, setup.stored.reward) == ("closed", "infra", None)
    assert setup.sandboxes == []


async def test_engine_exception_is_infra(black_box: Any) -> None:
    setup = await black_box([SOLVE, RuntimeError("CUDA error")], claw=hands(FRIENDLY))
    episode = await setup.attempt()
    assert episode.outcome is Outcome.INFRA
    assert "the gateway failed (CUDA error)" in episode.error


async def test_full_gateway_is_infra(black_box: Any) -> None:
    setup = await black_box(["Hello."], gateway={"streams": 1, "waiting": 0}, claw=hands(FRIENDLY))
    async with setup.gateway.gate.turn():
        episode = await setup.attempt()
    assert episode.outcome is Outcome.INFRA
    assert setup.engine.seen == []


@pytest.mark.parametrize("program", [PROGRAM, FRIENDLY], ids=["honest", "friendly"])
async def test_refused_model_request_fails_episode(black_box: Any, program: str) -> None:
    setup = await black_box([SOLVE, refused(400)], claw=hands(program))
    episode = await setup.attempt()
    assert (episode.outcome, episode.cause) == (Outcome.FAILED, "model-400")
    assert setup.stored.reward == 0.0


STUBBORN = without(
    PROGRAM,
    (
        "    if answer.status != 200:\n        sys.exit(text.decode())",
        "    if answer.status != 200:\n        return chat(messages)",
    ),
)
"""A program that retries failed model calls without limit, as many agents do."""


async def test_failure_before_successful_call_is_ignored(black_box: Any) -> None:
    setup = await black_box([SOLVE, refused(503), "Done."], claw=hands(STUBBORN))
    episode = await setup.attempt()
    assert episode.outcome is Outcome.SOLVED
    assert [t.finish_reason for t in episode.turns] == ["tool_calls", "error", "stop"]


@pytest.mark.parametrize(
    ("status", "outcome", "cause"),
    [(500, Outcome.INFRA, "engine: endpoint returned 500: wait"), (400, Outcome.FAILED, "model-400")],
)
async def test_retries_that_exhaust_steps_keep_first_failure(
    black_box: Any, status: int, outcome: Outcome, cause: str
) -> None:
    setup = await black_box([SOLVE, refused(status)], claw=hands(STUBBORN))
    episode = await setup.attempt(task(max_steps=5))
    assert (episode.outcome, episode.cause, len(episode.turns)) == (outcome, cause, 5)


async def test_full_context_window_is_truncated_and_graded(black_box: Any) -> None:
    setup = await black_box([SOLVE, bash("seq 1 4000"), "Never said."], engine={"context_window": 2048})
    episode = await setup.attempt()
    assert (episode.outcome, episode.cause) == (Outcome.SOLVED, None)  # graded as it stands
    setup.engine._say = lambda prompt, n: bash("seq 1 4000")
    episode = await setup.attempt(sample=1)
    assert (episode.outcome, episode.cause) == (Outcome.TRUNCATED, "context")


@pytest.mark.parametrize("program", [PROGRAM, FRIENDLY], ids=["honest", "friendly"])
async def test_model_calls_are_limited_to_max_steps(black_box: Any, program: str) -> None:
    setup = await black_box([bash("true")], claw=hands(program))
    episode = await setup.attempt(task(max_steps=3))
    assert (episode.outcome, episode.cause, len(episode.turns)) == (Outcome.TRUNCATED, "steps", 3)
    assert len(setup.engine.seen) == 3


@pytest.mark.parametrize(
    ("program", "cause"),
    [
        ("import os; os.kill(os.getpid(), 9)", "agent-stopped"),
        ("import sys; sys.stdin.read(); raise SystemExit(3)", "agent-stopped"),
        ("import os; os.close(1); os.close(2); os._exit(1)", "agent-stopped"),
        ("this is no Python", "agent-stopped"),
    ],
)
async def test_program_error_fails_episode(black_box: Any, program: str, cause: str) -> None:
    setup = await black_box(["Never asked."], claw=hands(program))
    episode = await setup.attempt()
    assert (episode.outcome, episode.cause, episode.turns) == (Outcome.FAILED, cause, ())
    assert (setup.stored.outcome, setup.stored.cause) == ("failed", cause)


async def test_sandbox_death_fails_episode(black_box: Any) -> None:
    def say(prompt: str, n: int) -> str:
        (sandbox,) = setup.backend.sandboxes.values()
        deaths.append(asyncio.ensure_future(kill_from_outside(sandbox)))
        return SOLVE

    deaths: list[Any] = []
    setup = await black_box(say, engine={"pause": 0.05, "at_once": 4})
    episode = await setup.attempt()
    assert (episode.outcome, episode.cause) == (Outcome.FAILED, "died")
    assert [t.finish_reason for t in episode.turns] == ["aborted"]
    assert setup.stored.outcome == "failed"
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
async def test_program_output_does_not_affect_grading(black_box: Any, program: str, said: str) -> None:
    """Whatever the program prints, and however much, the workspace is graded."""
    setup = await black_box(["Never asked."], claw=hands(program))
    episode = await setup.attempt()
    assert (episode.outcome, episode.cause) == (Outcome.FAILED, None)
    assert said in episode.final_message
    assert len(episode.final_message) < 2**20 + 200


@pytest.mark.parametrize("program", ["import time; time.sleep(99)", "while True: print('x' * 65536)"])
async def test_endless_program_is_truncated(black_box: Any, program: str) -> None:
    setup = await black_box(["Never asked."], claw=hands(program))
    episode = await setup.attempt(task(agent_seconds=1))
    assert (episode.outcome, episode.cause) == (Outcome.TRUNCATED, "time")
    assert setup.stored.outcome == "truncated"


async def test_time_limit_aborts_turn_and_refuses_further_calls(black_box: Any) -> None:
    setup = await black_box([SOLVE, "word " * 4000], engine={"pause": 0.02, "at_once": 4})
    episode = await setup.attempt(task(agent_seconds=2))
    assert episode.outcome is Outcome.SOLVED  # graded as it stands
    assert [(t.finish_reason, t.flaw) for t in episode.turns] == [("tool_calls", None), ("aborted", "aborted")]
    assert 0 < len(episode.turns[1].sampled_ids) < 4000
    assert setup.engine.open == 0
    assert setup.pool.turns(setup.stored.id) == episode.turns
    assert setup.sandboxes == []


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
"""Leaves a background process that keeps calling the model."""


async def test_no_model_calls_during_live_grading(black_box: Any) -> None:
    """``live`` grading does not stop the sandbox, but its gateway session is stopped."""
    claw = hands(STAYS)
    setup = await black_box([SOLVE, "Done."], claw=claw)
    calls: list[int] = []

    class Looks(claw.start.__globals__["RunningHands"]):
        async def files(self) -> dict[str, bytes]:
            calls.append(len(setup.engine.seen))
            before = (await self.sandbox.exec(["cat", "/tmp/heard"])).output
            last = before
            while len(last.splitlines()) < len(before.splitlines()) + 3:  # the background process is still running
                last = (await self.sandbox.exec(["cat", "/tmp/heard"])).output
            calls.append(len(setup.engine.seen))
            return {"heard": last[len(before) :]}

    claw.start.__globals__["RunningHands"] = Looks
    episode = await setup.attempt(with_mode(task(max_steps=10_000), GradingMode.LIVE))
    assert episode.outcome is Outcome.SOLVED
    assert calls[0] == calls[1] == len(setup.engine.seen)
    assert b"answer" not in episode.files["heard"].splitlines()[1:]
    assert len(setup.pool.turns(setup.stored.id)) == len(episode.turns)


async def test_cancelled_attempt_closes_everything(black_box: Any) -> None:
    setup = await black_box(["word " * 4000], engine={"pause": 0.02, "at_once": 4})
    attempt = asyncio.ensure_future(setup.attempt())
    await setup.engine.called.wait()
    attempt.cancel()
    with pytest.raises(asyncio.CancelledError):
        await attempt
    assert (setup.stored.state, setup.stored.outcome) == ("closed", "infra")
    assert [t.finish_reason for t in setup.pool.turns(setup.stored.id)] == ["aborted"]
    assert setup.engine.open == 0
    assert setup.sandboxes == []


def broken(part: str, error: Exception) -> Any:
    """A Claw that raises ``error`` in one of its methods."""
    claw = hands()
    running = claw.start.__globals__["RunningHands"]

    async def fail(*_: Any) -> Any:
        raise error

    setattr(claw if part == "start" else running, part, fail)
    return claw


@pytest.mark.parametrize("part", ["start", "aclose"])
async def test_claw_bug_outside_episode_is_raised(black_box: Any, part: str) -> None:
    setup = await black_box(["Done."], claw=broken(part, KeyError("a mistake")))
    with pytest.raises(KeyError, match="a mistake"):
        await setup.attempt()
    assert setup.sandboxes == []


@pytest.mark.parametrize("part", ["ask", "files"])
async def test_claw_bug_during_episode_fails_it(black_box: Any, part: str) -> None:
    setup = await black_box(["Done."], claw=broken(part, KeyError("a mistake")))
    episode = await setup.attempt()
    assert (episode.outcome, episode.cause) == (Outcome.FAILED, "agent-exception")
    assert "KeyError: 'a mistake'" in episode.error
    assert setup.sandboxes == []
    assert (setup.stored.state, setup.stored.outcome) == ("closed", "failed")


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
async def test_outcome_for_claw_exceptions(
    black_box: Any, part: str, error: Exception, outcome: Outcome, cause: str | None
) -> None:
    setup = await black_box([SOLVE, "Done."], claw=broken(part, error))
    episode = await setup.attempt()
    assert episode.outcome is outcome
    assert cause is None or episode.cause == cause
    assert setup.sandboxes == []
