"""Splits of tasks."""

from __future__ import annotations

from itertools import combinations

import pytest

from clawgym.errors import TrainingError
from clawgym.trainers.common.splits import chain_of, load_splits
from clawgym.trainers.config import AgentPart, Seeds, Tasks

EASY = ("write-word", "file-op", "line-filter", "text-steps")
PARTS = ("heldout", "validation", "train", "demonstrations")


def test_splits_share_no_text_solution_or_chain() -> None:
    asked = Tasks(
        generators=EASY,
        demonstrations=Seeds(count=40),
        train=Seeds(first=1000, count=200),
        validation=Seeds(count=16),
        heldout=Seeds(first=1000, count=64),
    )
    splits = load_splits(asked, AgentPart(max_steps=7))
    texts, solutions, chains = {}, {}, {}
    for name in PARTS:
        tasks = getattr(splits, name)
        texts[name] = {task.instruction for task in tasks}
        solutions[name] = {task.solution[0].read() for task in tasks}
        chains[name] = {chain_of(task) for task in tasks if task.metadata["generator"] == "text-steps"}
        assert all(task.limits.max_steps == 7 for task in tasks)
    for one, other in combinations(PARTS, 2):
        for found in (texts, solutions, chains):
            assert not found[one] & found[other]
    assert len(splits.heldout) >= 240
    assert splits.left_out["train"] > 0
    assert chains["train"]


def test_chain_ignores_words() -> None:
    asked = Tasks(generators=("write-word",), train=Seeds(count=20), demonstrations=Seeds(first=500, count=3))
    splits = load_splits(asked, AgentPart())
    assert {chain_of(task) for task in splits.train} == {"#!/usr/bin/env bash\necho _ > _.txt\n"}


def test_empty_split_is_named() -> None:
    twice = Tasks(set="terminal-basic:train", generators=(), train=Seeds(count=2), demonstrations=Seeds(count=2),
                  validation=Seeds(first=4, count=2), heldout=Seeds(first=8, count=2))  # fmt: skip
    with pytest.raises(TrainingError, match=r"tasks\.demonstrations: no task of .* is left"):
        load_splits(twice, AgentPart())
    with pytest.raises(TrainingError, match="has no generators"):
        load_splits(Tasks(set="terminal-basic:train", generators=EASY), AgentPart())


def test_a_pack_of_a_module_has_generators() -> None:
    few = {part: Seeds(first=0 if part != "train" else 100, count=2) for part in PARTS}
    few["heldout"] = Seeds(first=100, count=2)
    found = [
        [
            task.content_hash
            for task in load_splits(Tasks(set=name, generators=("write-word",), **few), AgentPart()).train
        ]
        for name in ("terminal-basic", "clawgym.tasks.packs.terminal_basic:terminal_basic")
    ]
    assert found[0] == found[1]
    assert len(found[0]) == 2
