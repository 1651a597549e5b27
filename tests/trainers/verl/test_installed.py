"""``clawgym doctor --verl``."""

from __future__ import annotations

import importlib.metadata
import json
import os
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from typer.testing import CliRunner

from clawgym.trainers.verl import installed

ROOT = Path(__file__).parents[3]


def test_required_versions_match_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [Requirement(text) for text in project["optional-dependencies"]["verl"]]
    extra = {r.name: r.specifier for r in asked}
    assert {"verl", "TransferQueue", "cachetools", "fastapi", "uvicorn"} <= set(extra)
    for name in set(extra) & set(installed.WORKING):
        assert str(extra[name]).split(",")[0] in installed.WORKING[name]


def test_wrong_version_is_reported_with_repair_command(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"verl": "0.9.1", "torch": "2.13.0+cpu", "transformers": "5.23.0"}

    def version(name: str) -> str:
        try:
            return versions[name]
        except KeyError:
            raise importlib.metadata.PackageNotFoundError(name) from None

    monkeypatch.setattr(installed.importlib.metadata, "version", version)
    found = {part.what: part for part in installed.examine()}
    assert found["verl"].ok
    assert found["torch"].ok
    assert not found["transformers"].ok
    assert "5.23.0; >=5.5.3" in found["transformers"].detail
    assert "not installed" in found["tensordict"].detail
    assert "pip install" in found["tensordict"].mend
    assert "import of verl" not in found  # skipped if a package is missing


def test_gpus_require_other_packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho GPU 0\necho GPU 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = {part.what: part for part in installed.examine()}
    assert (found["GPUs"].ok, found["GPUs"].detail) == (True, "2: verl.ranks=2")
    assert not found["vllm"].ok
    assert "constraints-gpu.txt" in found["vllm"].mend


def test_failed_import_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "_PROBE", "import no_such_thing")
    part = installed._imports(cpu=False)
    assert not part.ok
    assert "no_such_thing" in part.detail


def test_doctor_command(monkeypatch: pytest.MonkeyPatch) -> None:
    from clawgym.cli import app

    def examined() -> list[Any]:
        return [installed.Part("ray", False, "gone", "pip install ray")]

    monkeypatch.setattr(installed, "examine", examined)
    said = CliRunner().invoke(app, ["doctor", "--verl", "--json"])
    assert said.exit_code == 1
    (row,) = json.loads(said.stdout)
    assert (row["what"], row["mend"]) == ("verl: ray", "pip install ray")
