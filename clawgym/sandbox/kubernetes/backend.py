"""Sandboxes as pods of a Kubernetes cluster.

Process 1 of a pod is the same guest as in the other backends. It is reached by a program that ``exec`` starts, and ends
with it: the pod ends, and a minute later the cluster removes its job. The image is read-only; what a sandbox may write
is memory. A NetworkPolicy allows its pods nothing, and the probe refuses a cluster that does not enforce it.
"""

from __future__ import annotations

import asyncio
import io
import os
import secrets
import sys
import tarfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from clawgym.errors import InfraError, SandboxDied, SandboxError, SandboxUnavailable
from clawgym.offload import offloaded
from clawgym.records import packages_of
from clawgym.registry import sandboxes
from clawgym.sandbox.docker.backend import DockerBackend
from clawgym.sandbox.docker.container import DockerSandbox, Started
from clawgym.sandbox.docker.container import inside as copying
from clawgym.sandbox.docker.engine import DockerImage
from clawgym.sandbox.kubernetes.cluster import Cluster, PodStream, job
from clawgym.sandbox.link import as_text, guest_argv
from clawgym.sandbox.probe import missing, questions
from clawgym.sandbox.protocol import Isolation, Sandbox, SandboxSpec

__all__ = ["KubernetesBackend", "KubernetesSandbox"]

_MiB = 2**20
_RELAY = "clawgym-relay"
_IMAGE, _NAMESPACE = "CLAWGYM_KUBERNETES_IMAGE", "CLAWGYM_KUBERNETES_NAMESPACE"
_REACHES = """
import os, socket
try:
    socket.create_connection((os.environ["KUBERNETES_SERVICE_HOST"], int(os.environ["KUBERNETES_SERVICE_PORT"])), 5)
except (OSError, KeyError):
    raise SystemExit(0)
raise SystemExit(1)
"""
"""Ends with 1 if the pod reaches the cluster's API, which every pod does without a NetworkPolicy."""


@cache
def _inside(*words: str) -> list[str]:
    """The command line of ``sandbox/inside/pods.py``."""
    return ["python3", "-I", "-S", "-B", "-c", as_text("pods"), *words]


class KubernetesSandbox(DockerSandbox):
    """A pod. Its files are taken by a program in it, and are gone with it."""

    def tool(self, name: str) -> list[str]:
        return [name]  # the image is read-only

    async def programs(self) -> tuple[str, ...]:
        found = list(await super().programs())
        if _RELAY in found:
            found.remove(_RELAY)
        return tuple(found)

    async def _run_inside(self, what: str, paths: list[str], entries: int, size: int, cap: int) -> bytes:
        # Killing all others would end the relay, and so the pod with its files.
        return await super()._run_inside("stop" if what == "kill" else what, paths, entries, size, cap)

    async def _listen(self, port: int) -> Any:
        raise SandboxError("the kubernetes backend cannot listen in a pod: use the namespace or docker backend")

    async def _connect(self, port: int) -> Any:
        raise SandboxError("the kubernetes backend cannot connect to a pod: use the namespace or docker backend")


