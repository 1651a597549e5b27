"""The replay engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clawgym.engines import Completion, Engine, Recorded, ReplayEngine, Sampling
from clawgym.engines.replay import completion_from_json, completion_to_json
from clawgym.errors import EngineError
from clawgym.records import ToolCall, Usage

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
    assert engine.receipt() == ReplayEngine.from_file(path).receipt()
    assert engine.receipt() != ReplayEngine([FULL]).receipt()


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
