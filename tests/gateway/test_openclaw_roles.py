"""Roles and training sequences of the real OpenClaw with compactions and sub-agents."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import pytest_asyncio
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from clawgym.agents.blackbox.protocol import ModelLink
from clawgym.agents.openclaw.install import installed
from clawgym.agents.openclaw.process import openclaw
from clawgym.errors import AgentError, EngineError
from clawgym.gateway.server import Gateway
from clawgym.pool import Pool, sequences_of
from clawgym.records import prompt_ids

from .scripted import ScriptedEngine, refused

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

EXAMPLES = 20

ASK = "Count the words of every file below notes/ and sum them up."
JOB = "Look into notes/april.md and report how many words it has."
LONG = "python3 -c \"print('line of words {} ' * {})\""


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class Asked:
    """The parts of a prompt that the scripts use."""

    def __init__(self, prompt: str) -> None:
        self.summary = "context summarization assistant" in prompt
        self.job = prompt.split("# Subagent Context")[1].split("## Rules")[0] if "# Subagent Context" in prompt else ""
        self.last = prompt.rsplit("<|im_start|>", 2)[1].removesuffix("<|im_end|>\n")
        self.after_tool = self.last.startswith("user\n<tool_response>")


class Engine(ScriptedEngine):
    """An engine that fails in the middle of a reply, on request."""

    dies = False

    async def generate(self, request):
        sampled = 0
        async for tokens in super().generate(request):
            yield tokens
            sampled += len(tokens.ids)
            if self.dies and sampled > 12:
                self.dies = False
                raise EngineError("endpoint failed: wait")


class Agent:
    """One agent of the running OpenClaw, with its own session of the gateway."""

    def __init__(self, claw: Claw, name: str) -> None:
        self.claw, self.name, self.session = claw, name, claw.opened[name]

    async def chat(self, text=ASK, *, session="k", **more):
        status, said = await self.claw.process.chat(text, self.name, session=session, **more)
        assert status == 200, said
        return said

    @property
    def turns(self):
        return self.claw.pool.turns(self.session.id)

    @property
    def roles(self):
        return [turn.role for turn in self.turns]

    async def until(self, done: Callable[[list], bool]):
        """Wait until ``done(roles)`` and return the turns; reports arrive at any time."""
        async with asyncio.timeout(60):
            while not done(self.roles):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        return self.turns

    @property
    def seen(self):
        return [seen for seen in self.claw.engine.seen if seen.session == self.session.id]


class Claw:
    """OpenClaw on loopback, whose models are sessions of a gateway with a scripted engine."""

    def __init__(self, engine, gateway, opened, process) -> None:
        self.engine, self.gateway, self.opened, self.process = engine, gateway, opened, process
        self.pool = gateway.pool
        self.mode = DEFAULTS["compaction"]["mode"]
        self.scripts: dict[str, Callable[[Asked, int], object]] = {}
        self._free = {kind: [name for name in opened if name.startswith(kind)] for kind in WINDOWS}

    def take(self, kind, say) -> Agent:
        """A new agent whose model replies with ``say(asked, number of the call)``."""
        agent = Agent(self, self._free[kind].pop(0))
        self.scripts[agent.session.id] = say
        return agent

    async def compact(self, mode) -> None:
        """Set the compaction mode from now on."""
        if mode != self.mode:
            await self.process.configure(compaction={**DEFAULTS["compaction"], "mode": mode})
            self.mode = mode

    def say(self, prompt, number):
        session = self.engine.seen[-1].session
        count = sum(seen.session == session for seen in self.engine.seen) - 1
        return self.scripts[session](Asked(prompt), count)


WINDOWS = {"wide": 2_000_000, "small": 16_000}
"""Context windows as OpenClaw is told. With the reserve below it compacts after every run in the small one."""
DEFAULTS = {
    "compaction": {"mode": "default", "reserveTokens": 100_000, "keepRecentTokens": 500},
    "subagents": {"maxSpawnDepth": 2},
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def claw(model_folder):
    try:
        copy = installed()
    except AgentError as error:
        pytest.skip(str(error))
    running: list[Claw] = []
    engine = Engine(
        model_folder,
        lambda prompt, n: running[0].say(prompt, n),
        spell=random.Random(1),
        at_once=8,
        context_window=400_000,
    )
    names = [f"{kind}{n}" for kind, most in (("wide", EXAMPLES + 12), ("small", 6)) for n in range(most)]
    with tempfile.TemporaryDirectory() as folder:
        async with contextlib.AsyncExitStack() as stack:
            pool = stack.enter_context(contextlib.closing(Pool(Path(folder, "pool.db"))))
            gateway = await stack.enter_async_context(Gateway(engine, pool))
            await gateway.listen()
            opened = {name: await gateway.open_session() for name in names}
            links = {
                name: ModelLink(
                    gateway.base_url(session),
                    session.secret,
                    context_window=WINDOWS[name.rstrip("0123456789")],
                    max_tokens=2048,
                )
                for name, session in opened.items()
            }
            process = await stack.enter_async_context(openclaw(copy, Path(folder, "oc"), links, defaults=DEFAULTS))
            running.append(Claw(engine, gateway, opened, process))
            yield running[0]


def check(agent):
    """Check that turns equal the engine's calls and that each id of main is trained on once; return the sequences."""
    turns = agent.turns
    assert len(turns) == len(agent.seen)
    rest = list(agent.seen)
    for index, turn in enumerate(turns):
        prompt = prompt_ids(turns, index)
        same = next(seen for seen in rest if seen.prompt == prompt and tuple(seen.sampled) == turn.sampled_ids)
        rest.remove(same)
        assert tuple(same.logprobs) == turn.logprobs
    samples = sequences_of(turns)
    trained = [n for sample in samples for n in dict.fromkeys(sample.turn_of)]
    assert sorted(trained) == [n for n, t in enumerate(turns) if t.role == "main" and t.flaw is None and t.sampled_ids]
    return samples


