"""The replay engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from clawgym.engines import (
    Completion,
    Engine,
    GenerateRequest,
    Recorded,
    ReplayEngine,
    ReplayTokens,
    Sampling,
    TextEngine,
    TokenEngine,
    Tokens,
)
from clawgym.engines.replay import completion_from_json, completion_to_json
from clawgym.errors import EngineError
from clawgym.records import ToolCall, Turn, Usage

FULL = Completion(
    text="look",
    tool_calls=(ToolCall("c1", "bash", {"command": "ls"}),),
    malformed_calls=("bash({",),
    reasoning="hm",
    finish_reason="tool_calls",
    usage=Usage(3, 4, 1, 0.5),
    model="m",
)


def user(text: str, answers: int = 0) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}, *({"role": "assistant", "content": ""} for _ in range(answers))]


async def test_the_nth_answer_of_a_conversation_is_the_nth_recorded():
    engine = ReplayEngine([Completion("one"), Completion("two"), Recorded(Completion("three"), match="blue")])
    assert isinstance(engine, Engine)
    assert (await engine.complete(user("x", 1), sampling=Sampling())).text == "two"
    assert (await engine.complete(user("x"), sampling=Sampling())).text == "one"
    assert (await engine.complete(user("a blue one", 2), sampling=Sampling())).text == "three"
    with pytest.raises(EngineError, match=r"2 answers .* number 3"):
        await engine.complete(user("x", 2), sampling=Sampling())


async def test_a_file_is_read_back(tmp_path: Path):
    path = tmp_path / "answers.jsonl"
    path.write_text(json.dumps(completion_to_json(FULL)) + "\n\n" + '{"text": "done", "match": "hi"}\n')
    engine = ReplayEngine.from_file(path)
    assert await engine.complete(user("hi"), sampling=Sampling()) == FULL
    assert (await engine.complete(user("hi", 1), sampling=Sampling())).text == "done"
    assert engine.identity() == ReplayEngine.from_file(path).identity()
    assert engine.identity() != ReplayEngine([FULL]).identity()


def test_json_round_trip():
    assert completion_from_json(completion_to_json(FULL)) == FULL


@pytest.mark.parametrize(
    "line", ["{", "[]", "{}", '{"tool_calls": [{}]}', '{"text": "a", "usage": {"x": 1}}', "\ud800"]
)
def test_a_bad_line_is_named(tmp_path: Path, line: str):
    path = tmp_path / "answers.jsonl"
    path.write_bytes(('{"text": "a"}\n' + line).encode("utf-8", "surrogatepass"))
    with pytest.raises(EngineError, match=r"answers\.jsonl"):
        ReplayEngine.from_file(path)


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(EngineError, match="check the path"):
        ReplayEngine.from_file(tmp_path / "none.jsonl")


async def test_a_stream_joins_to_the_recorded_answer():
    engine = ReplayEngine([FULL, Completion("a\nb c\n")])
    assert isinstance(engine, TextEngine)
    got = [delta async for delta in engine.stream({"messages": user("x"), "model": "any"})]
    assert "".join(d.text for d in got) == "look"
    assert "".join(d.reasoning for d in got) == "hm"
    (first, *rest) = [call for d in got for call in d.calls]
    assert (first.id, first.name, "".join(c.arguments for c in rest)) == ("c1", "bash", '{"command": "ls"}')
    assert (got[-1].finish_reason, got[-1].usage) == ("tool_calls", FULL.usage)
    got = [delta async for delta in engine.stream({"messages": user("x", 1)})]
    assert [d.text for d in got] == ["a\n", "b c\n", ""]
    assert got[-1].finish_reason == "stop"


TURNS = (
    Turn(context_ids=(1, 2), sampled_ids=(3, 4), logprobs=(-0.5, -0.25), policy_version=7, finish_reason="tool_calls"),
    Turn(context_ids=(5,), sampled_ids=(6, 7), logprobs=(-1.0, -2.0), parent=0, finish_reason="length"),
    Turn(context_ids=(1, 2), sampled_ids=(9,), logprobs=(-3.0,), finish_reason="aborted"),
)


async def test_recorded_turns_answer_the_very_prompts_they_were_sampled_after():
    other = (Turn(context_ids=(1, 2), sampled_ids=(8,), logprobs=(-4.0,)),)
    engine = ReplayTokens([TURNS, other], tokenizer="t")
    assert isinstance(engine, TokenEngine)

    async def ask(*prompt: int, **sampling: Any) -> list[Tokens]:
        return [t async for t in engine.generate(GenerateRequest(prompt, Sampling(**sampling)))]

    assert await ask(1, 2, 3, 4, 5) == [Tokens((6,), (-1.0,), None), Tokens((7,), (-2.0,), None, "length")]
    assert await ask(1, 2) == [Tokens((3,), (-0.5,), 7), Tokens((4,), (-0.25,), 7, "stop")]
    assert await ask(1, 2) == [Tokens((8,), (-4.0,), None, "stop")]
    assert await ask(1, 2, max_tokens=1) == [Tokens((3,), (-0.5,), 7, "length")]
    with pytest.raises(EngineError, match="nothing was recorded after this prompt of 3 ids"):
        await ask(1, 2, 3)
    assert engine.identity() == ReplayTokens([TURNS, other], tokenizer="u").identity()
    assert engine.identity() != ReplayTokens([TURNS], tokenizer="t").identity()
