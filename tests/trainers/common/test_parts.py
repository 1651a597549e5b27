"""Tasks in parts that share nothing."""

from __future__ import annotations

from itertools import combinations

import pytest

from clawgym.errors import TrainingError
from clawgym.trainers.common.parts import chain_of, load_parts
from clawgym.trainers.config import AgentPart, Seeds, Tasks

EASY = ("write-word", "file-op", "line-filter", "text-steps")
PARTS = ("heldout", "validation", "train", "demonstrations")


def test_no_text_no_solution_and_no_chain_is_in_two_parts() -> None:
    asked = Tasks(
        generators=EASY,
        demonstrations=Seeds(count=40),
        train=Seeds(first=1000, count=200),
        validation=Seeds(count=16),
        heldout=Seeds(first=1000, count=64),
    )
    parts = load_parts(asked, AgentPart(max_steps=7))
    texts, solutions, chains = {}, {}, {}
    for name in PARTS:
        tasks = getattr(parts, name)
        texts[name] = {task.instruction for task in tasks}
        solutions[name] = {task.solution[0].read() for task in tasks}
        chains[name] = {chain_of(task) for task in tasks if task.metadata["generator"] == "text-steps"}
        assert all(task.limits.max_steps == 7 for task in tasks)
    for one, other in combinations(PARTS, 2):
        for found in (texts, solutions, chains):
            assert not found[one] & found[other]
    assert len(parts.heldout) >= 240
    assert parts.left_out["train"] > 0
    assert chains["train"]


def test_the_chain_is_what_is_done_without_what_it_is_done_to() -> None:
    asked = Tasks(generators=("write-word",), train=Seeds(count=20), demonstrations=Seeds(first=500, count=3))
    parts = load_parts(asked, AgentPart())
    assert {chain_of(task) for task in parts.train} == {"#!/usr/bin/env bash\necho _ > _.txt\n"}


def test_a_part_without_tasks_is_named() -> None:
    twice = Tasks(set="terminal-basic:train", generators=(), train=Seeds(count=2), demonstrations=Seeds(count=2),
                  validation=Seeds(first=4, count=2), heldout=Seeds(first=8, count=2))  # fmt: skip
    with pytest.raises(TrainingError, match=r"tasks\.demonstrations: no task of .* is left"):
        load_parts(twice, AgentPart())
    with pytest.raises(TrainingError, match="is no pack that is made from seeds"):
        load_parts(Tasks(set="terminal-basic:train", generators=EASY), AgentPart())