@sandboxes.register("kubernetes")
class KubernetesBackend(DockerBackend):
    """Sandboxes as pods of a Kubernetes cluster.

    See :class:`~clawgym.sandbox.protocol.Backend`. One for each event loop. It has no mounts, does not join networks,
    and cannot listen in a sandbox or connect to it.

    Args:
        default_image: stands for the image ``default``; ``CLAWGYM_KUBERNETES_IMAGE`` by default. No pod is started
            where neither is given.
        namespace: where the pods are; ``CLAWGYM_KUBERNETES_NAMESPACE``, or the current context's, by default.
    """

    name = "kubernetes"

    def __init__(self, default_image: str | None = None, namespace: str | None = None) -> None:
        super().__init__(default_image or os.environ.get(_IMAGE) or "")
        self._default_image = default_image or os.environ.get(_IMAGE) or ""
        self.cluster = Cluster(namespace or os.environ.get(_NAMESPACE))
        self.engine = self.cluster  # type: ignore[assignment]
        self._probing = asyncio.Lock()

    async def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Await a call of the cluster. Raises :class:`InfraError` if the cluster fails."""
        import aiohttp
        from kubernetes.aio.client import ApiException  # pyright: ignore[reportMissingImports]

        try:
            return await function(*args)
        except (aiohttp.ClientError, ApiException, OSError) as error:
            raise InfraError(
                f"the cluster failed ({str(error)[-300:]}): see that it answers (kubectl get pods), and try again"
            ) from error

    async def _start_once(self) -> None:
        if not self._default_image:
            raise SandboxUnavailable(
                f"no pod is started unless you name an image with python3, bash and tar: export {_IMAGE}=python:3.12"
            )
        await self.cluster.start()
        if sys.platform == "linux":
            await self.supervised.start()
        self.folder.mkdir(parents=True, exist_ok=True)

    async def create(self, spec: SandboxSpec) -> Sandbox:
        await self.probe()  # no program runs in a cluster that does not keep it from the network
        return await self._create(spec, None)

    async def probe(self) -> Isolation:
        async with self._probing:
            if self._isolation is None:
                await self._start()
                self._isolation = await self._probe()
        return self._isolation

    async def _probe(self) -> Isolation:
        try:
            sandbox = await self._create(SandboxSpec(), None)
        except (InfraError, SandboxError, SandboxDied) as error:
            raise SandboxUnavailable(f"no pod could be started ({error}): see kubectl get events") from error
        try:
            argv = ["python3", "-I", "-S", "-c", _REACHES]  # the sandbox's own programs do not know the address
            reached, _, _ = await self.call(self.cluster.run_inside, sandbox.id, argv, "", b"", _MiB, 30.0)
            features = await questions(sandbox)
        finally:
            await sandbox.close()
        if reached:
            raise SandboxUnavailable(
                "this cluster does not enforce NetworkPolicy: a sandbox reached its API; install a network plugin that "
                "does, such as Calico or Cilium"
            )
        features |= {"network": True, "memory_limit": True, "cpu_limit": True, "disk_limit": True}
        features |= {"pids_limit": False, "own_outer_uid": True}
        notes = [
            "network: by NetworkPolicy; a pod that starts while the policy is being applied may have a network",
            "files: the image is read-only and each writable folder is a memory volume; nothing can be installed",
            "disk: limits.disk_mb holds for each writable folder; all of them count as memory",
            "pids: limited by RLIMIT_NPROC; the node's own limit holds for the pod",
            *missing(features),
        ]
        return Isolation(self.name, "kubernetes", features, tuple(notes))

    async def _open(self, spec: SandboxSpec, saved: Path | None) -> KubernetesSandbox:
        if spec.mounts or spec.join_network_of is not None or spec.one_user:
            raise SandboxError(
                "the kubernetes backend has no mounts, joined networks or one_user: use the namespace backend"
            )
        image = DockerImage(self._default_image if packages_of(spec.image) is not None else spec.image, False)
        lease, nonce = f"clawgym-{secrets.token_hex(8)}", secrets.token_hex(8)
        user = 0x60000000 + secrets.randbelow(1 << 28)
        writable = image.writable(spec.workdir, spec.readonly)
        limits = {"RLIMIT_CORE": 0, "RLIMIT_NOFILE": 4096, "RLIMIT_FSIZE": spec.limits.file_mb * _MiB}
        limits["RLIMIT_NPROC"] = spec.limits.pids
        first = _inside("first", *guest_argv({"nonce": nonce, "rlimits": limits, "mkdirs": [spec.workdir]}))
        numbers = [word for number, folder in enumerate(writable) for word in (folder, str(number))]
        prepare = _inside("prepare", *(["--wait"] if spec.readonly else []), *numbers)
        owner = self.supervised.owner
        wanted = job(lease, owner, spec, image.id, user, writable, prepare, first)
        try:
            await self.call(self.cluster.launch, wanted)
            if spec.readonly:
                await self.call(self.cluster.wait_for, lease, "prepare")
                await self._fill_volumes(lease, await offloaded(_packed, spec, len(writable)))
            pod = await self.call(self.cluster.wait_for, lease, "sandbox")
            stream = PodStream(await self.call(self.cluster.execute, pod, "sandbox", _inside("relay")))
            started = Started(lease, stream, 0, writable)
            try:
                await started.hello(nonce)
            except BaseException:
                stream.close()
                raise
        except BaseException:
            await asyncio.shield(asyncio.ensure_future(self.call(self.cluster.remove, lease)))
            raise
        sandbox = KubernetesSandbox(self, lease, spec, image, user, started)
        self.sandboxes[lease] = sandbox
        sandbox.start()
        if saved is not None:
            try:
                await self._fill_from(sandbox, saved)
            except BaseException:
                await sandbox.close()
                raise
        return sandbox

    async def _fill_volumes(self, lease: str, tar: bytes) -> None:
        """Unpack ``tar`` in the init container, where the read-only volumes can be written."""
        run, argv = self.cluster.run_inside, _inside("fill")
        code, _, why = await self.call(run, lease, argv, "", tar, _MiB, 60.0, "prepare")
        if code:
            raise InfraError(f"read-only files could not be put into a sandbox ({why or code}): see kubectl get events")

    async def _fill_from(self, sandbox: KubernetesSandbox, saved: Path) -> None:
        skip = [folder.strip("/") for folder in sandbox.spec.readonly]
        content = await offloaded(saved.read_bytes)
        seconds = sandbox.spec.limits.setup_seconds
        done = await sandbox.exec(copying("fill", *skip), cwd="/", stdin=content, timeout=seconds)
        if done.exit_code:
            raise SandboxError(
                f"the snapshot's files do not fit into the sandbox ({done.text.strip()[-300:]}): raise limits.disk_mb"
            )

    async def aclose(self) -> None:
        await super().aclose()
        await self.cluster.close()


def _packed(spec: SandboxSpec, before: int) -> bytes:
    """A tar of the read-only files, below the numbers of their volumes."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for number, files in enumerate(spec.readonly.values(), before):
            for file in files:
                data = file.read()
                entry = tarfile.TarInfo(f"{number}/{file.path}")
                entry.size, entry.mode = len(data), 0o555 if file.executable else 0o444
                tar.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()
