"""A small server that answers as the API of a Kubernetes cluster does, for what the backend asks of it.

A job has one pod. A container of a pod is a sandbox of the namespace backend in which the container's command runs; the
volumes of an init container are copied into the sandbox of the pod's container, at their mount points. ``exec`` runs
programs there, over a websocket with the subprotocol ``v4.channel.k8s.io``. What the answers contain is what the API
documents, as far as the backend reads it. Users, read-only images, quotas and node failures are not imitated.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import re
import secrets
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from aiohttp import WSMsgType, web

from clawgym.records import Limits, TaskFile
from clawgym.sandbox import Archive, Backend, Sandbox, SandboxSpec
from clawgym.sandbox import backend as make_backend

TOKEN = "secret-of-the-account"
_FOREVER = 1e6
_PIPE = 1 << 20


class Pod:
    """A pod, with the sandbox of its running container."""

    def __init__(self, cluster: FakeCluster, name: str, job: dict[str, Any]) -> None:
        template = job["spec"]["template"]
        self.cluster, self.name, self.spec = cluster, name, template["spec"]
        self.labels = template["metadata"]["labels"]
        self.running: dict[str, Sandbox] = {}
        self.states: dict[str, dict[str, Any]] = {}
        self.reason: str | None = None
        self.task = asyncio.create_task(self._run())

    def as_json(self) -> dict[str, Any]:
        def statuses(kind: str) -> list[dict[str, Any]]:
            waiting = {"waiting": {"reason": "PodInitializing"}}
            return [
                {
                    **{"name": one["name"], "image": one["image"], "imageID": "", "ready": False, "restartCount": 0},
                    "state": self.states.get(one["name"], waiting),
                }
                for one in self.spec[kind]
            ]

        state = self.states.get("sandbox", {})
        phase = "Running" if "running" in state else "Succeeded" if "terminated" in state else "Pending"
        return {
            "metadata": {"name": self.name, "namespace": "tests", "labels": self.labels, "uid": self.name},
            "spec": {"containers": [{"name": one["name"]} for one in self.spec["containers"]]},
            "status": {
                "phase": phase,
                **({"reason": self.reason} if self.reason else {}),
                "initContainerStatuses": statuses("initContainers"),
                "containerStatuses": statuses("containers"),
            },
        }

    async def _run(self) -> None:
        volumes: dict[str, bytes] = {}
        (prepare,), (main,) = self.spec["initContainers"], self.spec["containers"]
        code, sandbox = await self._container(prepare, SandboxSpec())
        if code == 0:
            for mount in prepare["volumeMounts"]:
                volumes[mount["name"]] = (await sandbox.get_archive(mount["mountPath"])).tar
        await sandbox.close()
        if code:
            return
        limits = main["resources"]["limits"]
        room = int(self.spec["volumes"][0]["emptyDir"]["sizeLimit"].removesuffix("Mi"))
        spec = SandboxSpec(
            limits=Limits(
                memory_mb=int(limits["memory"].removesuffix("Mi")) - room,
                cpus=float(limits["cpu"]),
                disk_mb=room,
                pids=4096,
                file_mb=2**22,
            ),
            env={
                "KUBERNETES_SERVICE_HOST": "127.0.0.1",
                "KUBERNETES_SERVICE_PORT": "6443",
                **{one["name"]: one["value"] for one in main["env"]},
            },
            readonly={
                mount["mountPath"]: tuple(_files(volumes[mount["name"]]))
                for mount in main["volumeMounts"]
                if mount["readOnly"]
            },
            workdir="/",
        )
        writable = {m["mountPath"]: volumes[m["name"]] for m in main["volumeMounts"] if not m["readOnly"]}
        await self._container(main, spec, writable)

    async def _container(
        self, container: dict[str, Any], spec: SandboxSpec, writable: dict[str, bytes] | None = None
    ) -> tuple[int, Sandbox]:
        name = container["name"]
        sandbox = await self.cluster.backend.create(spec)
        for mount in container["volumeMounts"]:
            await sandbox.exec(["mkdir", "-p", mount["mountPath"]])
        for folder, tar in (writable or {}).items():
            await sandbox.put_archive(Archive(tar), folder)
        if self.cluster.open_network:
            await sandbox.listen(6443)
        self.running[name] = sandbox
        self.states[name] = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
        self.cluster.changed(self)
        ended = {"exitCode": 137, "reason": "Error"}
        try:
            done = await sandbox.exec(container["command"], cwd="/", timeout=_FOREVER)
            ended = {"exitCode": done.exit_code, "reason": "Error" if done.exit_code else "Completed"}
            if done.exit_code:
                ended["message"] = done.text[-300:]
        except Exception as error:
            if getattr(error, "cause", "") == "oom":
                ended["reason"] = "OOMKilled"
        finally:
            self.running.pop(name, None)
            self.states[name] = {"terminated": ended}
            self.cluster.changed(self)
            if name == "sandbox":
                await asyncio.shield(asyncio.ensure_future(sandbox.close()))
        return int(ended["exitCode"]), sandbox

    async def remove(self) -> None:
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await self.task
        for sandbox in list(self.running.values()):
            await sandbox.close()


def _files(tar: bytes) -> Iterator[TaskFile]:
    with tarfile.open(fileobj=io.BytesIO(tar)) as members:
        for member in members:
            if member.isreg() and (held := members.extractfile(member)) is not None:
                yield TaskFile(member.name, held.read(), executable=bool(member.mode & 0o100))


class FakeCluster:
    """The server. ``requests`` has what was asked, ``jobs`` what was created and not deleted."""

    def __init__(self) -> None:
        self.jobs: dict[str, dict[str, Any]] = {}
        self.created: list[dict[str, Any]] = []
        self.pods: dict[str, Pod] = {}
        self.policies: dict[str, dict[str, Any]] = {}
        self.refusal: tuple[int, str] | None = None
        """Status and message that the next job is refused with."""
        self.open_network = False
        """Whether pods reach the cluster's API, as without a plugin that enforces the NetworkPolicy."""
        self.backend: Backend
        self._watchers: set[asyncio.Queue[dict[str, Any]]] = set()
        self.port = 0
        self.backend_loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def start(self) -> None:
        self._thread.start()
        assert self._ready.wait(60)

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self.backend_loop).result(60)
        self.backend_loop.call_soon_threadsafe(self.backend_loop.stop)
        self._thread.join(60)

    def kubeconfig(self, path: Path) -> Path:
        """Write a configuration that leads here."""
        cluster = {"name": "c", "cluster": {"server": f"http://127.0.0.1:{self.port}"}}
        context = {"name": "x", "context": {"cluster": "c", "user": "u", "namespace": "tests"}}
        user = {"name": "u", "user": {"token": TOKEN}}
        about = {"apiVersion": "v1", "kind": "Config", "current-context": "x"}
        path.write_text(json.dumps({**about, "clusters": [cluster], "contexts": [context], "users": [user]}))
        return path

    def changed(self, pod: Pod) -> None:
        for queue in self._watchers:
            queue.put_nowait({"type": "MODIFIED", "object": pod.as_json()})

    def _serve(self) -> None:
        asyncio.set_event_loop(self.backend_loop)
        self.backend_loop.run_until_complete(self._begin())
        self.backend_loop.run_forever()

    async def _begin(self) -> None:
        self.backend = make_backend("namespace")
        await self.backend.probe()
        app = web.Application(middlewares=[self._authenticated])
        space = "/namespaces/tests"
        policies = f"/apis/networking.k8s.io/v1{space}/networkpolicies"
        app.add_routes(
            [
                web.post(policies, self._post_policy),
                web.get(policies + "/{name}", self._get_policy),
                web.post(f"/apis/batch/v1{space}/jobs", self._post_job),
                web.delete(f"/apis/batch/v1{space}/jobs/{{name}}", self._delete_job),
                web.get(f"/api/v1{space}/pods", self._get_pods),
                web.delete(f"/api/v1{space}/pods/{{name}}", self._delete_pod),
                web.get(f"/api/v1{space}/pods/{{name}}/exec", self._exec),
            ]
        )
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.port = self._runner.addresses[0][1]
        self._ready.set()

    async def _end(self) -> None:
        for pod in list(self.pods.values()):
            await pod.remove()
        await self._runner.cleanup()
        await self.backend.aclose()

    @web.middleware
    async def _authenticated(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return _refused(401, "Unauthorized")
        return await handler(request)

    # -- objects

    async def _post_policy(self, request: web.Request) -> web.Response:
        body = await request.json()
        name = body["metadata"]["name"]
        if name in self.policies:
            return _refused(409, f'networkpolicies "{name}" already exists')
        self.policies[name] = body
        return web.json_response(body, status=201)

    async def _get_policy(self, request: web.Request) -> web.Response:
        return web.json_response(self.policies[request.match_info["name"]])

    async def _post_job(self, request: web.Request) -> web.Response:
        body = await request.json()
        if self.refusal is not None:
            refusal, self.refusal = self.refusal, None
            return _refused(*refusal)
        assert "clawgym-sandboxes" in self.policies, "a pod starts before the policy"
        name = body["metadata"]["name"]
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", name)
        self.jobs[name] = body
        self.created.append(body)
        self.pods[f"{name}-x7k2p"] = Pod(self, f"{name}-x7k2p", body)
        return web.json_response(body, status=201)

    async def _delete_job(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if self.jobs.pop(name, None) is None:
            return _refused(404, f'jobs.batch "{name}" not found')
        assert request.query.get("propagationPolicy") == "Background", "its pod would stay"
        await self._drop(f"{name}-x7k2p")
        return web.json_response({"kind": "Status", "status": "Success"})

    async def _delete_pod(self, request: web.Request) -> web.Response:
        if request.match_info["name"] not in self.pods:
            return _refused(404, "pods not found")
        await self._drop(request.match_info["name"])
        return web.json_response({"metadata": {"name": request.match_info["name"]}})

    async def _drop(self, name: str) -> None:
        pod = self.pods.pop(name, None)
        if pod is not None:
            await pod.remove()

    async def _get_pods(self, request: web.Request) -> web.StreamResponse:
        key, _, value = request.query["labelSelector"].partition("=")
        found = [pod.as_json() for pod in self.pods.values() if pod.labels.get(key) == value]
        if request.query.get("watch") not in ("true", "True", "1"):
            about = {"apiVersion": "v1", "kind": "PodList", "metadata": {"resourceVersion": "1"}}
            return web.json_response({**about, "items": found})
        answer = web.StreamResponse(headers={"Content-Type": "application/json"})
        await answer.prepare(request)
        queue: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._watchers.add(queue)
        try:
            for pod in found:
                await answer.write(json.dumps({"type": "ADDED", "object": pod}).encode() + b"\n")
            async with asyncio.timeout(float(request.query.get("timeoutSeconds", "60"))):
                while True:
                    event = await queue.get()
                    if event["object"]["metadata"]["labels"].get(key) == value:
                        await answer.write(json.dumps(event).encode() + b"\n")
        except (TimeoutError, ConnectionError):
            pass
        finally:
            self._watchers.discard(queue)
        return answer

    # -- programs

    async def _exec(self, request: web.Request) -> web.StreamResponse:
        pod = self.pods.get(request.match_info["name"])
        sandbox = pod.running.get(request.query["container"]) if pod is not None else None
        if sandbox is None:
            return _refused(404, "container not found")
        argv = request.query.getall("command")
        assert request.query["stdin"].lower() == request.query["stdout"].lower() == "true"
        socket = web.WebSocketResponse(protocols=("v5.channel.k8s.io", "v4.channel.k8s.io"), max_msg_size=0)
        await socket.prepare(request)
        assert socket.ws_protocol == "v4.channel.k8s.io"
        await _bridged(sandbox, argv, socket)
        return socket


async def _bridged(sandbox: Sandbox, argv: list[str], socket: web.WebSocketResponse) -> None:
    """Run a program whose streams are those of ``socket``.

    A sandbox's own ``exec`` has no live streams, so the program connects to two sockets that listen in the sandbox.
    """
    port = 20_000 + secrets.randbelow(20_000)
    listening = await sandbox.listen(port)
    loop = asyncio.get_running_loop()
    begin = (
        "import os, socket, sys\n"
        f"parts = [socket.create_connection(('127.0.0.1', {port})) for _ in range(2)]\n"
        "for part, place in ((parts[0], 0), (parts[0], 1), (parts[1], 2)): os.dup2(part.fileno(), place)\n"
        "[part.close() for part in parts]\n"
        "os.execvp(sys.argv[1], sys.argv[1:])"
    )
    program = asyncio.create_task(sandbox.exec(["python3", "-I", "-S", "-c", begin, *argv], cwd="/", timeout=_FOREVER))
    stdio, _ = await loop.sock_accept(listening)
    errors, _ = await loop.sock_accept(listening)
    for one in (stdio, errors):
        one.setblocking(False)

    async def out(source: Any, channel: int) -> None:
        with contextlib.suppress(OSError):
            while data := await loop.sock_recv(source, 1 << 15):
                await socket.send_bytes(bytes([channel]) + data)

    async def into() -> None:
        async for message in socket:
            if message.type == WSMsgType.BINARY and message.data[:1] == b"\0":
                with contextlib.suppress(OSError):
                    await loop.sock_sendall(stdio, message.data[1:])
        with contextlib.suppress(OSError):
            stdio.shutdown(1)  # the program's stdin ends with the connection

    reading = asyncio.create_task(into())
    await asyncio.gather(out(stdio, 1), out(errors, 2))
    for one in (stdio, errors, listening):
        one.close()
    status: dict[str, Any] = {"metadata": {}, "status": "Success"}
    try:
        code = (await program).exit_code
        if code:
            causes = [{"reason": "ExitCode", "message": str(code)}]
            status = {"metadata": {}, "status": "Failure", "reason": "NonZeroExitCode", "details": {"causes": causes}}
    except Exception as error:
        status = {"metadata": {}, "status": "Failure", "reason": "InternalError", "message": str(error)}
    with contextlib.suppress(ConnectionError):
        await socket.send_bytes(b"\3" + json.dumps(status).encode())
    reading.cancel()
    await socket.close()


def _refused(status: int, message: str) -> web.Response:
    about = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": status}
    return web.json_response({**about, "message": message}, status=status)
