"""A cluster loses a node, or the owner of its sandboxes, amid an evaluation: no episode is lost, none counts twice.

Nodes of this cluster are on one machine (``ray.cluster_utils.Cluster``); a node is lost by SIGKILL of its raylet. What
was ours is found below the raylets while it runs, and by the owner ids of its supervisors; nothing by a name pattern.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from clawgym.sandbox import leases
from clawgym.tasks import load

from ..conftest import ray_nodes

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc"),
    pytest.mark.timeout(600),
]

PROMISE = 2.0
RAYS = 8.0
"""Seconds in which Ray finds out that an owner, or a raylet, is dead (1 s on a quiet machine), on top of ours."""
TASKS = [task.id for task in load("terminal-basic").tasks if task.verifier.executes_agent_code is None][:20]
"""Their checkers read files only, so no score depends on how busy the machine is."""
SAMPLES = 2


@dataclass
class Seen:
    """Everything of ours below the raylets of a cluster, as long as somebody looks."""

    raylets: list[int]
    hosts: set[psutil.Process] = field(default_factory=set)
    below: set[psutil.Process] = field(default_factory=set)
    """Supervisors, and all that they started."""
    owners: set[str] = field(default_factory=set)

    def look(self) -> None:
        for raylet in self.raylets:
            with contextlib.suppress(psutil.Error):
                for worker in psutil.Process(raylet).children():
                    with contextlib.suppress(psutil.Error):
                        self._look_below(worker)

    def _look_below(self, worker: psutil.Process) -> None:
        for child in worker.children():
            words = child.cmdline()
            if str(leases.state_dir()) in words:  # a supervisor: its last word is its owner's id
                self.hosts.add(worker)
                self.owners.add(words[-1])
                self.below.update([child, *child.children(recursive=True)])

    def left(self) -> list[str]:
        found = [str(p) for p in self.hosts | self.below if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        state = leases.state_dir()
        for owner in self.owners:
            found += [str(path) for path in (*state.glob(f"*{owner}*"), *state.glob(f"*/*{owner}*"))]
            for line in Path("/proc/self/mountinfo").read_text().splitlines():
                if " - cgroup" in line:
                    for folder, names, _ in os.walk(line.split()[4]):
                        found += [f"{folder}/{name}" for name in names if owner in name]
        return found

    def gone_after(self, patience: float) -> float:
        """Seconds until nothing of it is left; fails after ``patience``."""
        started = time.monotonic()
        while found := self.left():
            waited = time.monotonic() - started
            assert waited < patience, f"{waited:.1f} s later: {found[:5]}"
            time.sleep(0.05)
        return time.monotonic() - started


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with ray_nodes(3) as made:
        yield made


@contextlib.contextmanager
def watched(cluster: Any) -> Iterator[Seen]:
    seen = Seen([node.all_processes["raylet"][0].process.pid for node in cluster.list_all_nodes()])
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.1):
            seen.look()

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


def evaluation(cluster: Any, out: Path, agent: str = "sloppy") -> subprocess.Popen[bytes]:
    """``clawgym eval`` on the cluster, as a process of its own."""
    argv = [
        "eval",
        "terminal-basic",
        "--agent",
        agent,
        *(word for task in TASKS for word in ("--task", task)),
        "--out",
        str(out),
    ]
    argv += ["--sandbox", "ray" if cluster is not None else "namespace", "--concurrency", "9", "-k", str(SAMPLES)]
    env = os.environ | ({"RAY_ADDRESS": cluster.address} if cluster is not None else {})
    with out.with_suffix(".log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-c", "from clawgym.cli import main; main()", *argv],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )


def lose_a_node(cluster: Any, owner: subprocess.Popen[bytes]) -> None:
    """The last node, while its sandboxes are in use: their owner is stopped until all that ran there is dead."""
    node = cluster.list_all_nodes()[-1]
    there = psutil.Process(node.all_processes["raylet"][0].process.pid).children()
    owner.send_signal(signal.SIGSTOP)
    try:
        cluster.remove_node(node, allow_graceful=False)
        _, alive = psutil.wait_procs(there, timeout=60)
    finally:
        owner.send_signal(signal.SIGCONT)
    assert not alive, alive


def rows(out: Path) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    except (OSError, ValueError):  # not begun; a line is being written
        return []


def wait_for(out: Path, count: int, process: subprocess.Popen[bytes]) -> None:
    while len(rows(out)) < count:
        assert process.poll() is None, out.with_suffix(".log").read_text()[-3000:]
        time.sleep(0.05)


def scores(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Of what counts: every key must be there once."""
    counted = [row for row in found if row["outcome"] != "infra"]
    assert Counter(row["key"] for row in counted) == Counter(
        f"{task}#{sample}" for task in TASKS for sample in range(SAMPLES)
    )
    return {row["key"]: (row["outcome"], row["result"]["checks"], row["result"]["strict"]) for row in counted}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What this machine alone gives, without Ray."""
    out = tmp_path_factory.mktemp("local") / "run"
    assert evaluation(None, out).wait() == 0
    return scores(rows(out))


def test_a_node_is_lost(cluster: Any, expected: dict[str, Any], tmp_path: Path) -> None:
    out = tmp_path / "run"
    with watched(cluster) as seen:
        process = evaluation(cluster, out)
        try:
            wait_for(out, 9, process)
            lose_a_node(cluster, process)
            assert process.wait() == 0, out.with_suffix(".log").read_text()[-3000:]
        finally:
            process.kill()
    found = rows(out)
    lost = [row for row in found if row["outcome"] == "infra"]
    assert lost, "nothing ran on the node that was lost"
    assert all("was lost with its sandboxes" in row["cause"] for row in lost), lost
    final = {row["key"]: row for row in found if row["outcome"] != "infra"}
    assert all(final[row["key"]]["attempt"] > row["attempt"] for row in lost)
    assert scores(found) == expected
    summary = json.loads((out / "summary.json").read_text())
    assert summary["complete"]
    print(f"\n{len(lost)} episodes were on the lost node; nothing left after {seen.gone_after(PROMISE + RAYS):.1f} s")
    assert len(seen.owners) == 3


def test_the_owner_is_killed_and_the_same_command_goes_on(
    cluster: Any, expected: dict[str, Any], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    with watched(cluster) as seen:
        process = evaluation(cluster, out)
        try:
            wait_for(out, 9, process)
            seen.look()
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
        print(f"\nthe owner was killed; nothing left after {seen.gone_after(PROMISE + RAYS):.1f} s")
        assert seen.owners
        again = evaluation(cluster, out)
        try:
            wait_for(out, 18, again)
            next(host for host in seen.hosts if host.is_running()).kill()  # an actor alone: its node gets another one
            assert again.wait() == 0, out.with_suffix(".log").read_text()[-3000:]
        finally:
            again.kill()
        seen.gone_after(PROMISE + RAYS)
    assert scores(rows(out)) == expected


@pytest.mark.skipif(not os.environ.get("CLAWGYM_WHOLE"), reason="with CLAWGYM_WHOLE=1: it starts a cluster of its own")
def test_the_last_node_is_lost_and_another_joins(tmp_path: Path) -> None:
    """The run ends and says what to do; the same command goes on with the nodes that there are then."""
    out = tmp_path / "run"
    with ray_nodes(2, head_cpus=0) as small:
        process = evaluation(small, out)
        try:
            wait_for(out, 9, process)
            lose_a_node(small, process)
            assert process.wait(120) == 1
            said = " ".join(out.with_suffix(".log").read_text().split())
            assert "no node is left: start nodes" in said
            assert "run the same command again to resume" in said
            small.add_node(num_cpus=2, object_store_memory=100 * 2**20)
            again = evaluation(small, out)
            assert again.wait() == 0, out.with_suffix(".log").read_text()[-3000:]
        finally:
            process.kill()
    scores(rows(out))
