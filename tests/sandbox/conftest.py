"""Backends for the conformance tests.

A third backend joins by one entry in ``BACKENDS``: every ``test_conformance_*.py`` then runs against it. An entry
is a ``pytest.param`` of :class:`Traits`; the marks decide when it runs, the traits name the few differences that
the protocol allows. Real sandboxes only: nothing here stands in for one.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
import warnings
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
import pytest_asyncio

from clawgym.sandbox import Backend, Sandbox, SandboxSpec

from ..conftest import usable

if TYPE_CHECKING:
    from .cluster import FakeCluster


@dataclass(frozen=True)
class Traits:
    """What the conformance tests may expect of one backend beyond the protocol."""

    name: str
    """As :func:`clawgym.sandbox.backend` knows it."""
    root_inside: bool = True
    """Commands see themselves as uid 0."""
    private_usr: bool = True
    """A sandbox may change its own ``/usr`` (otherwise it is read-only)."""
    joins_network: bool = True
    """``SandboxSpec.join_network_of`` works here."""
    survives_kills: bool = True
    """Its stream survives a program that kills all processes it may kill."""
    pristine_mount: bool = True
    """``SandboxSpec.pristine_tools`` adds ``/.pristine``; otherwise the image cannot be changed."""
    lacks: frozenset[str] = frozenset()
    """Features of :class:`~clawgym.sandbox.Isolation` that it is known, and says, not to have."""


BACKENDS = [
    pytest.param(Traits("namespace", private_usr=os.geteuid() == 0, joins_network=os.geteuid() == 0), id="namespace"),
    pytest.param(
        Traits(
            "chroot",
            root_inside=False,
            private_usr=False,
            joins_network=False,
            lacks=frozenset({"pid", "disk_limit", "proc", "terminals", "loopback", "hostname"}),
        ),
        id="chroot",
        marks=pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for a uid a sandbox"),
    ),
    pytest.param(Traits("docker", root_inside=False, private_usr=False), id="docker", marks=pytest.mark.docker),
    pytest.param(Traits("ray", private_usr=os.geteuid() == 0, joins_network=os.geteuid() == 0), id="ray"),
]
if find_spec("kubernetes"):  # in the environment of `clawgym interop check kubernetes`
    _PODS = Traits(
        "kubernetes",
        private_usr=os.geteuid() == 0,
        joins_network=False,
        survives_kills=False,
        pristine_mount=False,
        lacks=frozenset({"pids_limit"}),
    )
    BACKENDS.append(pytest.param(_PODS, id="kubernetes"))
_NOT_IN_PODS = ("listen", "connect", "mounts", "inside")
"""The conformance tests of what pods refuse."""
_ON_RAY = ("files", "listen", "connect")
"""The conformance tests that always run on a cluster."""


@pytest.fixture(scope="module", params=BACKENDS)
def traits(request: pytest.FixtureRequest) -> Traits:
    """The backend's entry in ``BACKENDS``."""
    if request.param.name == "docker":
        request.getfixturevalue("docker_engine")
    if request.param.name == "ray":
        if request.module.__name__.rpartition("_")[2] not in _ON_RAY and not os.environ.get("CLAWGYM_WHOLE"):
            pytest.skip("with CLAWGYM_WHOLE=1: what it tests is the node's own backend's, behind the same calls")
        request.getfixturevalue("ray_cluster")
    if request.param.name == "kubernetes":
        if request.module.__name__.rpartition("_")[2] in _NOT_IN_PODS:
            pytest.skip("pods do not have it: clawgym interop check kubernetes tests that it is refused")
        request.getfixturevalue("kubernetes_cluster")
    return request.param


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def backend(traits: Traits) -> AsyncIterator[Backend]:
    """One backend for the tests of a module."""
    async with usable(traits.name) as made:
        yield made


async def processes(sandbox: Sandbox) -> str:
    """The command lines of everything that runs in a sandbox."""
    if sandbox.isolation.features["proc"]:
        return (await sandbox.exec(["sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"])).text
    uid = int((await sandbox.exec(["id", "-u"])).output)
    found: list[str] = []
    for process in psutil.process_iter():
        try:
            if uid in process.uids():
                found += process.cmdline()
        except psutil.NoSuchProcess:
            continue
    return " ".join(found)


@pytest_asyncio.fixture(loop_scope="module")
async def sandbox(backend: Backend) -> AsyncIterator[Sandbox]:
    """A fresh sandbox."""
    made = await backend.create(SandboxSpec())
    yield made
    await made.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(backend: Backend) -> AsyncIterator[Sandbox]:
    """A sandbox that tests share when they leave nothing behind in it."""
    made = await backend.create(SandboxSpec())
    yield made
    await made.close()


# -- a Docker engine


def answers(host: str) -> bool:
    """Whether an engine answers there."""
    docker = pytest.importorskip("docker")
    try:
        client = docker.DockerClient(base_url=host, timeout=5)
        try:
            return bool(client.ping())
        finally:
            client.close()
    except Exception:
        return False


def _private_engine(folder: Path) -> tuple[subprocess.Popen[bytes], str]:
    """A dockerd of our own: its data, its sockets and its network are nobody else's."""
    host = f"unix://{folder}/docker.sock"
    argv = ["dockerd", "-H", host, "--data-root", f"{folder}/data", "--exec-root", f"{folder}/exec"]
    argv += ["-p", f"{folder}/docker.pid", "--bridge=none", "--iptables=false", "--ip6tables=false"]
    argv += ["--ip-forward=false", "--ip-masq=false", "--userland-proxy=false"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(argv, stdout=log, stderr=log, start_new_session=True)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and process.poll() is None:
        if answers(host):
            return process, host
        time.sleep(0.1)
    text = (folder / "log").read_text(errors="replace")[-1500:]
    _end(process, folder)
    pytest.skip(f"docker: dockerd does not start here:\n{text}")


def _end(process: subprocess.Popen[bytes], folder: Path) -> None:
    if process.poll() is not None:
        log = (folder / "log").read_text(errors="replace")[-3000:]
        warnings.warn(f"dockerd ended by itself ({process.returncode}):\n{log}", stacklevel=1)
    else:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    for point in sorted((p for p in points if p.startswith(f"{folder}/")), reverse=True):
        subprocess.run(["umount", "-l", point], check=False)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def docker_engine() -> Iterator[str]:
    """The address of a Docker engine: a running one, else a private one if dockerd is installed, else a skip."""
    given = os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"
    if answers(given):
        yield given
        return
    if os.geteuid() != 0 or not shutil.which("dockerd"):
        pytest.skip("docker: no engine answers, and no dockerd to start as root: apt-get install docker.io")
    # Not below pytest's folder: a unix socket's path must be short.
    folder = Path(tempfile.mkdtemp(prefix="clawgym-docker-"))
    process, host = _private_engine(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DOCKER_HOST", host)
        yield host
    _end(process, folder)


# -- a Kubernetes cluster


@pytest.fixture(scope="session")
def kubernetes_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeCluster]:
    """A server that answers as a cluster does, and whose pods are sandboxes of the namespace backend."""
    from .cluster import FakeCluster

    cluster = FakeCluster()
    cluster.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KUBECONFIG", str(cluster.kubeconfig(tmp_path_factory.mktemp("cluster") / "config")))
        patch.setenv("CLAWGYM_KUBERNETES_IMAGE", "python:3.12")
        yield cluster
    cluster.stop()
