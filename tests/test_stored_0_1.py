"""Data stored by version 0.1 is read as before, with the same figures. ``data/v0.1/README.md`` says what it is."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from clawgym.cli import app
from clawgym.pool import EpisodeEnd, Pool, sequences_of
from clawgym.sandbox import Backend

STORED = Path(__file__).parent / "data" / "v0.1"
RUNS = ("oracle", "noop", "sloppy", "tools", "cheat")
Copy = Callable[[str], Path]


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    """Copies stored data to where it may be changed."""

    def make(name: str) -> Path:
        target = tmp_path / Path(name).name
        if (STORED / name).is_dir():
            return Path(shutil.copytree(STORED / name, target))
        return Path(shutil.copyfile(STORED / name, target))

    return make


def clawgym(*words: str | Path, code: int = 0) -> str:
    """What a command prints."""
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == code, done.output
    return done.stdout


def board(*runs: Path) -> list[dict[str, Any]]:
    """The leaderboards of some run folders."""
    return json.loads(clawgym("leaderboard", "show", *runs, "--json"))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


# -- run folders


@pytest.mark.parametrize(
    ("name", "arguments", "episodes"),
    [
        ("oracle", (), 20),
        ("noop", (), 20),
        ("sloppy", (), 20),
        ("tools", (), 2),
        ("cheat", ("--taskset", STORED / "tasks"), 3),
    ],
)
def test_results_are_reproduced(
    backend: Backend, copy: Copy, name: str, arguments: tuple[str | Path, ...], episodes: int
) -> None:
    """Grading the stored workspaces again gives the same results; the run manifest still fits the tasks of today."""
    run = copy(f"evaluations/{name}")
    (run / "verification.json").unlink(missing_ok=True)
    record = json.loads(clawgym("runs", "verify", run, *arguments, "--json"))
    assert record["agrees"]
    assert record["complete"]
    assert record["counts"] == {"same": episodes}
    assert record["discrepancies"] == {}
    entry = board(run)[0]["entries"][0]
    assert entry["verified"] == f"{episodes} of {episodes}"


def test_runs_are_ranked() -> None:
    """By paired differences: version 0.1 compared intervals, and had ``noop`` beside ``sloppy``."""
    boards = board(*(STORED / "evaluations" / name for name in RUNS))
    shown = {
        entry["run"]: (
            entry["rank"],
            *(round(entry[score]["value"], 6) for score in ("strict", "corrected", "official")),
            round(entry["strict"]["low"], 6),
            round(entry["strict"]["high"], 6),
        )
        for each in boards
        for entry in each["entries"]
    }
    assert shown == {
        "oracle": (1, 1.0, 1.0, 1.0, 0.675592, 1.0),
        "sloppy": (2, 0.375, 0.587269, 0.578935, 0.184812, 0.61359),
        "noop": (3, 0.0, 0.0, 0.0, 0.0, 0.324408),
        "tools": (1, 1.0, 1.0, 1.0, 0.34238, 1.0),
        "cheat": (1, 0.333333, 0.333333, 1.0, 0.061492, 0.792340),
    }
    assert [each["task_set"] for each in boards] == [
        "terminal-basic:heldout 3",
        "toolcall-basic:heldout 4",
        "tasks",
    ]


def test_ranking_agrees_with_the_stored_one() -> None:
    """Every figure that version 0.1 showed is there, with the same value; the rank has another rule now."""

    def missing(old: Any, new: Any, where: str) -> list[str]:
        if isinstance(old, dict) and isinstance(new, dict):
            return [line for key in old for line in missing(old[key], new.get(key), f"{where}.{key}")]
        if isinstance(old, float) and isinstance(new, float):
            return [] if math.isclose(old, new, abs_tol=1e-9) else [f"{where}: {old} then, {new} now"]
        return [] if old == new else [f"{where}: {old!r} then, {new!r} now"]

    def by_run(boards: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            f"{each['task_set_hash']} {entry['run']}": {**each, "entries": None} | entry | {"rank": None}
            for each in boards
            for entry in each["entries"]
        }

    stored = json.loads((STORED / "board.json").read_text())
    now = board(*(STORED / "evaluations" / name for name in RUNS))
    assert missing(by_run(stored), by_run(now), "board") == []
    markdown = clawgym("leaderboard", "show", *(STORED / "evaluations" / name for name in RUNS), "--markdown")
    for name in ("oracle", "noop", "sloppy", "script"):
        assert f"| {name} |" in markdown


def test_infrastructure_errors_and_tampering_are_counted() -> None:
    entries = {
        entry["run"]: entry
        for each in board(*(STORED / "evaluations" / name for name in RUNS))
        for entry in each["entries"]
    }
    assert round(entries["oracle"]["infra_rate"], 6) == 0.047619
    assert entries["oracle"]["infra_share"] == 0.0
    assert entries["cheat"]["tampered"] == 2
    assert entries["cheat"]["flags"] == ["tampered episodes: 2"]
    assert [entries[name]["flags"] for name in RUNS if name != "cheat"] == [[], [], [], []]
    assert entries["sloppy"]["verified"] == "20 of 20"
    assert entries["sloppy"]["pass_at"] == {"1": 0.4, "2": 0.7}


@pytest.mark.parametrize(
    ("first", "second", "strict", "corrected"),
    [
        ("noop", "sloppy", (0.4, 0.2, 0.6, 0.015625, 7, 0), (0.587269, 0.402848, 0.752778, 0.001953, 10, 0)),
        ("sloppy", "oracle", (0.6, 0.35, 0.8, 0.003906, 9, 0), (0.412731, 0.246945, 0.593935, 0.003906, 9, 0)),
    ],
)
def test_runs_are_compared(first: str, second: str, strict: tuple[float, ...], corrected: tuple[float, ...]) -> None:
    found = json.loads(
        clawgym("runs", "compare", *(STORED / "evaluations" / name for name in (first, second)), "--json")
    )
    assert found["tasks"] == 10
    for score, figures in (("strict", strict), ("corrected", corrected)):
        about = found["scores"][score]
        names = ("value", "low", "high", "p", "ahead", "behind")
        assert tuple(round(about[name], 6) for name in names) == figures
        assert about["verdict"] == "better"


def test_edited_result_is_found(backend: Backend, copy: Copy) -> None:
    """The stored checksums still detect an edit."""
    run = copy("evaluations/tools")
    path = run / "results.jsonl"
    rows = lines(path)
    rows[0]["steps"] += 1
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert board(run)[0]["entries"][0]["flags"] == ["edited result lines: 1"]
    record = json.loads(clawgym("runs", "verify", run, "--json", code=1))
    assert not record["agrees"]
    assert len(record["discrepancies"]) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="a run that was begun as root: to resume it, need root")
def test_interrupted_run_is_resumed(backend: Backend, copy: Copy) -> None:
    """The run manifest of 0.1 has the identity of the same command now: the missing episode is added to the folder."""
    run = copy("evaluations/noop")
    kept = (run / "results.jsonl").read_text().splitlines(keepends=True)
    (run / "results.jsonl").write_text("".join(kept[:-1]))
    ids = json.loads((run / "receipt.json").read_text())["tasks"]
    tasks = [word for task in ids for word in ("--task", task)]
    clawgym(
        *("eval", "terminal-basic:heldout", "--agent", "noop", *tasks, "-k", "2"),
        *("--seed", "7", "--sandbox", "namespace", "--out", run),
    )
    added = lines(run / "results.jsonl")
    assert len(added) == len(kept)
    old, new = json.loads(kept[-1]), added[-1]
    for name in ("key", "task_hash", "seed", "outcome"):
        assert new[name] == old[name]
    for name in ("checks", "official", "strict", "corrected", "verifier_hash"):
        assert new["result"][name] == old["result"][name]


# -- the pool


def tokens(path: Path) -> list[tuple[str, str | None, int, int, float]]:
    """Task, outcome, turns, sum of the sampled ids, and sum of their log-probabilities, of each episode."""
    with Pool(path) as pool:
        found = [(episode, pool.turns(episode.id)) for episode in pool.episodes()]
    return [
        (
            episode.task_id,
            episode.outcome,
            len(turns),
            sum(sum(turn.sampled_ids) for turn in turns),
            round(sum(sum(turn.logprobs) for turn in turns), 6),
        )
        for episode, turns in found
    ]


EPISODES = [
    ("t1", "solved", 2, 24, -1.05),
    ("t2", "solved", 4, 2304552, -81.546172),
    ("t2", "solved", 4, 948179, -45.110064),
    ("", "failed", 2, 0, 0),
    ("", "infra", 0, 0, 0),
]


def test_pool_is_read(copy: Copy) -> None:
    path = copy("pool/pool.db")
    assert tokens(path) == [*EPISODES, ("", None, 1, 683197, -33.257812)]
    with Pool(path) as pool:
        ids = [episode.id for episode in pool.episodes()]
        assert [[len(sample.ids) for sample in sequences_of(pool.turns(id))] for id in ids] == [
            *([8], [87, 88], [67, 91], [], [], [59])
        ]
        assert pool.turn_rewards(ids[1]) == {"judge": {0: 1.0, 2: -1.0}}
        assert pool.episode(ids[2]).trainable is False
        assert pool.turns(ids[0])[0].reply["reasoning_content"] == "hm"
    stats = json.loads(clawgym("pool", "stats", path, "--json"))
    train = stats["channels"]["train"]
    assert train["episodes"] == {"failed": 1, "solved": 3, "open": 1}
    assert (train["turns"], train["flawed_turns"], train["samples"], train["trained_ids"]) == (13, 2, 5, 122)


def test_pool_is_written_further(copy: Copy) -> None:
    """Batches are drawn from a stored pool, and episodes added."""
    with Pool(copy("pool/pool.db")) as pool:
        batch = pool.fetch("another", 0, groups=1, min_episodes=1)
        assert batch is not None
        assert [len(group.episodes) for group in batch.groups] == [1]
        id = pool.open_episode(task_id="new")
        pool.close_episode(id, EpisodeEnd(outcome="failed", reward=0.0))
        assert pool.episode(id).outcome == "failed"


@pytest.mark.parametrize(("name", "exact"), [("parquet", True), ("atif.jsonl", True), ("messages.jsonl", False)])
def test_exported_episodes_are_imported(tmp_path: Path, name: str, exact: bool) -> None:
    pool = tmp_path / "pool.db"
    clawgym("pool", "import", pool, STORED / "pool" / f"episodes.{name}")
    if exact:
        assert tokens(pool) == EPISODES
    out = tmp_path / "messages.jsonl"
    clawgym("pool", "export", pool, out, "--format", "messages")
    assert [line["messages"] for line in lines(out)] == [
        line["messages"] for line in lines(STORED / "pool" / "episodes.messages.jsonl")
    ]


def test_pool_is_exported_as_before(copy: Copy, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    path = copy("pool/pool.db")
    clawgym("pool", "export", path, tmp_path / "new.parquet")
    old, new = (parquet.read_table(file) for file in (STORED / "pool" / "episodes.parquet", tmp_path / "new.parquet"))
    assert old.schema.names == [name for name in new.schema.names if name in old.schema.names]
    assert old.to_pylist() == new.select(old.schema.names).to_pylist()
    clawgym("pool", "export", path, tmp_path / "new.jsonl", "--format", "messages")
    assert lines(tmp_path / "new.jsonl") == lines(STORED / "pool" / "episodes.messages.jsonl")


# -- training


def test_pool_of_a_training_run_is_read(copy: Copy) -> None:
    stats = json.loads(clawgym("pool", "stats", copy("training/pool.db"), "--json"))
    assert {name: about["episodes"] for name, about in stats["channels"].items()} == {
        "canary": {"failed": 6, "solved": 2},
        "demonstrations": {"solved": 4},
        "heldout": {"failed": 4},
        "train": {"failed": 8},
        "validation": {"failed": 6},
    }
    train = stats["channels"]["train"]
    assert (train["fates"], train["groups"], train["trained_ids"]) == ({"delivered": 8}, {"consumed": 4}, 96)
    assert stats["batches"] == {"acked": 2}


def test_checkpoint_is_a_model_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    folder = STORED / "training" / "checkpoints" / "000002" / "model"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("Write the word basil.", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        logits = model(ids).logits[0, -1]
    assert ids.tolist() == [[687, 537, 690, 1082, 22]]
    assert math.isclose(float(logits.abs().sum()), 190.5501, abs_tol=1e-2)


def test_training_is_refused_with_advice(copy: Copy) -> None:
    """The names of settings have changed. The run stays as it is."""
    run = copy("training")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    argv = ["train", "rl", "-c", str(run / "config.yaml"), "--set", "budget.steps=3", "--out", str(run)]
    done = CliRunner().invoke(app, argv)
    assert done.exit_code != 0
    assert "model.path set to its checkpoint" in str(done.exception)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_new_run_starts_from_the_checkpoint(backend: Backend, copy: Copy, tmp_path: Path) -> None:
    """Its weights are the first policy of the new run."""
    safetensors = pytest.importorskip("safetensors.torch")
    model = copy("training") / "checkpoints" / "000002" / "model"
    settings = {
        "model.path": str(model),
        "tasks.set": "terminal-basic",
        "tasks.generators": "[write-word]",
        "tasks.train.count": "2",
        "tasks.validation.count": "1",
        "tasks.heldout.count": "1",
        "agent.protocol": "text",
        "agent.max_steps": "2",
        "agent.max_tokens": "12",
        "rollout.groups": "1",
        "rollout.group_size": "2",
        "reward.score": "official",
        "budget.steps": "1",
        "optimizer.lr": "1e-30",  # too small to change a weight
    }
    words = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    argv = [sys.executable, "-c", "from clawgym.cli import main; main()", "train", "rl", *words, "--out", "new"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr
    old = safetensors.load_file(model / "model.safetensors")
    new = safetensors.load_file(tmp_path / "new" / "checkpoints" / "000001" / "model" / "model.safetensors")
    assert {name: (new[name] == tensor).all() for name, tensor in old.items()} == dict.fromkeys(old, True)
