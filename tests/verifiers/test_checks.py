"""The check helpers: nothing that an agent can leave makes a checker crash, hang or leave something running."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from clawgym.verifiers import checks as cg


@pytest.fixture(autouse=True)
def spare_what_was_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checker owns its process; this one has other children as well (a Docker engine of other tests)."""
    below, before = cg._below, cg._below(os.getpid())
    monkeypatch.setattr(cg, "_below", lambda root: {pid for pid in below(root) if pid not in before})


def test_scores_are_clipped_and_exceptions_score_zero(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checks = cg.Checks(tmp_path)
    for name, value in [("yes", True), ("half", 0.5), ("much", 7), ("less", -1), ("none", None), ("nan", float("nan"))]:
        checks(name)(lambda: value)  # noqa: B023
    checks("raises")(lambda: 1 / 0)
    checks("deep")(lambda: json.loads("[" * 100_000))
    checks("later")(lambda: checks.passed("yes") and not checks.passed("yes", "half"))
    with pytest.raises(ValueError, match="rename one"):
        checks("yes")
    checks.finish()
    captured = capsys.readouterr()
    scores = {"yes": 1.0, "half": 0.5, "much": 1.0, "less": 0.0, "none": 0.0, "nan": 0.0}
    assert json.loads(captured.out) == {**scores, "raises": 0.0, "deep": 0.0, "later": 1.0}
    assert "raises: ZeroDivisionError" in captured.err


def test_readers(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("\ufeffé \r\nb\r\n\r\n".encode())
    assert cg.read_text(tmp_path / "a.txt") == "é \nb\n\n"
    assert cg.read_lines(tmp_path / "a.txt") == ["é", "b"]
    (tmp_path / "a.csv").write_text('x,y\n\n"1,\n2","say ""hi"""\n')
    assert cg.read_csv(tmp_path / "a.csv") == [["x", "y"], ["1,\n2", 'say "hi"']]
    (tmp_path / "a.json").write_text('{"a": 1}')
    assert cg.read_json(tmp_path / "a.json") == {"a": 1}


def test_readers_raise_for_special_and_large_files(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/etc/hostname")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "huge").write_bytes(bytes(cg.SIZE_CAP + 1))
    for name in ("link", "folder", "fifo", "huge", "missing"):
        with pytest.raises(cg.Failed, match=name):
            cg.read_bytes(tmp_path / name)


def test_comparisons() -> None:
    assert cg.close("1.0000001", 1)
    assert not cg.close(True, 1)
    assert not cg.close(float("nan"), float("nan"))
    assert cg.share(["a", "b", "b"], ["b", "c"]) == pytest.approx(1 / 4)
    assert cg.share([], []) == 0.0
    assert cg.ordered(["x", "a", "y", "b"], ["a", "b"])
    assert not cg.ordered(["a", "b", "a"], ["a", "b"])
    assert not cg.ordered([], [])


def test_scratch_copies_plain_files_only(tmp_path: Path) -> None:
    for path in ("a/b.txt", ".git/config", "reward/check.py", "a/reward/x.txt"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(path)
    (tmp_path / "link").symlink_to("/etc/hostname")
    os.mkfifo(tmp_path / "fifo")
    with cg.scratch(tmp_path) as box:
        assert sorted(str(p.relative_to(box)) for p in box.rglob("*") if p.is_file()) == ["a/b.txt", "a/reward/x.txt"]
        (box / "a/b.txt").write_text("changed")
    assert not box.exists()
    assert (tmp_path / "a/b.txt").read_text() == "a/b.txt"
    with pytest.raises(cg.Failed, match="too much"), cg.scratch(tmp_path, cap=10):
        pass


def checker(tmp_path: Path, body: str) -> tuple[str, float]:
    """Run ``body`` as a checker would run, in a process of its own."""
    (tmp_path / "clawgym_checks.py").write_bytes(Path(cg.__file__).read_bytes())
    (tmp_path / "check.py").write_text(f"import clawgym_checks as cg, os, time\nbox = {str(tmp_path)!r}\n{body}")
    start = time.monotonic()
    run = "import sys, runpy; sys.path.insert(0, sys.argv[1]); runpy.run_path(sys.argv[1] + '/check.py')"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", run, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), time.monotonic() - start


def test_run_program(tmp_path: Path) -> None:
    body = """
ran = cg.run_program(["bash", "-c", "cat; echo no >&2; kill -9 $$"], cwd=box, stdin="é", env={"A": "b"})
print(ran)
print(cg.run_program(["env"], cwd="/").out.count("LC_ALL=C.UTF-8"))
print(len(cg.run_program(["head", "-c", "3000000", "/dev/zero"], cwd=box).out))
try:
    cg.run_program(["./missing"], cwd=box)
except cg.Failed as error:
    print(error)
"""
    out, _ = checker(tmp_path, body)
    assert out.splitlines() == [
        "Ran(code=-9, out='é', err='no\\n')",
        "1",
        str(cg.SIZE_CAP),
        "./missing: No such file or directory",
    ]


def test_time_is_limited_and_daemons_are_killed(tmp_path: Path) -> None:
    body = """
ran = cg.run_program(["bash", "-c", "setsid sleep 987 & echo $!; exec sleep 987"], cwd=box, timeout=0.4)
print(ran.code, os.path.exists("/proc/" + ran.out.strip()))
left = cg.run_program(["bash", "-c", "setsid sleep 987 > /dev/null & echo $!"], cwd=box, leave_running=True)
print(left.code, os.path.exists("/proc/" + left.out.strip()), cg.kill_strays() > 0)
print(os.path.exists("/proc/" + left.out.strip()))
"""
    out, seconds = checker(tmp_path, body)
    assert out.splitlines() == ["None False", "0 True True", "False"]
    assert seconds < 20


def test_orphans_are_reaped_while_a_program_runs(tmp_path: Path) -> None:
    script = "p=$(sleep 0.1 > /dev/null & echo $!); sleep 0.5; kill -0 $p"
    body = f'print(cg.run_program(["bash", "-c", "{script}"], cwd=box).code)'
    assert checker(tmp_path, body)[0] == "1"


def test_programs_that_hang_repeatedly_are_not_run_again(tmp_path: Path) -> None:
    body = """
cg.HUNG_SECONDS = 0.4
for _ in range(3):
    try:
        print(cg.run_program(["sleep", "987"], cwd=box, timeout=0.2).code)
    except cg.Failed as error:
        print(error)
"""
    out, _ = checker(tmp_path, body)
    assert out.splitlines() == ["None", "None", "programs here did not end too often: not run"]
