"""The Kubernetes backend with the official client, and a server that answers as a cluster does. No cluster was seen.

Needs the package ``kubernetes``.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

pytest.importorskip("kubernetes", reason="needs the client of Kubernetes: clawgym interop check kubernetes")

from clawgym.errors import InfraError, SandboxDied, SandboxError, SandboxUnavailable
from clawgym.records import Limits, TaskFile
from clawgym.sandbox import Backend, SandboxSpec
from clawgym.sandbox import backend as make_backend

from ..sandbox.conftest import kubernetes_cluster

__all__ = ["kubernetes_cluster"]

CONFORMANCE = [f"tests/sandbox/test_conformance_{name}.py" for name in ("shell", "files", "limits")]
OWNER = """
import asyncio
from clawgym.sandbox import SandboxSpec, backend

async def main():
    made = backend("kubernetes")
    sandbox = await made.create(SandboxSpec())
    shell = await sandbox.shell()
    await shell.run("setsid sleep 1000 & echo $!")
    print("running", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""
Held = Callable[..., None]


@pytest.fixture
def cluster(kubernetes_cluster: Any) -> Iterator[Any]:
    kubernetes_cluster.created.clear()
    yield kubernetes_cluster
    kubernetes_cluster.open_network = False


@pytest_asyncio.fixture
async def backend(cluster: Any) -> AsyncIterator[Backend]:
    made = make_backend("kubernetes")
    yield made
    await made.aclose()


@pytest.mark.timeout(3600)
def test_conformance(cluster: Any, record_property: Held) -> None:
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "kubernetes", *CONFORMANCE]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    found = re.search(r"(\d+) passed", done.stdout)
    assert done.returncode == 0, done.stdout[-5000:]
    assert found is not None
    record_property(
        "held",
        f"{found[1]} conformance tests of shells, commands, files, snapshots and limits pass through a server that "
        "answers as the API does; its pods are sandboxes of the `namespace` backend. Not seen on a cluster",
    )


async def test_what_a_pod_may_do(cluster: Any, backend: Backend, record_property: Held) -> None:
    limits = Limits(memory_mb=300, disk_mb=100, cpus=0.5)
    files = {"/verifier": (TaskFile("deep/check.py", b"print(1)"), TaskFile("run", b"#!/bin/sh", executable=True))}
    sandbox = await backend.create(SandboxSpec(limits=limits, readonly=files, env={"A": "b"}))
    script = "cat /verifier/deep/check.py && test -x /verifier/run && ! touch /verifier/new && echo $A"
    assert (await sandbox.exec(["bash", "-c", script], stdout_only=True)).output == b"print(1)b\n"
    _, job = cluster.created  # the first one is the probe's
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert job["metadata"]["name"] == sandbox.id
    for labels in (job["metadata"]["labels"], spec["template"]["metadata"]["labels"]):
        assert labels["app.kubernetes.io/managed-by"] == "clawgym"
        assert labels["clawgym.lease"] == sandbox.id
        assert labels["clawgym.owner"]
    assert (spec["backoffLimit"], spec["ttlSecondsAfterFinished"], spec["activeDeadlineSeconds"]) == (0, 60, 86400)
    assert pod["automountServiceAccountToken"] is False
    assert pod["restartPolicy"] == "Never"
    assert not {"hostNetwork", "hostPID", "hostIPC", "serviceAccountName"}.intersection(pod)
    for container in (*pod["initContainers"], *pod["containers"]):
        security = container["securityContext"]
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert (security["runAsNonRoot"], security["readOnlyRootFilesystem"]) == (True, True)
        assert security["runAsUser"] > 10_000
        assert security["allowPrivilegeEscalation"] is False
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["resources"]["limits"] == {"cpu": "0.5", "memory": "400Mi", "ephemeral-storage": "64Mi"}
    assert {one["emptyDir"]["sizeLimit"] for one in pod["volumes"]} == {"100Mi"}
    (policy,) = cluster.policies.values()
    assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
    assert not {"ingress", "egress"}.intersection(policy["spec"])
    selected = policy["spec"]["podSelector"]["matchLabels"]
    assert selected.items() <= spec["template"]["metadata"]["labels"].items()
    await sandbox.close()
    assert (cluster.jobs, cluster.pods) == ({}, {})
    record_property(
        "held", "a pod has no service account token, no capabilities, no root, limits, and a Job with a TTL"
    )
    record_property("held", "a NetworkPolicy that allows nothing is there before the first pod")


