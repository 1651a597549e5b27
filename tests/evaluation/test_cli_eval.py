from __future__ import annotations

from pathlib import Path

import pytest

from clawgym.cli.eval import default_out


def out(bench="terminal-basic", agent="noop", model=None, samples=1, seed=0, limit=None, tasks=None) -> Path:
    return default_out(bench, agent, model, samples, seed, limit, tasks)


def test_the_same_options_lead_to_the_same_folder():
    assert out() == out() == Path("runs/terminal-basic_noop_seed0_k1")


@pytest.mark.parametrize(
    "change",
    [
        {"bench": "other"},
        {"agent": "oracle"},
        {"model": "m"},
        {"samples": 2},
        {"seed": 1},
        {"limit": 3},
        {"tasks": "a,b"},
        {"tasks": "a,c"},
    ],
)
def test_other_options_lead_elsewhere(change):
    assert out(**change) != out()


@pytest.mark.parametrize("bench", ["a/b/c", "../..", "x y:z", "/abs/bench.jsonl", "pack@1:train"])
def test_the_folder_is_directly_below_runs(bench: str):
    path = out(bench=bench, model="org/model: v1")
    assert path.parent == Path("runs")
    assert path.name not in ("", "..", ".")
    assert " " not in path.name
