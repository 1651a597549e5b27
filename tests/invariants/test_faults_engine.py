"""What keeps the sandboxes dies under a run: the supervisor, or the Docker engine."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from clawgym.records.run_folder import RunFolder

from ..sandbox.conftest import _end, _private_engine
from .faults import Eval, check_whole

pytestmark = pytest.mark.timeout(400)  # a busy machine; what hangs fails all the same
WORK = "sleep 0.7; mkdir -p output; echo 6 > output/sum.txt"


def test_the_supervisor_of_a_run_is_killed(tmp_path: Path) -> None:
    work = Eval(tmp_path, script=WORK, samples=10)
    with work.start() as process:
        work.wait_for_rows(2, process)
        (supervisor,) = psutil.Process(process.pid).children()
        supervisor.kill()
        _, said = process.communicate(timeout=200)
    assert process.returncode == 1, said
    assert "the sandbox supervisor has ended: start the run again" in said
    assert "run the same command again to resume" in said
    rows = work.rows()
    assert {row["outcome"] for row in rows} == {"solved", "infra"}, "the agent is not to blame"
    done = work.run()
    assert done.returncode == 0, done.stderr
    check_whole(RunFolder.read(work.out), 10, rows)


# -- Docker


class Engine:
    """A dockerd of our own that can be killed and started again on what it left."""

    def __init__(self) -> None:
        # Not below pytest's folder: a unix socket's path must be short.
        self.folder = Path(tempfile.mkdtemp(prefix="clawgym-docker-"))
        self.start()

    def start(self) -> None:
        self.process, self.host = _private_engine(self.folder)

    def kill(self, number: signal.Signals) -> None:
        """With the containerd that it started: a new engine must not take a dying one for its own."""
        own = psutil.Process(self.process.pid).children()
        self.process.send_signal(number)
        self.process.wait(60)
        _, left = psutil.wait_procs(own, 10)
        for process in left:
            process.kill()
        (self.folder / "docker.sock").unlink(missing_ok=True)

    def end(self) -> None:
        _end(self.process, self.folder)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    if os.geteuid() != 0 or not shutil.which("dockerd"):
        pytest.skip("starts dockerd as root: apt-get install docker.io")
    made = Engine()
    yield made
    made.end()


def containers(engine: Engine) -> list[str]:
    import docker

    with contextlib.closing(docker.DockerClient(base_url=engine.host)) as client:
        return [str(container.id) for container in client.containers.list(all=True)]


@pytest.mark.docker
def test_a_docker_engine_that_dies_and_stays_away(tmp_path: Path, engine: Engine) -> None:
    work = Eval(tmp_path, script=WORK, samples=6, backend="docker", env={"DOCKER_HOST": engine.host})
    with work.start() as process:
        work.wait_for_rows(1, process)
        engine.kill(signal.SIGKILL)
        _, said = process.communicate(timeout=200)
    assert process.returncode == 1, said
    assert "the Docker engine failed" in said
    assert "run the same command" in said
    assert "Traceback" not in said
    before = work.rows()
    assert {row["outcome"] for row in before} == {"solved", "infra"}, "the agent is not to blame"
    again = work.run()
    assert again.returncode == 2
    assert "start it (sudo systemctl start docker, or sudo dockerd), or set DOCKER_HOST" in again.stderr
    assert "Traceback" not in again.stderr
    engine.start()
    done = work.run()
    assert done.returncode == 0, done.stderr
    check_whole(RunFolder.read(work.out), 6, before)
    assert not containers(engine)


@pytest.mark.docker
def test_a_docker_engine_that_is_started_again_under_a_run(tmp_path: Path, engine: Engine) -> None:
    """Killed, and stopped in order (it then ends the containers, and answers meanwhile): what was at work is ``infra``
    and is tried again."""
    work = Eval(tmp_path, script=WORK, samples=8, backend="docker", env={"DOCKER_HOST": engine.host})
    with work.start() as process:
        for number, rows in ((signal.SIGKILL, 1), (signal.SIGTERM, 5)):
            with contextlib.suppress(AssertionError):  # it may have given up: the engine takes its time to start
                work.wait_for_rows(rows, process)
            engine.kill(number)
            engine.start()
        _, said = process.communicate(timeout=200)
    rows = work.rows()
    assert {row["outcome"] for row in rows} == {"solved", "infra"}, [row["cause"] for row in rows]
    if process.returncode:
        assert "run the same command" in said
        assert work.run().returncode == 0
    check_whole(RunFolder.read(work.out), 8, rows)
    assert not containers(engine)
