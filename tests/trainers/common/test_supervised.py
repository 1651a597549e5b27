"""Demonstrations and other data for imitation."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, Literal

import pytest

from clawgym.agents.demonstrate import reference_calls
from clawgym.agents.tool_loop import ToolLoopAgent
from clawgym.engines import OpenAIEngine
from clawgym.errors import AgentError, TrainingError
from clawgym.gateway.render import Renderer
from clawgym.gateway.server import Gateway
from clawgym.pool import Pool, sequences_of
from clawgym.pool.exchange import export
from clawgym.records import Task
from clawgym.rollout import EpisodeRequest
from clawgym.rollout.collect import collect_episode, over_http
from clawgym.sandbox import Backend
from clawgym.tasks.packs import terminal_basic, toolcall_basic
from clawgym.tasks.packs.seeded import WORDS
from clawgym.trainers.common.demonstrations import demonstrate
from clawgym.trainers.common.supervised import WordShuffle, conversations, masked_sequence, masked_sequences

from ...gateway.scripted import ScriptedEngine
from ..runs import small

TEXT = terminal_basic.make("text-steps", 0)
TOOLS = toolcall_basic.make("bank-transfer", 0)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("task", "protocol"), [(TEXT, "text"), (TEXT, "tools"), (TOOLS, "tools")])
async def test_demonstration_has_same_ids_as_rollout(
    task: Task, protocol: Literal["text", "tools"], model_folder: Path, backend: Backend, tmp_path: Path
) -> None:
    renderer = Renderer(model_folder)
    config = small(agent={"protocol": protocol, "max_tokens": 400})
    with Pool(tmp_path / "demonstrations.db") as pool:
        assert await demonstrate(config, [task], pool) == 1
        assert await demonstrate(config, [task], pool) == 1  # already in the pool
        (said,) = conversations(pool, "demonstrations")
        export(pool, tmp_path / "messages.jsonl", format="messages")
    row = masked_sequence(renderer, said["messages"], said.get("tools") or ())
    (exported,) = masked_sequences(tmp_path / "messages.jsonl", renderer)
    assert exported == row

    replies: list[list[int]] = []
    for token, trained, before in zip(row.ids, row.mask, (0, *row.mask), strict=False):
        if trained:
            if not before:
                replies.append([])
            replies[-1].append(token)
    assert len(replies) == len(reference_calls(task))
    engine = ScriptedEngine(model_folder, lambda prompt, number: replies[number])

    def agent(base_url: str, api_key: str) -> ToolLoopAgent:
        return ToolLoopAgent(OpenAIEngine("m", base_url=base_url, api_key=api_key), protocol=protocol)

    with Pool(tmp_path / "rollouts.db") as pool:
        async with Gateway(engine, pool) as gateway:
            await gateway.listen()
            ended = await collect_episode(EpisodeRequest(task=task, seed=0), over_http(agent), backend, gateway)
            episode = ended.episode
        assert str(episode.outcome) == "solved"
        (sample,) = sequences_of(episode.turns)
    assert (sample.ids, sample.mask) == (row.ids, row.mask)


def test_task_without_solution_is_named() -> None:
    import dataclasses

    with pytest.raises(AgentError, match=r"has no reference solution: add solution/solve\.sh"):
        reference_calls(dataclasses.replace(TEXT, solution=()))


def test_multiline_commands_stay_one_call() -> None:
    several, one = terminal_basic.make("text-steps", 0), terminal_basic.make("script-args", 0)
    assert len(reference_calls(several)) == len(several.solution[0].read().splitlines())  # the first line starts bash
    assert [call.name for call in reference_calls(one)] == ["bash", "submit"]


def test_word_shuffle_is_consistent_within_a_sequence(tmp_path: Path) -> None:
    from clawgym.engines.tiny import make_tiny_model

    corpus = [form for word in WORDS for form in (word, f" {word}", word.capitalize(), f" {word.capitalize()}")] * 2
    renderer = Renderer(make_tiny_model(tmp_path / "model", vocab=4000, corpus=corpus))
    said = [{"role": "user", "content": "Copy olive.txt to the folder mango. Olive!"},
            {"role": "assistant", "content": "cp olive.txt mango"}]  # fmt: skip
    row = masked_sequence(renderer, said)
    shuffle = WordShuffle(renderer, WORDS)
    changed = [shuffle(row, random.Random(seed)) for seed in range(20)]
    assert all(len(other.ids) == len(row.ids) and other.mask == row.mask for other in changed)
    assert len({other.ids for other in changed}) == 20
    for other in changed:
        table: dict[int, int] = {}
        for old, new in zip(row.ids, other.ids, strict=True):
            assert table.setdefault(old, new) == new
        assert len(set(table.values())) == len(table)
        assert sum(old != new for old, new in table.items()) <= 5  # olive, mango, with and without space, Olive


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{}", "line 1 has no messages"),
        ('{"messages": [1]}', "line 1: messages is not a list"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "no message of the role"),
    ],
)
def test_invalid_sft_file_is_named(text: str, says: str, model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "m.jsonl").write_text(text + "\n")
    with pytest.raises(TrainingError, match=says):
        list(masked_sequences(tmp_path / "m.jsonl", Renderer(model_folder)))
    failed: dict[str, Any] = {"messages": [], "outcome": "failed"}
    (tmp_path / "m.jsonl").write_text(json.dumps(failed) + "\n")
    assert list(masked_sequences(tmp_path / "m.jsonl", Renderer(model_folder))) == []
