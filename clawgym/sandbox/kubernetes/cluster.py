"""A Kubernetes cluster, by the official client: the jobs and pods of sandboxes, and programs in them.

:func:`job` decides what a pod may do.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any

from clawgym.errors import InfraError, MissingDependency, SandboxDied, SandboxError, SandboxUnavailable, TreeTooLarge
from clawgym.sandbox.docker.container import Attached
from clawgym.sandbox.linux import rootfs
from clawgym.sandbox.protocol import SandboxSpec

__all__ = ["LEASE", "POLICY", "Cluster", "PodStream", "job", "policy"]

_MANAGED = {"app.kubernetes.io/managed-by": "clawgym"}
_OWNER, LEASE = "clawgym.owner", "clawgym.lease"
POLICY = "clawgym-sandboxes"
"""The name of the NetworkPolicy of all sandboxes in a namespace."""
_DAY = 86_400
_STDIN, _STDOUT, _STDERR, _STATUS = range(4)
_CHUNK = 1 << 16
_BEGIN = """import os, sys
text, size = b"", int(sys.argv.pop(1))
while len(text) < size:
    text += os.read(0, size - len(text)) or sys.exit(1)
exec(text)"""
"""Reads a Python program from stdin and runs it: commands are part of an address, whose length is limited."""
_START_SECONDS = 300.0
"""The longest wait for a pod: its node may have to pull the image."""


def policy() -> dict[str, Any]:
    """The NetworkPolicy that allows the pods of sandboxes nothing."""
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": POLICY, "labels": _MANAGED},
        "spec": {"podSelector": {"matchLabels": _MANAGED}, "policyTypes": ["Ingress", "Egress"]},
    }


def job(
    name: str,
    owner: str,
    spec: SandboxSpec,
    image: str,
    user: int,
    writable: Iterable[str],
    prepare: list[str],
    first: list[str],
) -> dict[str, Any]:
    """The Job of one sandbox. A Job, not a Pod: the cluster removes it a minute after its end.

    Args:
        name: its name, which is the id of the sandbox.
        owner: the id of this process.
        user: the uid of all its processes.
        writable: the folders that the sandbox may write, each a memory volume of ``limits.disk_mb``.
        prepare: the command of the init container, which has the volumes at ``/clawgym/0``, ``/clawgym/1``, ...
        first: the command of process 1.
    """
    limits = spec.limits
    folders = [*((folder, False) for folder in writable), *((folder, True) for folder in spec.readonly)]
    memory = limits.memory_mb + limits.disk_mb  # its files count as memory
    resources = {"limits": {"cpu": f"{limits.cpus:g}", "memory": f"{memory}Mi", "ephemeral-storage": "64Mi"}}
    security = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": True,
        "runAsUser": user,
        "runAsGroup": user,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    given = {**{key: value for key, value in rootfs.ENV.items() if key != "PATH"}, **spec.env}  # PATH is the image's
    env = [{"name": key, "value": value} for key, value in given.items()]
    common = {"image": image, "securityContext": security, "resources": resources, "env": env, "workingDir": "/"}

    def volume(number: str) -> dict[str, Any]:
        return {"name": f"v{number}", "emptyDir": {"medium": "Memory", "sizeLimit": f"{limits.disk_mb}Mi"}}

    numbers = [*map(str, range(len(folders))), "control"]
    pod = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 0,
        "hostname": "box",
        "volumes": [volume(number) for number in numbers],
        "initContainers": [
            {
                "name": "prepare",
                "command": prepare,
                "volumeMounts": [{"name": f"v{number}", "mountPath": f"/clawgym/{number}"} for number in numbers],
                **common,
            }
        ],
        "containers": [
            {
                "name": "sandbox",
                "command": first,
                "volumeMounts": [
                    {"name": f"v{number}", "mountPath": folder, "readOnly": readonly}
                    for number, (folder, readonly) in enumerate(folders)
                ],
                **common,
            }
        ],
    }
    labels = {**_MANAGED, _OWNER: owner, LEASE: name}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "backoffLimit": 0,
            "completions": 1,
            "parallelism": 1,
            "activeDeadlineSeconds": _DAY,
            "ttlSecondsAfterFinished": 60,
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }


class PodStream(Attached):
    """A program in a pod whose stdin and stdout are a socket of this process."""

    def __init__(self, websocket: Any) -> None:
        ours, self._theirs = socket.socketpair()
        super().__init__(ours)
        self._theirs.setblocking(False)
        self._websocket = websocket
        self._tasks = [asyncio.create_task(self._outgoing()), asyncio.create_task(self._incoming())]

    def decode(self, data: bytes) -> bytes:
        return data

    async def _outgoing(self) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            while data := await loop.sock_recv(self._theirs, _CHUNK):
                await self._websocket.send_bytes(bytes([_STDIN]) + data)
        await self._websocket.close()

    async def _incoming(self) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            async for channel, data in _messages(self._websocket):
                if channel == _STDOUT:
                    await loop.sock_sendall(self._theirs, data)
                elif channel == _STDERR:
                    self.frames.errors += data[: 4096 - len(self.frames.errors)]
        self._tasks[0].cancel()
        await asyncio.gather(self._tasks[0], return_exceptions=True)
        self._theirs.close()
        await self._websocket.close()


async def _messages(websocket: Any) -> AsyncIterator[tuple[int, bytes]]:
    """Channel and data of each message that has both."""
    async for message in websocket:
        data = message.data if isinstance(message.data, bytes) else str(message.data).encode()
        if len(data) > 1:
            yield data[0], data[1:]


class Cluster:
    """One namespace of a cluster. Raises :class:`SandboxUnavailable`, with what to do, if none answers."""

    def __init__(self, namespace: str | None) -> None:
        try:
            from kubernetes.aio import client, config, stream  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise MissingDependency(
                "the Kubernetes backend needs its client: pip install 'clawgym[kubernetes]'"
            ) from None
        self._client, self._config, self._stream = client, config, stream
        self.namespace = namespace or ""

    async def start(self) -> None:
        """Connect, and allow sandboxes no network."""
        # The client read the variable when it was imported.
        given = {"config_file": os.environ["KUBECONFIG"]} if os.environ.get("KUBECONFIG") else {}
        try:
            await self._config.load_config(**given)
        except (self._config.ConfigException, OSError) as error:
            raise SandboxUnavailable(f"no cluster is configured ({error}): set KUBECONFIG, or run in a pod") from None
        self._api = self._client.ApiClient()
        self.core, self.batch = self._client.CoreV1Api(self._api), self._client.BatchV1Api(self._api)
        self._exec_api = self._stream.WsApiClient(heartbeat=30)
        self._exec = self._client.CoreV1Api(self._exec_api)
        self.namespace = self.namespace or _namespace(self._config, given)
        networks = self._client.NetworkingV1Api(self._api)
        wanted = policy()
        try:
            try:
                await networks.create_namespaced_network_policy(self.namespace, wanted)
            except self._client.ApiException as error:
                if error.status != 409:
                    raise
                found = await networks.read_namespaced_network_policy(POLICY, self.namespace)
                if {k: v for k, v in self._api.sanitize_for_serialization(found.spec).items() if v} != wanted["spec"]:
                    raise SandboxUnavailable(
                        f"the NetworkPolicy {POLICY} of namespace {self.namespace} was changed: "
                        f"kubectl delete networkpolicy {POLICY}"
                    ) from None
        except Exception as error:
            if isinstance(error, SandboxUnavailable):
                raise
            raise SandboxUnavailable(
                f"the cluster refuses to make a NetworkPolicy ({_said(error)}): check the cluster and the rights of "
                "this account (docs/how-to/interop/kubernetes.md)"
            ) from None

    async def close(self) -> None:
        """Close the connections."""
        for api in (getattr(self, name, None) for name in ("_api", "_exec_api")):
            if api is not None:
                await api.close()

    # -- pods

    async def launch(self, wanted: Mapping[str, Any]) -> None:
        """Create a job. Raises :class:`SandboxError` or :class:`InfraError` if the cluster refuses it."""
        try:
            await self.batch.create_namespaced_job(self.namespace, dict(wanted))
        except self._client.ApiException as error:
            if error.status in (400, 422):
                raise SandboxError(f"the cluster cannot make a sandbox ({_said(error)}): check its limits") from None
            raise InfraError(f"the cluster refuses a sandbox ({_said(error)}): check its quota and policies") from None

    async def wait_for(self, name: str, container: str) -> str:
        """Wait until ``container`` of the job's pod runs. Returns the name of the pod.

        Raises:
            SandboxError: the image cannot be pulled, or the pod cannot start.
            InfraError: nothing happened for five minutes.
        """
        try:
            async with asyncio.timeout(_START_SECONDS):
                while True:
                    pods = (await self._pods(name)).items
                    if pods and (found := self._ready(pods[0], container)):
                        return found
                    await self._change(name)
        except TimeoutError:
            raise InfraError(
                f"the pod of {name} did not start within {_START_SECONDS:.0f} s: kubectl describe job {name}"
            ) from None

    async def _pods(self, name: str) -> Any:
        return await self.core.list_namespaced_pod(self.namespace, label_selector=f"{LEASE}={name}")

    async def _change(self, name: str) -> None:
        """Wait for the next event of the job's pod, or a second."""
        from kubernetes.aio import watch  # pyright: ignore[reportMissingImports]

        list_pods, selector = self.core.list_namespaced_pod, f"{LEASE}={name}"
        async with watch.Watch().stream(list_pods, self.namespace, label_selector=selector, timeout_seconds=1) as seen:
            seen_before = 0
            async for _ in seen:
                seen_before += 1
                if seen_before > 1:  # the first event is the pod as it is
                    return

    def _ready(self, pod: Any, container: str) -> str:
        status = pod.status
        statuses = [*(status.init_container_statuses or ()), *(status.container_statuses or ())]
        for one in statuses:
            waiting, ended = one.state and one.state.waiting, one.state and one.state.terminated
            if waiting and waiting.reason in ("ErrImagePull", "ImagePullBackOff", "InvalidImageName"):
                raise SandboxError(f"the image cannot be pulled ({waiting.message}): give another image")
            if waiting and waiting.reason in (
                "CreateContainerError",
                "CreateContainerConfigError",
                "RunContainerError",
            ):
                raise SandboxError(f"the container cannot be created ({waiting.message}): give another image")
            if ended and (ended.exit_code or one.name == container):
                raise SandboxError(
                    f"the container {one.name} ended at once ({ended.reason} {ended.message or ended.exit_code}): the "
                    "image needs python3, bash and tar"
                )
            if one.name == container and one.state and one.state.running:
                return pod.metadata.name
        return ""

    async def remove(self, name: str) -> None:
        """Remove a job and its pod at once. Idempotent."""
        await self._delete(self.batch.delete_namespaced_job, name, propagation_policy="Background")
        for pod in (await self._pods(name)).items:
            await self._delete(self.core.delete_namespaced_pod, pod.metadata.name, grace_period_seconds=0)

    async def _delete(self, call: Any, name: str, **how: Any) -> None:
        try:
            await call(name, self.namespace, **how)
        except self._client.ApiException as error:
            if error.status != 404:
                raise InfraError(
                    f"a sandbox could not be removed ({_said(error)}): kubectl delete job {name}"
                ) from None

    async def cause_of_death(self, name: str) -> str:
        """``oom`` or ``died``. Raises :class:`InfraError` if the cluster ended it."""
        for _ in range(20):
            pods = (await self._pods(name)).items
            if not pods or pods[0].metadata.deletion_timestamp or pods[0].status.reason:
                why = pods[0].status.reason if pods else "deleted"
                raise InfraError(f"the cluster ended a sandbox ({why}): see its events (kubectl get events)")
            for one in pods[0].status.container_statuses or ():
                if one.state and one.state.terminated:
                    return "oom" if one.state.terminated.reason == "OOMKilled" else "died"
            await self._change(name)
        return "died"

    # -- programs

    async def execute(self, pod: str, container: str, argv: list[str]) -> Any:
        """Start ``python3 OPTIONS -c TEXT ...`` with stdin, stdout and stderr. Returns the websocket."""
        at = argv.index("-c") + 1
        text = argv[at].encode()
        argv = [*argv[:at], _BEGIN, str(len(text)), *argv[at + 1 :]]
        how = {"stdin": True, "stdout": True, "stderr": True, "tty": False}
        start = self._exec.connect_get_namespaced_pod_exec_without_preload_content
        try:
            websocket = await (await start(pod, self.namespace, command=argv, container=container, **how))
            await websocket.send_bytes(bytes([_STDIN]) + text)
            return websocket
        except Exception as error:
            raise SandboxDied(f"the sandbox is gone ({_said(error)}): create another one", cause="died") from error

    async def run_inside(
        self, name: str, argv: list[str], user: str, stdin: bytes, max_bytes: int, seconds: float, on: str = "sandbox"
    ) -> tuple[int, bytes, str]:
        """Run a program in the container ``on`` of the job ``name``, as the container's user; returns and raises as
        :meth:`clawgym.sandbox.docker.engine.DockerEngine.run_inside` does."""
        del user  # a program has the uid of its container
        pods = (await self._pods(name)).items
        if not pods:
            raise SandboxDied("the sandbox is gone: create another one", cause="died")
        websocket = await self.execute(pods[0].metadata.name, on, argv)
        output, errors, code = bytearray(), bytearray(), None
        try:
            async with asyncio.timeout(seconds):
                for start in range(0, len(stdin), _CHUNK):
                    await websocket.send_bytes(bytes([_STDIN]) + stdin[start : start + _CHUNK])
                async for channel, data in _messages(websocket):
                    if channel == _STDOUT:
                        output += data
                    elif channel == _STDERR:
                        errors = (errors + data)[-300:]
                    elif channel == _STATUS:
                        code = _exit_code(data)
                    if len(output) > max_bytes:
                        raise TreeTooLarge(f"larger than {max_bytes} bytes: take a smaller part")
        except TimeoutError:
            raise SandboxError(f"the sandbox did not answer within {seconds:.0f} s: try again, or close it") from None
        finally:
            await websocket.close()
        if code is None:
            raise SandboxDied("the sandbox is gone: create another one", cause="died")
        return code, bytes(output), errors.decode(errors="replace")


def _exit_code(status: bytes) -> int:
    """The exit code in a ``Status`` of the API."""
    try:
        found = json.loads(status)
        if found.get("status") == "Success":
            return 0
        causes = found["details"]["causes"]
        return int(next(one["message"] for one in causes if one.get("reason") == "ExitCode"))
    except (ValueError, KeyError, TypeError, StopIteration, AttributeError):
        return 1


def _namespace(config: Any, given: Mapping[str, str]) -> str:
    """The namespace of the current context, or of this pod."""
    inside = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"
    if "KUBERNETES_SERVICE_HOST" in os.environ and os.path.exists(inside):
        with open(inside) as file:
            return file.read().strip()
    with contextlib.suppress(config.ConfigException, OSError):
        return config.list_kube_config_contexts(**given)[1]["context"].get("namespace") or "default"
    return "default"


def _said(error: BaseException) -> str:
    """What the API said, in short."""
    body: Any = getattr(error, "body", None)
    with contextlib.suppress(ValueError, TypeError, AttributeError):
        return str(json.loads(body)["message"])[:300]
    return str(error)[:300]