# Exactness

NAMES = st.sampled_from(["exec", "exec", "bash", "read", "Exec", "functions.exec"])
ODD = ["naïve €", "日本", "😀", '"quoted"', "  spaced  ", "two\nlines", "<|im_end|>", "\\u00e9 \\n", "NO_REPLY", "`x`"]
WORDS = st.lists(st.sampled_from(["total", "[[reply_to_current]]", "MEDIA: /x.png", *ODD]), max_size=4).map(" ".join)
VALUES = WORDS | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.booleans() | st.none()
MORE = st.dictionaries(st.sampled_from(["note", "é", "deep"]), VALUES | st.lists(VALUES, max_size=2), max_size=2)


@st.composite
def calls(draw):
    name = draw(NAMES)
    arguments = {"command": f"echo {draw(st.integers(0, 9))}"} if name != "read" else {"path": "no/such.txt"}
    arguments |= draw(MORE)
    spaces = draw(st.sampled_from([(", ", ": "), (",", ":"), (" ,\n ", " : ")]))
    told = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=draw(st.booleans()), separators=spaces)
    return f"<tool_call>\n{told}\n</tool_call>"


@st.composite
def replies(draw, last):
    thought = f"<think>\n{draw(WORDS)} hm\n</think>\n\n" if draw(st.booleans()) else ""
    text = draw(WORDS) + (" that is it" if last else "")
    if last:
        broken = '\n<tool_call>\n{"name": "exec", "arguments": {"command": "ls"}\n</tool_call>'
        return thought + text + broken * draw(st.booleans())
    return thought + text + "\n" + "\n".join(draw(st.lists(calls(), min_size=1, max_size=3)))


