"""The data and the base model of a run, as shown in the report and the model card."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from clawgym.records.run_folder import RunFolder
from clawgym.trainers.common.checkpoints import Progress
from clawgym.trainers.common.data_use import data_uses
from clawgym.trainers.common.report import render
from clawgym.trainers.common.start_model import model_origin
from clawgym.trainers.config import TrainConfig

STORED = Path(__file__).parents[2] / "data/v0.1/training"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return Path(shutil.copytree(STORED, tmp_path / "run"))


def uses(run: Path, **config: Any) -> list[tuple[str, str, str, int | None]]:
    """The data of a run with these settings changed."""
    manifest = json.loads((run / "receipt.json").read_text())
    manifest["config"] |= config
    (run / "receipt.json").write_text(json.dumps(manifest))
    return [(one.use, one.name, one.split, one.tasks) for one in data_uses(RunFolder.read(run).manifest)]


MEASURED = [
    ("choice of the best checkpoint", "terminal-basic", "validation", 2),
    ("evaluation only", "terminal-basic", "held-out", 2),
]
DEMONSTRATED = ("training (imitation)", "terminal-basic", "training", 4)
TRAINED = ("training", "terminal-basic", "training", 6)


def test_rl_trains_on_training_split(run: Path) -> None:
    assert uses(run, algorithm={"imitation": 0.0}) == [TRAINED, *MEASURED]
    assert uses(run, algorithm={"imitation": 0.5}) == [TRAINED, DEMONSTRATED, *MEASURED]


def test_sft_trains_on_demonstrations_or_file(run: Path) -> None:
    assert uses(run, method="sft", sft={"data": None}) == [DEMONSTRATED, *MEASURED]
    found = uses(run, method="sft", sft={"data": "/home/me/solved.jsonl"})
    assert found == [("training (imitation)", "solved.jsonl", "", None), *MEASURED]


def test_manifest_without_splits_has_no_use(run: Path) -> None:
    assert uses(run, parts=None) == [("", "terminal-basic:heldout", "", 2)]


def test_report_names_data_by_use_and_each_loss(run: Path) -> None:
    rows = [{"step": n, "sft/loss": 0.5 / n, "actor/pg_loss": 0.1 * n} for n in (1, 2)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    html = render(run)
    data = json.loads(html.partition('id="clawgym-data">')[2].partition("</script>")[0])
    answer = data["answers"][data["home"].removeprefix("/")]
    used = [(one["use"], one["name"], one["split"], one["tasks"]) for one in answer["data"]]
    assert ("training", "terminal-basic", "training", 6) in used
    assert ("evaluation only", "terminal-basic", "held-out", 2) in used
    shown = {chart["title"]: chart["metrics"] for chart in answer["charts"] if chart["main"]}
    assert shown["Imitation loss: cross-entropy, nats per token"] == ["sft/loss"]
    assert shown["Policy loss, without the terms for KL, entropy and imitation"] == ["actor/pg_loss"]
    assert answer["metrics"]["sft/loss"] == [0.5, 0.25]
    assert str(run) not in html


def test_last_of_equal_scores_is_best() -> None:
    progress = Progress()
    for step, score in ((0, 0.5), (10, 0.25), (20, 0.5), (30, 0.4)):
        progress.step = step
        progress.record_score(score)
    assert (progress.best_step, progress.best_score) == (20, 0.5)


def test_model_name_has_no_local_path(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def origin(path: str | None) -> str | None:
        return model_origin(TrainConfig.model_validate({"model": {"path": path}}))

    snapshot = tmp_path / "models--team--tiny/snapshots/0123abcd"
    for folder in (snapshot, tmp_path / "models/tiny"):
        folder.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert origin(None) is None
    assert origin("team/tiny") == "team/tiny"
    assert origin("models/tiny") == origin(str(tmp_path / "models/tiny")) == "tiny"
    assert origin(str(snapshot)) == "team/tiny"
    assert origin("run") == "run", "a run that does not say what it started from"
    manifest = json.loads((run / "receipt.json").read_text()) | {"engine": {"model": "team/tiny"}}
    (run / "receipt.json").write_text(json.dumps(manifest))
    assert origin("run") == "team/tiny"
