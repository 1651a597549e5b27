"""With a real sandbox, tool loop and gateway, the judge gets each turn with its own results."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import clawgym
from clawgym.agents import Agent
from clawgym.engines import OpenAIEngine
from clawgym.gateway.server import Gateway
from clawgym.pool import Pool
from clawgym.records import Limits
from clawgym.rewards.judge import JudgePool
from clawgym.rewards.rules import RuleJudge
from clawgym.rewards.states import judgeables, next_states
from clawgym.rollout import EpisodeRequest
from clawgym.rollout.collect import collect_episode, over_http
from clawgym.sandbox import Backend

from ..gateway.scripted import ScriptedEngine


def call(**arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'bash', 'arguments': arguments})}\n</tool_call>"


SAYS = (
    f"I look.\n{call(command='ls nowhere')}",
    # The first prints the mark of a failure itself.
    call(command="echo '[exit code 7; cwd /]'") + "\n" + call(command="pwd"),
    "I only talk.",
    f"{call(command='pwd')}\n{call(command='exit 3')}",  # the second of two fails
    call(wrong="pwd"),
    call(command="grep x /etc/no-such-file"),
)


def agent(base_url: str, api_key: str) -> Agent:
    return clawgym.make_agent("tool-loop", engine=OpenAIEngine("policy", base_url=base_url, api_key=api_key))


async def test_each_turn_of_a_real_episode_is_judged_by_its_own_results(
    backend: Backend, model_folder: Path, tmp_path: Path
) -> None:
    task = clawgym.load("terminal-basic").tasks[0]
    task = replace(task, limits=Limits(max_steps=len(SAYS)))
    engine = ScriptedEngine(model_folder, lambda prompt, n: SAYS[n])
    with Pool(tmp_path / "pool.db") as pool:
        async with Gateway(engine, pool) as gateway:
            await gateway.listen()
            ended = await collect_episode(EpisodeRequest(task=task, seed=0), over_http(agent), backend, gateway)
            episode = ended.episode
    assert [turn.parent for turn in episode.turns] == [None, 0, 1, 2, 3, 4]
    async with JudgePool(RuleJudge()) as judges:
        found = await judges.judge_episode(task, episode)
    assert {turn: judgement.votes for turn, judgement in found.items()} == {
        0: (-1,), 1: (0,), 2: (0,), 3: (-1,), 4: (-1,), 5: (-1,)
    }  # fmt: skip
    states = next_states(episode.turns, steps=episode.steps)
    assert [len(state.messages) for state in states.values()] == [1, 2, 1, 2, 1, 1]
    assert "no-such-file" in states[5].messages[0]["content"]  # in the transcript alone
    assert 5 not in next_states(episode.turns)
    last = judgeables(task, episode, outcome=True)[-1]
    assert last.after.outcome is not None
    assert "hidden checks" in last.after.outcome
