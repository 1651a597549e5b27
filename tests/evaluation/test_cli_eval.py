from __future__ import annotations

from pathlib import Path

import pytest

from clawgym.cli.eval import default_out


def out(
    taskset="terminal-basic", agent="noop", model=None, samples=1, seed=0, limit=None, tasks=None, about=()
) -> Path:
    return default_out(taskset, agent, model, samples, seed, limit, tasks, about)


def test_the_same_options_lead_to_the_same_folder():
    assert out() == out() == Path("runs/terminal-basic_noop_seed0_k1")


@pytest.mark.parametrize(
    "change",
    [
        {"taskset": "other"},
        {"agent": "oracle"},
        {"model": "m"},
        {"samples": 2},
        {"seed": 1},
        {"limit": 3},
        {"tasks": ["a", "b"]},
        {"tasks": ["a", "c"]},
        {"about": ["prompt=slim"]},
    ],
)
def test_other_options_lead_elsewhere(change):
    assert out(**change) != out()


@pytest.mark.parametrize("taskset", ["a/b/c", "../..", "x y:z", "/abs/bench.jsonl", "pack@1:train"])
def test_the_folder_is_directly_below_runs(taskset: str):
    path = out(taskset=taskset, model="org/model: v1")
    assert path.parent == Path("runs")
    assert path.name not in ("", "..", ".")
    assert " " not in path.name
