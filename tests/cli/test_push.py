"""``clawgym push``."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import NoReturn

import pytest
from typer.testing import CliRunner

from clawgym.cli import app
from clawgym.errors import ClawGymError

from ..hub.runs import train_run

pytest.importorskip("huggingface_hub")


def test_dry_run_shows_files_and_card_without_network(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> NoReturn:
        raise AssertionError("a dry run went to the network")

    run = train_run(tmp_path / "run", model_folder)
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    monkeypatch.setattr(socket.socket, "connect", never)
    done = CliRunner().invoke(app, ["push", "checkpoint", str(run), "--dry-run", "--checkpoint", "last"])
    assert done.exit_code == 0, done.output
    sizes = {
        words[1]: int(words[0].replace(",", "")) for words in map(str.split, done.output.split("\n\n")[0].splitlines())
    }
    weights = run / "checkpoints/000004/model/model.safetensors"
    assert sizes["model.safetensors"] == weights.stat().st_size
    assert "optimizer.pt" not in sizes
    assert "# run" in done.output
    assert "model-index" in done.output
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_run_without_checkpoints_is_refused(model_folder: Path, tmp_path: Path) -> None:
    run = train_run(tmp_path / "run", model_folder)
    text = (run / "receipt.json").read_text()
    (run / "receipt.json").write_text(text.replace('"train"', '"eval"'))
    done = CliRunner().invoke(app, ["push", "checkpoint", str(run), "--dry-run"])
    assert isinstance(done.exception, ClawGymError)
    assert "give the folder of a training run" in str(done.exception)
