"""``benchmarks/personal.py`` from command to report, with an untrained model."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from clawgym.errors import TrainingError
from clawgym.pool import Pool
from clawgym.trainers.config import load_config
from clawgym.trainers.local.personal import METHODS, bench, config_of
from clawgym.trainers.local.personal_report import by_method, hint_summary, learning_curves, over_seeds, report

from ...conftest import benchmark

SMALL = [
    "model.scratch={hidden: 32, layers: 1, heads: 2, kv_heads: 1, head_dim: 16, context_window: 512}",
    "sft={steps: 2, batch: 4}",
    "tasks.heldout.count=6",
    "rollout.groups=3",
    "agent={max_steps: 2, max_tokens: 12}",
    "evaluation.samples=1",
    "budget.steps=2",
]


def command(out: Path, *more: str) -> None:
    settings = [word for setting in SMALL for word in ("--set", setting)]
    assert benchmark("personal").main(["--seeds", "1", "--out", str(out), *settings, *more]) == 0


def embedded(out: Path) -> dict[str, Any]:
    """The data of ``report.html``."""
    page = (out / "report.html").read_text("utf-8")
    return json.loads(page.split('id="clawgym-data">', 1)[1].split("</script>", 1)[0])


def test_command_runs_and_resumes(tmp_path: Path) -> None:
    out = tmp_path / "run"
    command(out, "--method", "combined")
    (first,) = json.loads((out / "results.json").read_text())["cells"]
    assert (first["method"], first["seed"], first["sessions"]) == ("combined", 0, 6)
    assert len(first["first_replies"]) == 6
    assert first["before"]["requests"] == first["after"]["requests"] == 6
    with Pool(out / "cells/combined-0/pool.db") as pool:
        episodes = list(pool.episodes(channel="train"))
        votes = [pool.turn_rewards(e.id)["judge"] for e in episodes]
        heard = [said for e in episodes for said in pool.about_turn_rewards(e.id)["judge"].values()]
        turns = [turn for e in episodes for turn in pool.turns(e.id)]
    # An untrained model gives no content, so the person complains about every reply.
    assert [len(v) for v in votes] == [e.n_turns for e in episodes]
    assert {value for v in votes for value in v.values()} == {-1.0}
    assert all(said["hints"] == ["Give every figure I ask for."] for said in heard)
    assert all(turn.flaw is None and len(turn.sampled_ids) == len(turn.logprobs) > 0 for turn in turns)
    assert first["figures"]["opd/turns_taught"] == sum(e.n_turns for e in episodes[3:])

    command(out, "--method", "combined", "--method", "random")
    again = json.loads((out / "results.json").read_text())["cells"]
    assert again[0] == first
    assert again[1]["method"] == "random"
    assert not again[1]["figures"].get("opd/turns_taught")
    data = embedded(out)
    assert data["home"] in (f"/{address}" for address in data["answers"])
    (chart,) = data["answers"][data["home"][1:]]["charts"]
    assert [(one["name"], one["x"]) for one in chart["lines"]] == [("combined", [3, 6])], "random is a control"
    assert "OPD cannot be tested" in (out / "report.md").read_text()


def test_rates_start_from_one_policy(tmp_path: Path) -> None:
    out = tmp_path / "run"
    for rates in (["1e-3"], ["1e-3", "1e-4"]):  # a further rate keeps the cells of the first
        command(out, "--method", "opd", *(word for rate in rates for word in ("--lr", rate)))
    first = (out / "lr-0.001/results.jsonl").read_text().splitlines()
    assert len(first) == 2  # the check of hints, and one cell
    sources = [json.loads((out / name / "receipt.json").read_text())["config"] for name in ("lr-0.001", "lr-0.0001")]
    assert [one["optimizer"]["lr"] for one in sources] == [1e-3, 1e-4]
    assert sources[0]["model"] == sources[1]["model"]
    assert not list(out.glob("lr-*/sft"))
    data = embedded(out)
    answer = data["answers"][data["home"][1:]]
    assert [one["name"] for one in answer["charts"][0]["lines"]] == ["lr-0.001", "lr-0.0001"]
    assert [one["title"] for one in answer["tables"]] == ["lr-0.001", "lr-0.0001"]


def test_curves_are_means_over_seeds() -> None:
    short, long = ({"first_replies": values} for values in ([0.0, 1.0], [1.0, 1.0, 0.5, 0.5]))
    (line,) = learning_curves({"opd": [short, long]}, 2)
    assert (line["name"], line["x"], line["y"]) == ("opd", [2, 4], [0.75, 0.5])
    assert (line["low"], line["high"]) == ([0.0, 0.5], [1.0, 0.5]), "the interval of two seeds; one has none"


@pytest.mark.asyncio
async def test_interrupted_benchmark_resumes(tmp_path: Path) -> None:
    config = load_config("personal-cpu", SMALL)
    done: list[tuple[str, int]] = []

    async def run(until: int) -> dict[str, Any]:
        stop, said = asyncio.Event(), []

        def on_progress(what: str, at: int, total: int) -> None:
            done.append((what.replace(",", " ").split()[0], at))
            if len(done) == until:
                stop.set()

        results = await bench(
            config, tmp_path / "run", methods=["binary"], seeds=1, on_progress=on_progress, say=said.append, stop=stop
        )
        assert len(said) == 1
        return results

    assert (await run(until=1))["hints"] is None
    assert (await run(until=3))["cells"] == []
    assert len((await run(until=0))["cells"]) == 1
    # Imitation is resumed; an unfinished cell is repeated.
    assert done == [("imitation", 1), ("imitation", 2), ("binary", 1), ("binary", 1), ("binary", 2)]


def test_unknown_method_raises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command(tmp_path / "run", "--method", "sft")
    assert "invalid choice: 'sft'" in capsys.readouterr().err


def test_missing_model_leaves_no_run(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"model\.path .*/nowhere: no such folder"):
        command(tmp_path / "run", "--set", f"model.path={tmp_path / 'nowhere'}")
    assert not list(tmp_path.iterdir())


def test_methods_differ_only_in_training_signal() -> None:
    plain = load_config("personal-cpu")
    made = {method: config_of(plain, method, 3) for method in METHODS}
    weights = {m: (c.distillation.hints, c.distillation.w_rl, c.distillation.w_opd) for m, c in made.items()}
    assert weights == {"binary": (0, 1, 1), "opd": (1, 0, 1), "combined": (1, 1, 1), "random": (0, 1, 1)}
    same = [c.model_dump(exclude={"distillation"}) for c in made.values()]
    assert all(one == same[0] for one in same)
    assert (same[0]["seed"], same[0]["algorithm"]["advantage"]) == (3, "binary")


def cell(method: str, seed: int, change: float) -> dict[str, Any]:
    at = {"score": {"value": 0.5, "low": 0.4, "high": 0.6}, "right": {"value": 0.1, "low": 0, "high": 0.2}}
    at |= {"content": {"value": 1.0, "low": 0.9, "high": 1.0}, "rules": {"short": 0.5}}  # type: ignore[dict-item]
    return {
        "method": method, "seed": seed, "rules": ["short"], "before": at, "after": at, "stable_after": None,
        "change": {"value": change, "low": change - 0.1, "high": change + 0.1}, "first_replies": [0.5] * 7,
        "ended": None,
    }  # fmt: skip


def test_report_compares_same_person() -> None:
    cells = [cell("random", 0, 0.0), cell("random", 1, 0.2), cell("opd", 0, 0.3), cell("opd", 1, 0.5)]
    gap = {"nats": 1.0, "low": 0.5, "high": 1.5, "requests": 9}
    hints = {"right": gap, "wrong": {"nats": -1.0, "low": -1.5, "high": -0.5, "requests": 9}}
    found = by_method({"cells": cells})
    assert found["opd"]["against_random"] == pytest.approx((0.3, 0.3, 0.3))
    assert found["random"]["against_random"] is None
    assert "so it can be its own teacher" in hint_summary(hints)
    assert "OPD cannot be tested" in hint_summary({**hints, "right": {**gap, "low": -0.1}})
    text = report({"hints": hints, "cells": cells})
    assert "| opd | 2 | 0.50 |" in text
    assert "never" in text


def test_interval_over_seeds_uses_student_t() -> None:
    value, low, high = over_seeds([0.1, 0.2, 0.3], least=-1)
    assert (value, high - value) == (pytest.approx(0.2), pytest.approx(4.3027 * 0.1 / 3**0.5, abs=1e-4))
    assert value - low == pytest.approx(high - value)
    assert over_seeds([0.1, 0.9])[1:] == (0, 1)
    assert over_seeds([0.4]) == (0.4, 0.4, 0.4)
