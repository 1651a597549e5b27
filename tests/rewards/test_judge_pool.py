"""Judging concurrently with rollouts: bounded, timed, counted, and without leaked tasks."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from clawgym.engines.openai import OpenAIEngine
from clawgym.errors import BudgetExceeded, EngineError
from clawgym.gateway.server import Gateway
from clawgym.pool import Pool
from clawgym.records import Turn
from clawgym.records.judge import Judgeable, Judgement
from clawgym.rewards.judge import JudgePool
from clawgym.rewards.model import ModelJudge, policy_engine
from clawgym.rewards.rules import RuleJudge
from clawgym.rewards.votes import rewards_of

from ..gateway.scripted import ScriptedEngine


def talk(count: int) -> list[Turn]:
    """``count`` replies, and after each but the last a word of the user."""
    return [
        Turn(parent=n - 1 if n else None, flaw="text-only", messages=({"role": "user", "content": f"say {n}"},),
             reply={"role": "assistant", "content": f"said {n}"})
        for n in range(count)
    ]  # fmt: skip


class Slow:
    """Votes +1 after ``seconds`` of the turn's number."""

    name, version = "slow", "0"

    def __init__(self, *seconds: float | Exception) -> None:
        self.seconds = seconds
        self.running = self.most = self.ended = 0
        self.full = asyncio.Event()
        """Four run at once."""

    async def judge(self, asked: Judgeable) -> Judgement:
        self.running += 1
        self.most = max(self.most, self.running)
        if self.running == 4:
            self.full.set()
        try:
            wait = self.seconds[asked.turn % len(self.seconds)]
            if isinstance(wait, Exception):
                raise wait
            await asyncio.sleep(wait)
            return Judgement((1,), ("ok",), self.name, self.version)
        finally:
            self.running -= 1
            self.ended += 1


async def test_failed_and_late_turns_are_absent_and_counted_by_cause() -> None:
    judge = Slow(0, 60, EngineError("no: wait"), EngineError("no: wait", status=503), BudgetExceeded("spent: stop"),
                 ZeroDivisionError())  # fmt: skip
    async with JudgePool(judge, deadline=1) as pool:
        found = await pool.judge_episode("", talk(7), id="e")
    assert found.keys() == {0}
    assert pool.scored == 1
    assert pool.unscored == Counter(
        {"late": 1, "engine": 1, "http-503": 1, "budget": 1, "ZeroDivisionError": 1, "next-state": 1}
    )
    assert judge.running == 0
    assert re.fullmatch(r"ZeroDivisionError \(test_judge_pool\.py:\d+\)", pool.errors.pop("ZeroDivisionError"))
    assert not pool.errors


async def test_no_more_than_so_many_at_once_and_waiting_is_not_late() -> None:
    judge = Slow(0.06)
    async with JudgePool(judge, concurrency=3, deadline=1) as pool:
        some = [pool.submit("", talk(11), id=str(n)) for n in range(6)]
        found = await asyncio.gather(*some)
    assert [set(each) for each in found] == [set(range(10))] * 6
    assert judge.most == 3
    assert not pool.unscored["late"]


async def test_submit_returns_at_once() -> None:
    async with JudgePool(Slow(60)) as pool:
        work = pool.submit("", talk(3))
        await asyncio.sleep(0)
        assert not work.done()
    assert work.cancelled()
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit("", talk(3))


async def test_cancellation_leaves_nothing_running() -> None:
    judge = Slow(60)
    before = asyncio.all_tasks()
    pool = JudgePool(judge, concurrency=4)
    caller = asyncio.create_task(pool.judge_episode("", talk(9)))
    pool.submit("", talk(9))
    await judge.full.wait()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    await pool.aclose()
    assert judge.running == 0
    assert asyncio.all_tasks() == before
    assert not pool.scored


async def test_what_was_judged_is_not_asked_again() -> None:
    judge = Slow(0)
    async with JudgePool(judge) as pool:
        first = await pool.judge_episode("", talk(4))
        rest = await pool.judge_episode("", talk(6), judged=first)
    assert (set(first), set(rest), judge.ended) == ({0, 1, 2}, {3, 4}, 5)


async def test_an_episode_is_not_judged_for_ever_and_what_was_judged_in_time_is_kept() -> None:
    judge = Slow(0, 60, 0)
    async with JudgePool(judge) as pool:
        found = await pool.judge_episode("", talk(4), id="e", within=1)
        assert await pool.judge_episode("", talk(1), id="e", within=1) == {}
    assert found.keys() == {0, 2}
    assert (pool.scored, pool.unscored["late"], judge.running) == (2, 1, 0)


async def test_invalid_judgements_are_counted_and_raise_nothing() -> None:
    class Odd:
        name, version = "odd", "0"

        async def judge(self, asked: Judgeable) -> Any:
            return [None, "good", Judgement((1,), ("ok",), object(), "0")][asked.turn]  # type: ignore[arg-type]

    async with JudgePool(Odd()) as pool:
        assert await pool.judge_episode("", talk(4), id="e") == {}
    assert pool.unscored == Counter({"no-judgement": 2, "TypeError": 1, "next-state": 1})


