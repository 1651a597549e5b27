"""The ray backend without a cluster; the conformance tests run it on one."""

from __future__ import annotations

import asyncio
import os
import subprocess
from pathlib import Path

import pytest

from clawgym.cli.doctor import examine
from clawgym.errors import InfraError, SandboxError, SandboxUnavailable
from clawgym.sandbox import Isolation, SandboxSpec, backend, leases, local_names
from clawgym.sandbox.ray.backend import _weakest
from clawgym.sandbox.ray.layers import PART, Parcels, Shelf, pack

pytestmark = pytest.mark.asyncio(loop_scope="module")
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    top = tmp_path / "layer"
    (top / "lib").mkdir(parents=True)
    (top / "lib" / "big").write_bytes(os.urandom(PART + 1000))
    (top / "run").write_text("#!/bin/sh\n")
    (top / "run").chmod(0o4755)
    (top / "lib").chmod(0o555)
    (top / "link").symlink_to("/opt/elsewhere")
    os.mkfifo(top / "fifo")
    for path in (top, *top.rglob("*")):
        os.utime(path, (1e9, 1e9), follow_symlinks=False)
    return top


def packed(folder: Path) -> tuple[str, list[bytes]]:
    pieces: list[bytes] = []
    return pack(str(folder), pieces.append), pieces


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shelf:
    monkeypatch.setattr(leases, "state_dir", lambda: tmp_path / "state")
    return Shelf()


async def test_a_folder_arrives_as_it_was(folder: Path, shelf: Shelf, tmp_path: Path) -> None:
    digest, pieces = packed(folder)
    assert max(map(len, pieces)) == PART
    assert not shelf.has(digest)
    async with shelf.receiving(digest) as tar:
        for piece in pieces:
            tar.write(piece)
    there = shelf.folder(digest)
    assert {str(p.relative_to(there)) for p in there.rglob("*")} == {"lib", "lib/big", "run", "link"}
    assert (there / "lib" / "big").read_bytes() == (folder / "lib" / "big").read_bytes()
    assert os.readlink(there / "link") == "/opt/elsewhere"
    assert (there / "run").stat().st_mode & 0o7777 == 0o755
    assert (there / "lib").stat().st_mode & 0o7777 == 0o755, "as it was, and open to who removes it"
    assert packed(there)[0] == digest
    assert [p.name for p in (tmp_path / "state").iterdir()] == ["layers"], "nothing half made"


async def test_corrupted_layer_is_not_stored(folder: Path, shelf: Shelf, tmp_path: Path) -> None:
    digest, pieces = packed(folder)
    with pytest.raises(InfraError, match="other than it was sent"):
        async with shelf.receiving(digest) as tar:
            tar.write(b"".join(pieces)[:-1] + b"x")
    assert not shelf.has(digest)
    with pytest.raises(InfraError, match="run the same command again"):
        shelf.folder(digest)


async def test_a_digest_is_of_content_modes_and_times(folder: Path) -> None:
    digest = packed(folder)[0]
    assert packed(folder)[0] == digest
    (folder / "run").chmod(0o644)
    assert packed(folder)[0] != digest


class Node:
    """Of a node, what parcels need."""

    def __init__(self) -> None:
        self.layers: dict[str, asyncio.Task[None]] = {}
        self.kept: dict[str, int] = {}
        self.failing = False

    async def call(self, what: str, *args: object) -> object:
        await asyncio.sleep(0)
        if what == "has_layer":
            return args[0] in self.kept
        if self.failing:
            raise InfraError("the node failed")
        self.kept[str(args[0])] = self.kept.get(str(args[0]), 0) + 1
        return None


async def test_a_folder_is_sent_once_to_each_node(folder: Path) -> None:
    stored: list[bytes] = []
    parcels, nodes = Parcels(lambda piece: stored.append(piece) or len(stored)), [Node(), Node()]
    digests = await asyncio.gather(*(parcels.deliver(str(folder), node) for node in nodes for _ in range(5)))
    assert [node.kept for node in nodes] == [{digests[0]: 1}] * 2
    assert len(set(digests)) == 1
    assert b"".join(stored) == b"".join(packed(folder)[1]), "read once for both"


async def test_a_failed_delivery_is_tried_again(folder: Path) -> None:
    parcels, node = Parcels(lambda piece: piece), Node()
    node.failing = True
    with pytest.raises(InfraError):
        await parcels.deliver(str(folder), node)
    node.failing = False
    assert node.kept == {await parcels.deliver(str(folder), node): 1}


async def test_a_folder_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match=r"missing: cannot be read to send it"):
        await Parcels(lambda piece: piece).deliver(str(tmp_path / "missing"), Node())


async def test_no_cluster_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if ray.is_initialized():
        pytest.skip("another test's cluster is still connected")
    made = backend("ray")
    with pytest.raises(SandboxUnavailable, match=r"ray start --head.*RAY_ADDRESS"):
        await made.create(SandboxSpec())
    await made.aclose()
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    made = backend("ray:chroot")
    with pytest.raises(SandboxUnavailable, match=r"no Ray cluster answers at RAY_ADDRESS=127\.0\.0\.1:1"):
        await made.probe()
    await made.aclose()
    assert not ray.is_initialized()


async def test_the_doctor_seeks_no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("clawgym.sandbox.local_names", lambda: ())
    findings = {finding.what: finding for finding in await asyncio.to_thread(examine)}
    assert findings["sandbox: ray"].detail.startswith("not checked")
    assert "working sandbox" in findings, "a cluster that was not checked does not count"


async def test_backends_of_nodes_are_named() -> None:
    assert "ray" not in local_names()  # those are this machine's: the doctor and the attacks try each
    for name in ("ray:namespace", "ray:ray", "rai"):
        with pytest.raises(SandboxUnavailable, match=r"Known sandboxes: chroot, docker, kubernetes, namespace, ray"):
            backend(name)
    with pytest.raises(SandboxUnavailable, match="ordered_dict"):
        backend("ray:collections:ordered_dict")
    made = backend("ray:clawgym.sandbox.chroot.backend:ChrootBackend")
    assert made.name == "ray:clawgym.sandbox.chroot.backend:ChrootBackend"
    await made.aclose()


async def test_weakest_isolation_of_all_nodes_is_reported() -> None:
    strong = Isolation("namespace", "namespace-root", {"network": True, "own_outer_uid": True})
    weak = Isolation("namespace", "namespace-user", {"network": True, "own_outer_uid": False}, ("shared uid",))
    same = _weakest("ray", {"a": strong, "b": strong})
    assert (same.tier, same.notes) == ("namespace-root", ())
    found = _weakest("ray", {"a": strong, "b": weak})
    assert (found.backend, found.tier) == ("ray", "namespace-user")
    assert found.features == {"network": True, "own_outer_uid": False}
    assert found.notes[0] == "shared uid"
    assert "a: namespace-root, b: namespace-user" in found.notes[1]


async def test_the_recipes_can_be_read() -> None:
    subprocess.run(["bash", "-n", EXAMPLES / "ray_slurm.sh"], check=True)
    yaml = pytest.importorskip("yaml")
    secret, cluster = yaml.safe_load_all((EXAMPLES / "ray_kubernetes.yaml").read_text())
    assert (secret["kind"], cluster["kind"]) == ("Secret", "RayCluster")
    (worker,) = cluster["spec"]["workerGroupSpecs"]
    container = worker["template"]["spec"]["containers"][0]
    assert container["securityContext"]["privileged"] is False
    assert container["env"] == cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]["env"]
