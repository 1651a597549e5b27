"""Checkpoints under kills, full disks and lost files."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from clawgym.engines.tiny import make_tiny_model
from clawgym.errors import RunFolderError, TrainingError
from clawgym.trainers.common import checkpoints
from clawgym.trainers.common.checkpoints import Checkpoints, Progress
from clawgym.trainers.local.main import train
from clawgym.trainers.local.training_state import TrainingState

from ..runs import Said, small


def put(kept: Checkpoints, progress: Progress) -> None:
    def fill(part: Path) -> None:
        (part / "state.json").write_text("{}")

    kept.put(progress, 0, fill)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def begun(run: Path, folder: Path, **parts: Any) -> TrainingState:
    return TrainingState.load(small(model={"path": str(folder)}, **parts), run, folder)


def named(run: Path) -> list[str]:
    return [path.name for path in (Checkpoints(run).best(), Checkpoints(run).last()) if path is not None]


def test_best_checkpoint_survives_kill_between_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, write = Checkpoints(tmp_path), checkpoints.write_atomic
    put(kept, Progress(step=1, best_step=1, best_score=0.1))

    def killed(path: Path, data: bytes) -> None:
        write(path, data)
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoints, "write_atomic", killed)
    with pytest.raises(KeyboardInterrupt):
        put(kept, Progress(step=2, best_step=2, best_score=0.9))
    monkeypatch.undo()
    assert named(tmp_path) == ["000002", "000001"]  # so step 2 is repeated and evaluated again
    put(kept, Progress(step=2, best_step=1, best_score=0.1))
    assert named(tmp_path) == ["000001", "000002"]
    put(kept, Progress(step=3, best_step=1, best_score=0.1))
    assert named(tmp_path) == ["000001", "000003"]


def test_unnamed_best_checkpoint_is_named_on_resume(tmp_path: Path, folder: Path) -> None:
    learning = begun(tmp_path, folder)
    learning.progress.record_score(0.5)
    learning.save()
    (tmp_path / "checkpoints/best").unlink()
    assert begun(tmp_path, folder).progress.best_score == 0.5
    assert named(tmp_path) == ["000000", "000000"]


async def test_missing_or_damaged_checkpoint_raises_and_erases_nothing(tmp_path: Path, folder: Path) -> None:
    config = small(model={"path": str(folder)}, sft={"steps": 2, "batch": 2, "evaluate_every": 2})
    run = tmp_path / "run"
    await train(config, run, "sft", view=Said())
    before = (run / "metrics.jsonl").read_bytes()
    weights = run / "checkpoints/000002/model/model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(TrainingError, match=r"000002/model/model\.safetensors: cannot be read .*: restore this file"):
        await train(config, run, "sft", view=Said())
    (run / "checkpoints/000002").rename(tmp_path / "moved")
    with pytest.raises(TrainingError, match=r"checkpoints/000002: .*/last names this checkpoint, but it is missing"):
        await train(config, run, "sft", view=Said())
    assert (run / "metrics.jsonl").read_bytes() == before
    (tmp_path / "moved").rename(run / "checkpoints/000002")
    weights.write_bytes(whole)
    assert (await train(config, run, "sft", view=Said())).step == 2


FULL = """
import resource, sys
from pathlib import Path
from clawgym.errors import TrainingError
from clawgym.trainers.config import TrainConfig
from clawgym.trainers.local.training_state import TrainingState

config, run, model = TrainConfig.model_validate_json(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
learning = TrainingState.load(config, run, model)
learning.save()
learning.progress.step = 1
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
try:
    learning.save()
except TrainingError as error:
    print(error)
"""


def test_unwritable_checkpoint_raises_and_is_removed(tmp_path: Path, folder: Path) -> None:
    config = small(model={"path": str(folder)}).model_dump_json()
    done = subprocess.run(
        [sys.executable, "-c", FULL, config, str(tmp_path), str(folder)], capture_output=True, text=True
    )
    assert "000001: cannot be written (" in done.stdout, done.stderr[-2000:]
    assert "nothing was overwritten: free disk space" in done.stdout
    assert "resume from checkpoint 000000" in done.stdout
    assert [p.name for p in (tmp_path / "checkpoints").iterdir() if p.is_dir()] == ["000000"]


LINES = """
import resource, sys
from pathlib import Path
from clawgym.errors import TrainingError
from clawgym.trainers.config import TrainConfig
from clawgym.trainers.common.splits import Splits
from clawgym.trainers.common.run import Run

class Quiet:
    def __getattr__(self, name):
        return lambda *said: None

config = TrainConfig.model_validate_json(sys.argv[1])
path = Path(sys.argv[2])
try:
    with Run.open(path, config, "sft", Splits((), (), (), (), {}), Quiet()) as run:
        run.log(1, {"sft/loss": 1.0})
        size = (path / "metrics.jsonl").stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, resource.RLIM_INFINITY))
        run.log(2, {"sft/loss": 0.5})
except TrainingError as error:
    print(error)
"""


def test_full_disk_during_checkpoint_keeps_last_one(tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path)
    put(kept, Progress(step=1, best_step=1))

    def fill(part: Path) -> None:
        (part / "half").write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(
        TrainingError, match=r"cannot be written \(No space left on device\); .* from checkpoint 000001"
    ):
        kept.put(Progress(step=2, best_step=2), 0, fill)
    assert named(tmp_path) == ["000001", "000001"]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir() if path.is_dir()) == ["000001"]


def test_unwritable_metrics_raise_and_leave_whole_lines(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LINES, small().model_dump_json(), str(tmp_path / "run")], capture_output=True, text=True
    )
    assert "metrics.jsonl: cannot be written (" in done.stdout, done.stderr[-2000:]
    assert [json.loads(row)["step"] for row in (tmp_path / "run/metrics.jsonl").read_text().splitlines()] == [1]


async def test_learning_rate_may_change_and_manifest_keeps_first(tmp_path: Path, folder: Path) -> None:
    about: dict[str, Any] = {"model": {"path": str(folder)}, "sft": {"steps": 1, "batch": 2, "evaluate_every": 1}}
    run = tmp_path / "run"
    await train(small(**about), run, "sft", view=Said())
    first = json.loads((run / "receipt.json").read_text())["config"]["optimizer"]["lr"]
    await train(small(**about, optimizer={"lr": first / 2}), run, "sft", view=Said())
    assert json.loads((run / "receipt.json").read_text())["config"]["optimizer"]["lr"] == first
    assert f"lr: {first / 2}" in (run / "config.yaml").read_text()
    with pytest.raises(RunFolderError, match=r"optimizer\.weight_decay"):
        await train(small(**about, optimizer={"lr": first, "weight_decay": 0.1}), run, "sft", view=Said())