async def test_what_pods_do_not_have(cluster: Any, backend: Backend, tmp_path: Path, record_property: Held) -> None:
    sandbox = await backend.create(SandboxSpec())
    for call in (sandbox.listen(9000), sandbox.connect(9000)):
        with pytest.raises(SandboxError, match="use the namespace or docker backend"):
            await call
    specs = (SandboxSpec(mounts={"/opt/t": tmp_path}), SandboxSpec(join_network_of=sandbox), SandboxSpec(one_user=True))
    for spec in specs:
        with pytest.raises(SandboxError, match="use the namespace backend"):
            await backend.create(spec)
    assert len(cluster.created) == 2
    await sandbox.close()
    record_property("held", "`listen`, `connect`, mounts and joined networks are refused, with what to use instead")


async def test_no_pod_without_an_image(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CLAWGYM_KUBERNETES_IMAGE")
    made = make_backend("kubernetes")
    with pytest.raises(SandboxUnavailable, match="CLAWGYM_KUBERNETES_IMAGE"):
        await made.probe()
    await made.aclose()
    assert cluster.created == []


async def test_a_network_is_noticed(cluster: Any, backend: Backend, record_property: Held) -> None:
    cluster.open_network = True
    with pytest.raises(SandboxUnavailable, match="does not enforce NetworkPolicy"):
        await backend.probe()
    cluster.open_network = False
    isolation = await backend.probe()
    assert isolation.features["network"]
    assert not isolation.features["pids_limit"]
    record_property("held", "a cluster that does not enforce the NetworkPolicy is refused")


async def test_a_changed_policy_is_refused(cluster: Any, backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    await backend.probe()
    other = {**cluster.policies["clawgym-sandboxes"]}
    other["spec"] = {**other["spec"], "policyTypes": ["Ingress"]}
    monkeypatch.setitem(cluster.policies, "clawgym-sandboxes", other)
    second = make_backend("kubernetes")
    with pytest.raises(SandboxUnavailable, match="was changed: kubectl delete networkpolicy"):
        await second.create(SandboxSpec())
    await second.aclose()


@pytest.mark.parametrize(("status", "error"), [(403, InfraError), (422, SandboxError)])
async def test_a_refused_job(cluster: Any, backend: Backend, status: int, error: type[Exception]) -> None:
    await backend.probe()
    cluster.refusal = (status, "exceeded quota: <b>")
    with pytest.raises(error, match="exceeded quota"):
        await backend.create(SandboxSpec())
    assert cluster.jobs == {}


async def test_a_pod_that_the_cluster_ends(cluster: Any, backend: Backend, record_property: Held) -> None:
    sandbox = await backend.create(SandboxSpec())
    work = asyncio.create_task(sandbox.exec(["bash", "-c", "sleep 1000"]))
    (pod,) = cluster.pods.values()
    pod.reason = "Evicted"
    asyncio.run_coroutine_threadsafe(pod.remove(), cluster.backend_loop).result(60)
    with pytest.raises(InfraError, match="Evicted"):
        await work
    await sandbox.close()
    sandbox = await backend.create(SandboxSpec())
    with pytest.raises(SandboxDied):
        await sandbox.exec(["bash", "-c", "kill -9 -1; sleep 1000"])
    await sandbox.close()
    assert cluster.jobs == {}
    record_property("held", "an evicted pod is an infrastructure error, and a pod that its programs end is not")


def test_nothing_runs_after_a_kill(cluster: Any, record_property: Held) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    assert owner.stdout.readline() == "running\n"
    (pod,) = cluster.pods.values()
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    assert asyncio.run_coroutine_threadsafe(_ended(pod), cluster.backend_loop).result(60)
    assert pod.running == {}
    record_property("held", "after SIGKILL of its owner a pod ends by itself")


async def _ended(pod: Any) -> bool:
    await pod.task
    return "terminated" in pod.states["sandbox"]