RUNS = st.lists(
    st.tuples(WORDS, st.lists(replies(False), max_size=3), replies(True)).map(lambda t: (t[0], [*t[1], t[2]])),
    min_size=1,
    max_size=3,
)


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],  # each example needs a new agent
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(runs=RUNS)
async def test_episode_without_compaction_is_one_sequence(claw, runs):
    script = [reply for _, answers in runs for reply in answers]
    agent = claw.take("wide", lambda asked, n: script[n])
    for text, _ in runs:
        await agent.chat(f"{text} please", session="one")
    (sample,) = check(agent)
    assert len(agent.turns) == len(script)
    assert agent.roles == ["main"] * len(script)
    assert sample.turns == tuple(range(len(script)))
    assert sample.ids == agent.seen[-1].prompt + tuple(agent.seen[-1].sampled)
    assert [i for i, m in zip(sample.ids, sample.mask, strict=True) if m] == [i for s in agent.seen for i in s.sampled]


# Roles


def jobs(asked, *, spawns, works=(), report="april has 31 words, I counted them all"):
    """Replies of an agent that delegates requests, and of its sub-agents."""
    if asked.job:
        return report if asked.after_tool or not works else works
    if ASK in asked.last:
        return "I hand it out.\n" + "\n".join(spawns)
    return "I know more now, thank you."


async def test_subagent_and_report(claw):
    agent = claw.take("wide", lambda asked, n: jobs(asked, spawns=[call("sessions_spawn", task=JOB)]))
    await agent.chat()
    turns = await agent.until(lambda roles: len(roles) >= 4)
    assert sorted(agent.roles) == ["main", "main", "main", "subagent"]
    (sample,) = check(agent)
    assert turns[sample.turns[-1]].messages[-1]["content"].count("april has 31 words"), "the report is a user message"
    await agent.chat("And in words?")
    (sample,) = check(agent)
    assert len(sample.turns) == 4, "the line that OpenClaw puts before an old report changes nothing"


async def test_two_concurrent_subagents(claw):
    spawns = [call("sessions_spawn", task=JOB), call("sessions_spawn", task=f'{JOB}\nSay "naïve €" too.', label="may")]
    works = call("exec", command="sleep 0.3; echo at work")
    agent = claw.take("wide", lambda asked, n: jobs(asked, spawns=spawns, works=works))
    await agent.chat()
    await agent.until(lambda roles: roles.count("main") >= 4 and roles.count("subagent") >= 4)
    assert agent.roles.count("subagent") == 4
    assert len(agent.roles) == 8
    (sample,) = check(agent)
    assert len(sample.turns) == 4
    assert len(sequences_of(agent.turns, roles=("subagent",))) == 2


async def test_nested_subagent(claw):
    boss, worker = "BOSS: have all files below notes/ counted by others.", "WORKER: count the words of notes/april.md."

    def say(asked, n):
        if "WORKER" in asked.job:
            return "april has 31 words in all, and that is that"
        if "BOSS" in asked.last and not asked.after_tool:
            return call("sessions_spawn", task=worker) if "Subagent Task" in asked.last else "31 words in all notes"
        return call("sessions_spawn", task=boss) if ASK in asked.last else "I wait, or I am done with it."

    agent = claw.take("wide", say)
    await agent.chat()
    await agent.until(lambda roles: roles.count("main") >= 3)
    assert set(agent.roles) == {"main", "subagent"}
    assert len({turn.tools for turn in agent.turns if turn.role == "subagent"}) == 2, "they have other tools"
    (sample,) = check(agent)
    assert len(sample.turns) == 3


async def test_changed_system_prompt_in_conversation(claw):
    agent = claw.take("wide", lambda asked, n: jobs(asked, spawns=[call("sessions_spawn", task=JOB)]))
    messages = [{"role": "system", "content": "Be short, and be friendly."}, {"role": "user", "content": ASK}]
    await agent.chat(messages=messages)
    await agent.until(lambda roles: len(roles) >= 4)
    assert sorted(agent.roles) == ["main", "main", "main", "subagent"]
    assert len(check(agent)) == 2, "OpenClaw takes the report without the client's system message"