async def test_a_judge_without_a_valid_vote_is_counted_and_gives_no_reward() -> None:
    class Mumbling:
        name, version = "mumbling", "0"

        async def judge(self, asked: Judgeable) -> Judgement:
            return Judgement((None, None), ("hm", "hm"), self.name, self.version)

    async with JudgePool(Mumbling()) as pool:
        found = await pool.judge_episode("", talk(2))
    assert rewards_of(found) == ({}, {})
    assert (pool.scored, pool.unscored["invalid"]) == (0, 1)


async def test_logging_changes_nothing() -> None:
    async def judged() -> dict[int, Judgement]:
        async with JudgePool(RuleJudge()) as pool:
            return await pool.judge_episode("", talk(4))

    heard = await judged()
    logging.disable(logging.CRITICAL)
    try:
        assert await judged() == heard
    finally:
        logging.disable(logging.NOTSET)
    assert heard.keys() == {0, 1, 2}


async def test_judgements_come_back_from_the_pool(tmp_path: Path) -> None:
    with Pool(tmp_path / "pool.db") as store:
        id = store.open_episode(channel="online")
        store.append([(id, n, turn) for n, turn in enumerate(talk(3))])
        async with JudgePool(RuleJudge()) as pool:
            found = await pool.judge_episode("", store.turns(id), id=id)
        values, about = rewards_of(found)
        store.set_turn_rewards(id, values, about=about)
        assert store.turn_rewards(id) == {"judge": {0: 0.0, 1: 0.0}}
        back = store.about_turn_rewards(id)["judge"]
        assert {turn: Judgement.from_about(said) for turn, said in back.items()} == found


SERVER = """
import http.server, json, sys
class Judge(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        message = {"role": "assistant", "content": "I looked.\\nVerdict: +1"}
        body = json.dumps({"choices": [{"index": 0, "finish_reason": "stop", "message": message}]}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_): pass
class Server(http.server.ThreadingHTTPServer):
    allow_reuse_address = True
server = Server(("127.0.0.1", int(sys.argv[1])), Judge)
print(server.server_address[1], flush=True)
server.serve_forever()
"""


@contextlib.contextmanager
def judge_process(port: int = 0):
    """A judge in a process of its own; killed at the end."""
    process = subprocess.Popen([sys.executable, "-c", SERVER, str(port)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield int(process.stdout.readline())
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


async def test_after_a_judge_was_killed_and_started_again_later_turns_are_scored() -> None:
    turns = talk(7)
    found: dict[int, Judgement] = {}
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(judge_process())
        engine = OpenAIEngine("judge", base_url=f"http://127.0.0.1:{port}/v1", max_retries=0, timeout=20)
        async with JudgePool(ModelJudge(engine), deadline=60) as pool:
            found |= await pool.judge_episode("", turns[:3], id="e")
            assert found.keys() == {0, 1}
            stack.close()  # SIGKILL
            assert await pool.judge_episode("", turns[:5], id="e", judged=found) == {}
            assert pool.unscored["engine"] == 2
            stack.enter_context(judge_process(port))
            found |= await pool.judge_episode("", turns, id="e", judged=range(4))  # what comes from now on
            assert found.keys() == {0, 1, 4, 5}
            found |= await pool.judge_episode("", turns, id="e", judged=found)  # and what was missed
        await engine.aclose()
    assert found.keys() == {0, 1, 2, 3, 4, 5}
    assert all(judgement.votes == (1, 1, 1) for judgement in found.values())


async def test_the_policy_judges_itself_on_a_channel_that_is_not_trained(model_folder: Path, tmp_path: Path) -> None:
    policy = ScriptedEngine(model_folder, lambda prompt, n: f"It went well.\nVerdict: {'+1' if n % 2 else '-1'}")
    with Pool(tmp_path / "pool.db") as store:
        async with Gateway(policy, store) as gateway:
            await gateway.listen()
            async with policy_engine(gateway) as engine, JudgePool(ModelJudge(engine, weights="3")) as pool:
                found = await pool.judge_episode("", talk(3), id="e")
            with pytest.raises(ValueError, match="trained on"):
                async with policy_engine(gateway, channel="train"):
                    pass
        assert {vote for judgement in found.values() for vote in judgement.votes} == {1, -1}
        (said,) = store.episodes()
        assert (said.channel, said.state) == ("judge", "closed")
        assert len(store.turns(said.id)) == 6
        assert {turn.flaw for turn in store.turns(said.id)} == {None}  # it could be trained on, were it fetched
        assert store.fetch("trainer", 0, min_episodes=1) is None
        asked = json.dumps([turn.messages for turn in store.turns(said.id)])
        assert "said 1" in asked
