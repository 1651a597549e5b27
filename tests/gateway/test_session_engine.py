"""SessionEngine: the same replies and records as over HTTP."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from clawgym.agents import Agent
from clawgym.agents.tool_loop import ToolLoopAgent
from clawgym.engines import OpenAIEngine, Sampling
from clawgym.errors import BudgetExceeded, ContextLengthExceeded, EngineError
from clawgym.gateway.request import SessionRequest
from clawgym.gateway.server import Gateway
from clawgym.gateway.session_engine import SessionEngine
from clawgym.pool import Pool
from clawgym.pool.documents import conversations_of
from clawgym.records import Episode, Outcome, VerifierResult
from clawgym.rollout import Ended, EpisodeRequest
from clawgym.rollout.collect import collect_episode, in_process, over_http
from clawgym.sandbox import Backend
from clawgym.tasks.packs import terminal_basic

from .scripted import ScriptedEngine

_CALL_ID = re.compile(r"call[0-9a-f]{24}")
SAID = (
    'Looking.<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>',
    "I only talk.",
    '<tool_call>\n{"name": "bash", "arguments": {"command": \n</tool_call>',
    '<tool_call>\n{"name": "submit", "arguments": {"message": "done"}}\n</tool_call>',
)


def client(base_url: str, api_key: str) -> Agent:
    return ToolLoopAgent(OpenAIEngine("policy", base_url=base_url, api_key=api_key))


async def test_records_equal_those_over_http(model_folder: Path, backend: Backend, tmp_path: Path) -> None:
    task = terminal_basic.make("file-op", 0)
    records = []
    for name in ("http", "here"):
        engine = ScriptedEngine(model_folder, lambda prompt, number: SAID[number % len(SAID)])
        with Pool(tmp_path / f"{name}.db") as pool:
            async with Gateway(engine, pool) as gateway:
                await gateway.listen()
                session = SessionRequest(sampling=Sampling(temperature=0.9, max_tokens=200))
                request = EpisodeRequest(task=task, seed=3, session=session)
                agent = over_http(client) if name == "http" else in_process(ToolLoopAgent)
                episode = (await collect_episode(request, agent, backend, gateway)).episode
        plain = []
        for turn in episode.turns:
            assert turn.sampling["seed"] is not None, "over HTTP that of the request"
            sampling = {**turn.sampling, "seed": None}
            plain.append(_CALL_ID.sub("call", repr(dataclasses.replace(turn, seconds={}, id="", sampling=sampling))))
        steps = [(s.message, s.tool_calls, [o.content for o in s.observations]) for s in episode.steps]
        records.append((plain, steps, str(episode.outcome), episode.final_message))
        assert all(turn.sampled_ids for turn in episode.turns)
    assert records[0] == records[1]
    assert len(records[0][0]) == 4


async def test_episode_is_closed_if_graded_callback_fails(model_folder: Path, tmp_path: Path, backend: Backend) -> None:
    engine = ScriptedEngine(model_folder, lambda prompt, number: SAID[number % len(SAID)])

    async def fails(session: str, episode: object) -> dict[str, float]:
        raise LookupError("nobody knows")

    with Pool(tmp_path / "p.db") as pool:
        async with Gateway(engine, pool) as gateway:
            request = EpisodeRequest(task=terminal_basic.make("file-op", 0), seed=3)
            with pytest.raises(LookupError, match="nobody knows"):
                await collect_episode(request, in_process(ToolLoopAgent), backend, gateway, graded=fails)
        (episode,) = pool.episodes()
        assert episode.state != "open"
        assert episode.reward is not None


async def test_pool_records_judging_model(model_folder: Path, tmp_path: Path) -> None:
    engine = ScriptedEngine(model_folder, lambda prompt, number: "yes")
    with Pool(tmp_path / "p.db") as pool:
        async with Gateway(engine, pool) as gateway:
            for judge in ("", "rubric (judge-1)"):
                opened = await gateway.open_session()
                asked = [{"role": "user", "content": "Is it?"}]
                await SessionEngine(gateway, opened).complete(asked, sampling=Sampling())
                result = VerifierResult({"a": 1.0}, 1.0, 1.0, None, judged_by=judge)
                episode = Episode("t", "h", 0, 0, "a", Outcome.SOLVED, result=result)
                await gateway.close_session(opened.id, Ended(episode=episode, reward=1.0, truncated=False).end())
        code, judged = pool.episodes()
        assert (code.meta.get("judged_by"), judged.meta["judged_by"]) == (None, "rubric (judge-1)")
        rows = [next(conversations_of(one, pool.turns(one.id), {})) for one in (code, judged)]
        assert [row.get("judged_by") for row in rows] == [None, "rubric (judge-1)"]


async def test_refusal_is_engine_error_with_status(model_folder: Path, tmp_path: Path) -> None:
    engine = ScriptedEngine(model_folder, lambda prompt, number: "yes", context_window=300)
    with Pool(tmp_path / "p.db") as pool:
        async with Gateway(engine, pool) as gateway:
            opened = await gateway.open_session(SessionRequest(most_turns=1))
            here, asked = SessionEngine(gateway, opened), [{"role": "user", "content": "Is it?"}]
            with pytest.raises(ContextLengthExceeded):
                await here.complete([{"role": "user", "content": "long " * 400}], sampling=Sampling())
            with pytest.raises(EngineError, match="'messages'") as error:
                await here.complete([], sampling=Sampling())
            assert error.value.status == 400
            assert (await here.complete(asked, sampling=Sampling())).text == "yes"
            with pytest.raises(BudgetExceeded, match="has used its 1 model calls"):
                await here.complete(asked, sampling=Sampling())
            other = SessionEngine(gateway, dataclasses.replace(opened, secret="guessed"))
            with pytest.raises(EngineError, match="no such session") as error:
                await other.complete(asked, sampling=Sampling())
            assert error.value.status == 401
            assert here.identity() == engine.identity()
            await here.aclose()