@pytest.mark.parametrize("mode", ["default", "safeguard"])
async def test_compaction_starts_new_branch(claw, mode):
    def say(asked, n):
        if asked.summary:
            return f"The words of january and february were counted, summary {n}."
        if not asked.after_tool:
            return call("exec", command=LONG.format("first", 300))
        if "first" in asked.last:
            return f"I look at part {n} of the notes.\n" + call("exec", command=LONG.format("second", 300))
        return f"Part {n} of the work is done."

    await claw.compact(mode)
    agent = claw.take("small", say)
    for text in (ASK, "Now the other folder, all of its files.", "And the third folder, all of its files as well."):
        await agent.chat(text)
    roles = agent.roles
    assert set(roles) == {"main", "compaction"}
    anew = [n for n, turn in enumerate(agent.turns) if turn.role == "main" and turn.parent is None]
    assert len(anew) == 3, "each run starts from a summary"
    assert all("compaction" in roles[before:after] for before, after in itertools.pairwise(anew))
    assert len(check(agent)) == 3
    if mode == "safeguard":
        assert roles.count("compaction") >= 4, "in parts"


async def test_context_window_smaller_than_configured(claw):
    def say(asked, n):
        if asked.summary:
            return f"The words of january and february were counted, summary {n}."
        return f"I look at part {n}.\n" + call("exec", command=LONG.format(n, 500)) if n < 3 else "It is all done now."

    agent = claw.take("wide", say)
    claw.engine.context_window, before = 20_000, claw.engine.context_window
    try:
        await agent.chat()
        await agent.chat("Go on, please.")
    finally:
        claw.engine.context_window = before
    roles = agent.roles
    assert roles[:3] == ["main"] * 3
    assert set(roles[3:-1]) == {"compaction"}
    assert roles[-1] == "main"
    assert len(check(agent)) == 2


async def test_removed_tool_outputs_open_branches(claw):
    agent = claw.take(
        "small", lambda asked, n: "It is all done." if n == 5 else call("exec", command=LONG.format(n, 700))
    )
    await agent.chat()
    assert agent.roles[:6] == ["main"] * 6
    assert [turn.parent for turn in agent.turns[:6]] == [None, 0, 1, 0, 0, 0]
    assert len(check(agent)) == 4


async def test_call_of_unknown_tool(claw):
    script = [call("nothing_like_it", x=1), call("exec", command="echo 1"), "It is all done."]
    agent = claw.take("wide", lambda asked, n: script[n])
    await agent.chat()
    assert agent.roles == ["main"] * 3
    first, second, _ = agent.seen
    assert first.prompt == second.prompt, "OpenClaw forgets it, and asks again"
    assert [sample.turns for sample in check(agent)] == [(0,), (1, 2)]


async def test_engine_errors_in_conversation(claw):
    def say(asked, n):
        claw.engine.dies = n == 4
        if n in (1, 2):
            return refused(500 if n == 1 else 429, retryable=n == 2)
        return (
            "I look.\n" + call("exec", command="echo one") if n == 0 else f"And this is the answer to all of it, {n}."
        )

    agent = claw.take("wide", say)
    await agent.chat()
    await agent.chat("Say it again, please.")
    await agent.chat("Once more, please.")
    assert set(agent.roles) == {"main"}
    assert [turn.flaw for turn in agent.turns] == [None, "error", "error", None, "error", None]
    (sample,) = check(agent)
    assert sample.turns == (0, 3, 5)


async def test_several_conversations_of_one_agent(claw):
    agent = claw.take("wide", lambda asked, n: f"The answer is {n}.")
    await agent.chat(session="one")
    await agent.chat("Something else that is not alike at all.", session="two")
    await agent.chat("And now?", session="two")
    await agent.chat("And now?", session="one")
    assert agent.roles == ["main", "unknown", "unknown", "main"]
    assert [sample.turns for sample in check(agent)] == [(0, 3)]
    await agent.chat("And as the same user?", session=None, user="somebody")
    await agent.chat("/compact", session=None, user="somebody")
    assert agent.turns[-1].parent == 4, "a user is a session too; over this API a command is a message like any other"
