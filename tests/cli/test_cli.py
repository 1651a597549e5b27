"""The commands demo and doctor, and what all commands have in common."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from clawgym import __version__
from clawgym.cli import app
from clawgym.cli.doctor import examine

# The demo with as little training as possible: the whole demo takes minutes.
BRIEFLY = """
import clawgym.trainers.config as config
whole = config.load_config
brief = [f"tasks.{part}.count={n}" for part, n in dict(demonstrations=4, train=4, validation=1, heldout=1).items()]
brief += ["model.scratch.hidden=32", "sft.steps=2", "sft.evaluate_every=1", "budget.steps=2", "evaluation.every=1"]
brief += ["rollout.groups=1", "rollout.group_size=2"]
config.load_config = lambda source, overrides: whole(source, [*overrides, *brief])
"""


def clawgym(*words: str, cwd: Path, before: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-c", f"{before}\nfrom clawgym.cli import main; main()", *words]
    return subprocess.run(argv, cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, timeout=170)


def test_version_and_help() -> None:
    assert CliRunner().invoke(app, ["--version"]).output.strip() == __version__
    text = CliRunner().invoke(app, ["--help"]).output
    for command in ("eval", "demo", "doctor", "tasks", "leaderboard"):
        assert command in text


def test_errors_are_one_line_with_advice(tmp_path: Path) -> None:
    done = clawgym("eval", "terminal-basik", "--agent", "noop", cwd=tmp_path)
    assert done.returncode == 2
    assert "terminal-basic" in done.stderr
    assert "Traceback" not in done.stderr
    done = clawgym("eval", "terminal-basic", "--agent", "orakle", cwd=tmp_path)
    assert done.returncode == 2
    assert "'oracle'" in done.stderr
    for words in ([], ["terminal-basic", "--bench", "gui-basic"]):
        done = clawgym("eval", *words, "--agent", "noop", cwd=tmp_path)
        assert done.returncode == 2
        assert "clawgym tasks list" in done.stderr
    assert not list(tmp_path.iterdir())


def test_every_failed_check_of_doctor_has_a_fix() -> None:
    findings = examine()
    assert any(f.what == "sandbox: namespace" for f in findings)
    for finding in findings:
        assert finding.detail
        assert bool(finding.mend) == (not finding.ok)


def test_doctor_reports_missing_data_and_docker(tmp_path: Path) -> None:
    done = clawgym("doctor", "--json", cwd=tmp_path, CLAWGYM_DATA=str(tmp_path / "gone"), DOCKER_HOST="unix:///no.sock")
    findings = {f["what"]: f for f in json.loads(done.stdout)}
    assert not findings["public task sets"]["ok"]
    assert not findings["sandbox: docker"]["ok"]
    assert "DOCKER_HOST" in findings["sandbox: docker"]["mend"]


def test_doctor_exits_with_1_if_no_sandbox_works(tmp_path: Path) -> None:
    before = "import clawgym.sandbox as s; s.local_names = lambda: ()"
    done = clawgym("doctor", "--json", cwd=tmp_path, before=before)
    assert done.returncode == 1
    (finding,) = [f for f in json.loads(done.stdout) if f["what"] == "working sandbox"]
    assert not finding["ok"]
    assert finding["mend"]


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="chroot sandboxes need root")
def test_doctor_lists_what_chroot_does_not_isolate(tmp_path: Path) -> None:
    done = clawgym("doctor", cwd=tmp_path, DOCKER_HOST="unix:///no.sock")
    lines = done.stdout.splitlines()
    (first,) = (number for number, line in enumerate(lines) if "sandbox: chroot" in line)
    assert "tier chroot; not isolated: pid" in lines[first]
    said = []
    for line in lines[first + 1 :]:
        if not line.strip().startswith("- "):
            break
        said.append(line.strip()[2:].partition(":")[0])
    assert {"processes", "files", "network", "users", "disk", "host"} <= set(said)
    assert "isolates less" not in done.stderr, "the report has it already"


@pytest.mark.skipif(sys.platform != "linux", reason="the demo needs a sandbox")
def test_demo_ranks_three_agents_and_trains_a_model(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    done = clawgym("demo", cwd=tmp_path, before=BRIEFLY)
    assert done.returncode == 0, done.stderr
    ranks = [line.split("│")[1:4] for line in done.stdout.splitlines() if line.count("│") > 4]
    named = {name.strip(): (rank.strip(), score.strip()) for rank, name, score in ranks if rank.strip()}
    assert named["oracle"] == ("1", "100.0")
    assert named["noop"] == ("3", "0.0")
    assert 0 < float(named["sloppy"][1]) < 100
    for agent in named:
        report = tmp_path / "runs" / "demo" / agent / "report.html"
        assert str(report.relative_to(tmp_path)) in done.stdout
        assert "<html" in report.read_text()[:200]
    for name, method in (("imitated", "imitation"), ("trained", "reinforcement")):
        assert f"report: runs/demo/{name}/report.html" in done.stdout
        shown = [line.split()[1] for line in done.stdout.splitlines() if line.strip().startswith(f"{method} ")]
        assert shown == ["0", "1", "2"]
    ends = [line for line in done.stdout.splitlines() if line.startswith("held-out tasks, ")]
    assert [line.split()[2] for line in ends] == ["sampled:", "greedy:"]
    again = clawgym("demo", cwd=tmp_path, before=BRIEFLY)
    assert again.stdout == done.stdout, "the same command resumes: nothing is left to do"
