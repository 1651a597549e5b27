from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clawgym.errors import TaskError
from clawgym.records import Episode, Image, Observation, Outcome, Step, ToolCall, Turn, Usage
from clawgym.records.atif import ATIF_VERSION, episode_to_atif, json_safe, steps_from_atif

WHEN = "2026-01-02T03:04:05+00:00"


def episode(*steps: Step, **kwargs) -> Episode:
    return Episode("t", "h" * 64, 0, 1, "tool-loop", Outcome.FAILED, steps=steps, **kwargs)


def through_json(ep: Episode) -> dict:
    return json.loads(json.dumps(episode_to_atif(ep), allow_nan=False))


FULL = (
    Step("system", "You are", WHEN),
    Step("user", "Fix it", WHEN, extra={"n": 1}),
    Step(
        "agent",
        "I run it",
        WHEN,
        tool_calls=(ToolCall("c1", "bash", {"command": "ls"}), ToolCall("c2", "bash", {})),
        observations=(Observation("a b", "c1"), Observation("", "c2"), Observation("clock", None)),
        reasoning="because",
        model="m-1",
        usage=Usage(10, 2, 3, 0.5),
    ),
)


def test_well_formed_steps_round_trip():
    document = through_json(episode(*FULL))
    assert document["schema_version"] == ATIF_VERSION
    assert steps_from_atif(document) == FULL


def test_pictures_are_referenced_and_read_without_data():
    digest = "ab" * 32
    seen = (
        Observation("", "c1", Image(digest, b"png")),
        Observation("words", "c2", Image(digest, b"webp", "image/webp")),
        Observation("x", None, Image(digest, b"bmp", "image/bmp")),
    )
    step = Step("agent", "", WHEN, (ToolCall("c1", "see", {}), ToolCall("c2", "see", {})), seen)
    document = through_json(episode(step))
    only, both, other = document["steps"][0]["observation"]["results"]
    source = {"media_type": "image/png", "path": f"../../pictures/{digest}.png"}
    assert only == {"content": [{"type": "image", "source": source}], "source_call_id": "c1"}
    assert [part["type"] for part in both["content"]] == ["text", "image"]
    assert other == {"content": "x", "extra": {"clawgym_image": digest}}, "not a kind that the format has"
    (back,) = steps_from_atif(document)
    assert [o.content for o in back.observations] == ["", "words", "x"], "what verifiers see stays as it was"
    assert back.observations[:2] == (
        Observation("", "c1", Image(digest, b"")),
        Observation("words", "c2", Image(digest, b"", "image/webp")),
    )


text = st.text(max_size=12)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats(allow_nan=False, allow_infinity=False) | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=6,
)
calls = st.lists(
    st.builds(ToolCall, st.text(min_size=1, max_size=4), text, st.dictionaries(text, json_values, max_size=2)),
    max_size=3,
    unique_by=lambda call: call.id,
).map(tuple)
any_steps = st.builds(
    Step,
    source=st.sampled_from(["system", "user", "agent"]),
    message=text,
    timestamp=st.sampled_from([WHEN, "", "yesterday"]),
    tool_calls=calls,
    observations=st.lists(st.builds(Observation, text, st.none() | st.text(min_size=1, max_size=4)), max_size=3).map(
        tuple
    ),
    reasoning=st.none() | text,
    model=st.none() | text,
    usage=st.none()
    | st.builds(Usage, st.integers(0, 9), st.integers(0, 9), st.integers(0, 9), st.none() | st.just(1.5)),
)


@settings(deadline=None)
@given(steps=st.lists(any_steps, max_size=4))
def test_any_transcript_is_valid_atif_and_round_trips(steps):
    document = through_json(episode(*steps))
    for number, step in enumerate(document["steps"], 1):
        assert step["step_id"] == number
        if step["source"] != "agent":
            assert not {"model_name", "reasoning_content", "tool_calls", "metrics"} & set(step)
        known = {call["tool_call_id"] for call in step.get("tool_calls", ())}
        for result in step.get("observation", {}).get("results", ()):
            assert result.get("source_call_id") in known | {None}
    assert steps_from_atif(document) == tuple(steps)


def test_empty_transcript_is_valid_and_round_trips():
    document = through_json(episode())
    assert len(document["steps"]) == 1
    assert steps_from_atif(document) == ()


def test_unusual_values_become_plain_json():
    deep: dict = {}
    for _ in range(500):
        deep = {"d": deep}
    step = Step("agent", "\ud800 x", WHEN, (ToolCall("c", "f", {"nan": math.nan, "big": 10**5000, "deep": deep}),))
    document = through_json(episode(step))
    assert document["steps"][0]["message"] == "\ufffd x"
    arguments = document["steps"][0]["tool_calls"][0]["arguments"]
    assert arguments["nan"] == "nan"
    assert arguments["big"].startswith("0x")
    assert json_safe("\ud83d\ude00") == "\U0001f600"


def test_tokens_are_attached_to_steps_only_if_turns_match():
    turn = Turn((1, 2), (3,), (-0.5,), policy_version=4)
    steps = (Step("user", "q", WHEN), Step("agent", "a", WHEN))
    metrics = through_json(episode(*steps, turns=(turn,)))["steps"][1]["metrics"]
    assert metrics == {
        "prompt_token_ids": [1, 2],
        "completion_token_ids": [3],
        "logprobs": [-0.5],
        "extra": {"policy_version": 4},
    }
    apart = through_json(episode(*steps, turns=(turn, turn)))
    assert "metrics" not in apart["steps"][1]
    assert len(apart["extra"]["clawgym"]["turns"]) == 2


def test_documents_of_other_tools_are_read():
    document = {
        "schema_version": "ATIF-v1.4",
        "steps": [
            {
                "step_id": 1,
                "source": "user",
                "message": [
                    {"type": "text", "text": "see"},
                    {"type": "image", "source": {"media_type": "image/png", "path": "a.png"}},
                ],
            },
            {"step_id": 2, "source": "agent", "message": "", "observation": {"results": [{"content": None}]}},
        ],
    }
    steps = steps_from_atif(document)
    assert steps[0].message == "see\n[image: a.png]"
    assert steps[1].observations == (Observation("", None),)


@pytest.mark.parametrize(
    "document",
    [{}, {"schema_version": "ATIF-v2.0", "steps": []}, {"schema_version": "ATIF-v1.7", "steps": [{"source": "agent"}]}],
)
def test_invalid_documents_are_refused(document):
    with pytest.raises(TaskError):
        steps_from_atif(document)
