"""The machine fails under a run: a full disk, a killed process, a clock that jumps. The same command continues."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from clawgym.records.run_folder import RunFolder
from clawgym.sandbox import leases

from .faults import Eval, check_whole

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="private mounts and preloaded libraries"),
    pytest.mark.timeout(400),
]


REMEDY = "free space on that disk, then run the same command again to resume; finished results are kept"


def _private_mounts(script: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a shell script that may mount what it likes: only it sees that, and it is gone with it."""
    argv = ["unshare", "--mount", "--propagation", "private", "bash", "-euc", script]
    return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=300)


needs_mounts = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="mounts a small disk: run as root"
)


@needs_mounts
@pytest.mark.parametrize("room", [0, 40, 90], ids=lambda kib: f"{kib}KiB")
def test_a_full_disk_below_the_run_folder(tmp_path: Path, room: int) -> None:
    work = Eval(tmp_path)
    work.out = tmp_path / "disk" / "run"
    again = shlex.join(work.argv())
    script = f"""
        mkdir disk
        mount -t tmpfs -o size=1m tmpfs disk
        head -c {(1024 - room) * 1024} /dev/zero > disk/filler
        {again} 2> first.err || echo "first $?"
        cp -a disk/run before || mkdir before
        rm disk/filler
        {again} 2> second.err && echo "second $?"
        cp -a disk/run after
    """
    done = _private_mounts(f"cd {shlex.quote(str(tmp_path))}\n{script}", work.environment())
    said = (tmp_path / "first.err").read_text()
    assert "first 2" in done.stdout, (done, said)
    assert "No space left on device" in said
    assert said.rstrip().endswith(REMEDY)
    assert "Traceback" not in said
    before = RunFolder.read(tmp_path / "before").rows if room else []
    assert all(row["outcome"] == "solved" for row in before)
    assert len(before) < work.samples or room == 90  # there only the summary had no room
    assert "second 0" in done.stdout, (tmp_path / "second.err").read_text()
    check_whole(RunFolder.read(tmp_path / "after"), work.samples, before)


@needs_mounts
def test_a_full_disk_below_the_state_folder(tmp_path: Path) -> None:
    work = Eval(tmp_path, samples=1)
    state = shlex.quote(str(leases.state_dir()))
    again = shlex.join(work.argv())
    script = f"""
        mkdir -p {state}
        mount -t tmpfs -o size=64k tmpfs {state}
        head -c 64K /dev/zero > {state}/filler || true
        {again} 2> {tmp_path}/first.err || echo "first $?"
        rm {state}/filler
        mount -o remount,size=512m {state}
        {again} 2> {tmp_path}/second.err && echo "second $?"
    """
    done = _private_mounts(script, work.environment())
    said = (tmp_path / "first.err").read_text()
    assert "first 2" in done.stdout, (done, said)
    assert "No space left on device" in said
    assert "second 0" in done.stdout, (tmp_path / "second.err").read_text()


def test_a_run_that_the_kernel_kills(tmp_path: Path) -> None:
    """What the OOM killer does to the owner of the run is a SIGKILL."""
    work = Eval(tmp_path, script="sleep 0.3; mkdir -p output; echo 6 > output/sum.txt", samples=8)
    with work.start() as process:
        work.wait_for_rows(2, process)
        process.send_signal(signal.SIGKILL)
    before = work.rows()
    assert 2 <= len(before) < 8
    done = work.run()
    assert done.returncode == 0, done.stderr
    assert f"Resuming: {len(before)} of 8 episodes are done." in done.stderr
    check_whole(RunFolder.read(work.out), 8, before)


def _libfaketime() -> str | None:
    """The library that shows a process another wall clock."""
    found = sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))
    return str(found[0]) if found else None


@pytest.mark.skipif(_libfaketime() is None, reason="no libfaketime: apt-get install faketime")
def test_a_clock_that_jumps(tmp_path: Path) -> None:
    clock = tmp_path / "clock"
    clock.write_text("+0d")
    env = {"LD_PRELOAD": str(_libfaketime()), "FAKETIME_TIMESTAMP_FILE": str(clock), "FAKETIME_NO_CACHE": "1"}
    env |= {"FAKETIME_DONT_FAKE_MONOTONIC": "1", "DONT_FAKE_MONOTONIC": "1"}
    work = Eval(tmp_path, script="sleep 0.5; mkdir -p output; echo 6 > output/sum.txt", samples=10, env=env)
    over = threading.Event()

    def jump() -> None:
        while not over.is_set():
            for days in ("+400d", "-400d", "+0d", "+3d"):
                clock.write_text(days)
                over.wait(0.2)

    jumping = threading.Thread(target=jump)
    jumping.start()
    try:
        with work.start() as process:
            work.wait_for_rows(3, process)
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=60)
            assert process.returncode == 130, said
        before = work.rows()
        done = work.run()
    finally:
        over.set()
        jumping.join()
    assert done.returncode == 0, done.stderr
    run = RunFolder.read(work.out)
    check_whole(run, 10, before)
    for row in run.rows:
        assert set(row["seconds"]) == {"setup", "agent", "verify", "teardown"}
        assert all(0 <= seconds < 60 for seconds in row["seconds"].values()), row["seconds"]
        assert row["seconds"]["agent"] >= 0.5
    stamps = [datetime.fromisoformat(row["finished"]) for row in run.rows]
    assert max(abs((stamp - datetime.now(UTC)).days) for stamp in stamps) > 300, "the clock did not jump"


def test_task_files_from_the_future(tmp_path: Path) -> None:
    work = Eval(tmp_path, samples=1)
    future = time.time() + 400 * 86400
    for path in (work.bench, *work.bench.rglob("*")):
        os.utime(path, (future, future))
    work.folder.joinpath("agent.sh").write_text(
        "mkdir -p output; echo 6 > output/sum.txt; touch -d 2500-01-01 output/sum.txt; touch -d 1900-01-01 output/x"
    )
    done = work.run()
    assert done.returncode == 0, done.stderr
    check_whole(RunFolder.read(work.out), 1, [])
