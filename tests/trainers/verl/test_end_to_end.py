"""verl on CPUs, with tasks in real sandboxes: a run is killed after its first step and resumed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file
from typer.testing import CliRunner

from clawgym.cli import app
from clawgym.hub import read_checkpoint
from clawgym.pool import Pool, sequences_of
from clawgym.pool.view import PoolView
from clawgym.trainers.common.answers import trained_advantages
from clawgym.trainers.common.checkpoints import Checkpoints
from clawgym.trainers.local.main import train

from ..runs import Said, small

pytest.importorskip("verl")

pytestmark = pytest.mark.timeout(900)
MODEL = {"scratch": {"hidden": 64, "layers": 1, "heads": 2, "kv_heads": 1, "context_window": 1024}}
TASKS = {
    "generators": ["write-word"],
    "demonstrations": {"count": 16},
    "train": {"first": 100, "count": 6},
    "validation": {"count": 2},
    "heldout": {"first": 100, "count": 2},
}


@pytest.fixture(scope="module")
def teachers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that was trained to write commands, so that its turns and rewards vary."""
    out = tmp_path_factory.mktemp("runs") / "sft"
    sft = {"steps": 100, "batch": 8, "lr": 3e-3, "evaluate_every": 100}
    asyncio.run(train(small(model=MODEL, tasks=TASKS, sft=sft), out, "sft", view=Said()))
    return out / "checkpoints/000100/model"


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def begin(out: Path, config: Path) -> subprocess.Popen[str]:
    argv = [
        sys.executable,
        "-c",
        "from clawgym.cli import main; main()",
        "train",
        "rl",
        "--config",
        str(config),
        "--out",
        str(out),
    ]
    log = out.with_name("log").open("a")
    return subprocess.Popen(argv, stdout=log, stderr=log, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


def test_killed_run_resumes(teachers: Path, tmp_path: Path) -> None:
    out, config = tmp_path / "run", tmp_path / "config.yaml"
    about = small(
        trainer="verl",
        model={"path": str(teachers)},
        tasks=TASKS,
        agent={"protocol": "text", "system_prompt": "Work.", "max_steps": 3, "max_tokens": 24},
        rollout={"groups": 2, "group_size": 12, "concurrency": 8},  # enough for different rewards
        reward={"judge": "rule", "calibrate": False},
        algorithm={"kl": 0.05, "entropy": 0.001, "imitation": 0.1},
        optimizer={"lr": 1e-3, "decay": True},
        sft={"batch": 4},
        evaluation={"every": 1, "canary": 1},
        budget={"steps": 2},
        verl={"engine": "transformers"},
    )
    config.write_text(yaml.safe_dump(about.model_dump(mode="json")))
    running = begin(out, config)
    while len(lines(out / "metrics.jsonl")) < 1:
        assert running.poll() is None, out.with_name("log").read_text()[-3000:]
        time.sleep(0.2)
    os.kill(running.pid, signal.SIGKILL)
    running.wait()
    assert begin(out, config).wait() == 0, out.with_name("log").read_text()[-3000:]

    rows = lines(out / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert row["training/rollout_probs_diff_max"] < 1e-5  # trainer and engine agree
        assert row["rollout/submitted_trajectories"] == 24
        assert row["reward/process_scored_frac"] > 0  # process rewards reached the advantages
        assert row["actor/ratio_mean"] == pytest.approx(1, abs=1e-4)  # only ClawGym's loss reports it
        assert 0 < row["actor/grad_norm"] < 1e3
        assert row["actor/advantage_abs_mean"] > 0
        assert row["sft/loss"] > 0
    assert rows[0]["actor/ref_kl"] == pytest.approx(0, abs=1e-6)
    assert rows[1]["actor/ref_kl"] > 1e-6
    assert [row["actor/lr"] for row in rows] == pytest.approx([1e-3, 5.5e-4])
    with Pool(out / "pool.db") as pool:
        assert [*pool.group_states().values()] == ["consumed"] * 4
        played = pool.episodes(channel="train")
        delivered = [e for e in played if e.fate == "delivered"]
        assert len(delivered) == 48
        assert {e.fate for e in played} <= {"delivered", "infra"}  # unfinished episodes of the killed run were replaced
        versions = []
        for episode in delivered:
            turns = pool.turns(episode.id)
            assert all(turn.flaw is None and len(turn.logprobs) == len(turn.sampled_ids) for turn in turns)
            assert sequences_of(turns)
            versions += [turn.policy_version for turn in turns]
    assert set(versions) == {0, 1}
    view, trained = PoolView(out / "pool.db"), 0
    for episode in delivered:
        seq = view.find(episode.id)
        assert seq is not None
        stored = trained_advantages(out, view.step(seq) or 0, episode.id)
        assert stored.keys() <= set(range(len(view.turns(seq, episode.id))))
        trained += bool(stored)
    view.close()
    assert trained >= 24
    measured = [(row["split"], row["step"], row["greedy"]) for row in lines(out / "evaluations.jsonl")]
    assert [m for m in measured if m[0] == "validation"] == [("validation", n, False) for n in (0, 1, 2)]
    best = Checkpoints(out).best()
    assert best is not None
    ways = [("heldout", step, greedy) for step in sorted({0, int(best.name)}) for greedy in (False, True)]
    assert [m for m in measured if m[0] == "heldout"] == ways
    assert '"evaluations":[{' in (out / "report.html").read_text()

    pushed = CliRunner().invoke(app, ["push", "checkpoint", str(out), "--dry-run"])
    assert pushed.exit_code == 0, pushed.output
    files = {line.split()[-1] for line in pushed.output.partition("\n\n")[0].splitlines()}
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= files
    assert not [name for name in files if name.endswith(".pt")]

    last = read_checkpoint(out, "last")
    assert last.step == 2
    before, after = (load_file(folder / "model.safetensors") for folder in (teachers, last.folder))
    assert before.keys() == after.keys()
    assert all((before[name] != after[name]).any() for name in before if "proj" in name)
