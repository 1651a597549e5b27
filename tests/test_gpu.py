"""``make gpu``, as far as a machine without a GPU can tell."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from .conftest import benchmark

PATHS = ["engine", "turns", "decode", "learner_full", "learner_lora", "publish", "vllm"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_machine_without_gpu_is_told(capsys, tmp_path: Path) -> None:
    assert benchmark("gpu").main(["--out", str(tmp_path / "gpu.json")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("No GPU was found")
    assert "--device cpu" in said
    assert not (tmp_path / "gpu.json").exists()


def test_every_path_runs_on_a_cpu(tmp_path: Path) -> None:
    program = benchmark("gpu")
    out = tmp_path / "gpu.json"
    argv = ["--device", "cpu", "--tokens", "48", "--sequences", "4", "--out", str(out)]
    assert program.main([*PATHS, *argv]) == 0
    assert [*PATHS, "verl"] == program.names()
    written = json.loads(out.read_text())
    assert written["machine"]["device"].startswith("CPU")
    found = written["paths"]
    assert list(found) == PATHS
    assert found["engine"]["mean_difference"] < 1e-3
    assert found["turns"]["largest_difference"] < 1e-4
    assert found["decode"]["float32 tokens_a_second"] > 0
    for name in ("learner_full", "learner_lora"):
        assert found[name]["loss"][1] < found[name]["loss"][0]
    assert max(found["publish"][name]["mean_difference"] for name in ("full", "lora")) < 1e-3
    assert "not run" in found["vllm"] or shutil.which("vllm")


def test_failed_path_is_named(tmp_path: Path, capsys) -> None:
    out = tmp_path / "gpu.json"
    argv = ["engine", "--device", "cpu", "--model", str(tmp_path / "nothing"), "--out", str(out)]
    assert benchmark("gpu").main(argv) == 1
    assert "failed: engine" in capsys.readouterr().out
    assert "no such folder" in json.loads(out.read_text())["paths"]["engine"]["error"]
