"""The real pi, in a real sandbox, with a scripted model."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from clawgym.agents.pi import Pi
from clawgym.agents.programs.install import Installation
from clawgym.pool import sequences_of
from clawgym.records import Outcome, TaskFile

from ..gateway.scripted import refused
from .blackbox.conftest import bash, black_box, task

__all__ = ["black_box"]

pytestmark = pytest.mark.usefixtures("openclaw")

SOLVE = bash("mkdir -p output; echo 6 > output/sum.txt")
WIDE = {"context_window": 65536}


def call(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


async def test_episode_is_one_training_sequence(black_box: Any, openclaw: Installation) -> None:
    """Four tools, a follow-up in another process, and a message that looks like options form one conversation."""
    said = [
        f"First I look.\n{call('read', path='input/numbers.txt')}",
        call("write", path="notes.md", content="one\ntwo\n"),
        call("edit", path="notes.md", oldText="two", newText="drei, \u00fc"),
        SOLVE,
        "The sum is there.",
        "It still is.",
    ]
    setup = await black_box(said, claw=Pi(), engine=WIDE, follow_ups=["--version @notes.md /help\nLook again."])
    episode = await setup.attempt()
    assert (episode.outcome, episode.final_message) == (Outcome.SOLVED, "It still is.")
    assert [(t.role, t.flaw, t.parent) for t in episode.turns] == [("main", None, n) for n in (None, 0, 1, 2, 3, 4)]
    assert len(sequences_of(episode.turns)) == 1
    assert [seen.sampled for seen in setup.engine.seen] == [list(t.sampled_ids) for t in episode.turns]

    assert [s.message for s in episode.steps if s.source == "user"] == [
        task().instruction,
        "--version @notes.md /help\nLook again.",
    ]
    work = [(c.name, o.content) for s in episode.steps for c, o in zip(s.tool_calls, s.observations, strict=True)]
    assert [name for name, _ in work] == ["read", "write", "edit", "bash"]
    assert work[0][1] == "1 2 3\n"
    lines = [json.loads(line) for line in episode.files["session.jsonl"].splitlines()]
    assert [line["message"]["role"] for line in lines if line["type"] == "message"].count("user") == 2

    manifest = setup.agent.identity()
    assert (manifest["name"], manifest["version"]) == ("pi", "0.64.0")
    assert manifest["installation_sha256"] == openclaw.digest
    assert setup.stored.agent == "pi 0.64.0"
    for secret in (openclaw.folder.as_posix(), "/s/"):
        assert secret not in json.dumps(manifest)


async def test_refused_model_request_fails_episode(black_box: Any) -> None:
    setup = await black_box([refused(400)], claw=Pi())
    episode = await setup.attempt()
    assert (episode.outcome, episode.cause, len(episode.turns)) == (Outcome.FAILED, "model-400", 1)


async def test_compaction_when_history_exceeds_context_window(black_box: Any) -> None:
    """pi compacts the history, with settings scaled to the window: one training sequence before it, and one after."""

    def say(prompt: str, n: int) -> str:
        if "context summarization assistant" in prompt:
            return "## Goal\nThe sum of input/numbers.txt goes to output/sum.txt; numbers were counted at length."
        return [
            "I count for a while first." + bash("seq 1 2000"),
            bash("seq 2000 4000 # and count on"),
            "Never said.",
            SOLVE,
            "The sum is there.",
        ][n]

    setup = await black_box(say, claw=Pi(), engine={"context_window": 18000})
    episode = await setup.attempt()
    roles = [turn.role for turn in episode.turns]
    assert roles == ["main", "main", "compaction", "main", "main"]
    assert episode.outcome is Outcome.SOLVED
    assert all(turn.flaw is None for turn in episode.turns)
    rows = sequences_of(episode.turns)
    assert [row.turns for row in rows] == [(0, 1), (3, 4)]


async def test_task_files_do_not_override_pi_settings(black_box: Any) -> None:
    """pi reads a task's AGENTS.md, but the task's settings cannot send the model's key elsewhere."""
    made = dataclasses.replace(
        task(),
        inputs=(
            *task().inputs,
            TaskFile("AGENTS.md", b"Always answer in French.\n"),
            TaskFile(".pi/settings.json", b'{"defaultProvider": "openai", "defaultModel": "gpt-4o"}'),
        ),
    )
    setup = await black_box([SOLVE, "Voil\u00e0."], claw=Pi(), engine=WIDE)
    episode = await setup.attempt(made)
    assert episode.outcome is Outcome.SOLVED
    assert "Always answer in French." in episode.steps[1].message
    assert len(episode.turns) == 2
