"""Sandboxes on the nodes of a Ray cluster, each made by a local backend there.

Every node that has CPUs gets one actor (:mod:`clawgym.sandbox.ray.host`), owned by this process; it ends with this
process, and its sandboxes with it. When a node is lost, all present and later calls on its sandboxes raise
:class:`~clawgym.errors.InfraError`, so their episodes are tried again on the remaining nodes. Nodes that join later are
used. ClawGym itself opens no port and sends no secret: everything uses Ray's own connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import socket
from collections.abc import Mapping
from typing import Any

from clawgym.errors import InfraError, MissingDependency, SandboxError, SandboxUnavailable
from clawgym.registry import sandboxes
from clawgym.sandbox import shared_folders
from clawgym.sandbox.link import close_late
from clawgym.sandbox.machine import Machine
from clawgym.sandbox.probe import Probed
from clawgym.sandbox.protocol import Isolation, Sandbox, SandboxSpec, Snapshot
from clawgym.sandbox.ray.host import OpenedSandbox
from clawgym.sandbox.ray.layers import Parcels
from clawgym.sandbox.ray.node import RayNode
from clawgym.sandbox.ray.sandbox import RaySandbox, held

__all__ = ["RayBackend"]

_logger = logging.getLogger("clawgym.sandbox")
_LOOK_SECONDS = 2.0
"""Interval at which the list of nodes and their load are updated."""
_NO_CLUSTER = (
    "no Ray cluster was named: start one (`ray start --head`, docs/how-to/many-machines.md) and set RAY_ADDRESS to its "
    "address, or call ray.init() first; for this machine alone use backend='namespace'"
)


@sandboxes.register("ray")
class RayBackend(Probed):
    """Sandboxes on the nodes of a Ray cluster.

    See :class:`~clawgym.sandbox.protocol.Backend`. One for each event loop.

    Args:
        on: the backend that makes the sandboxes on a node.
    """

    def __init__(self, on: str = "namespace") -> None:
        self.name = "ray" if on == "namespace" else f"ray:{on}"
        self.sandboxes: dict[str, RaySandbox] = {}
        self._on = on
        self._nodes: dict[str, RayNode] = {}
        self._unfit: dict[str, str] = {}
        """Node id -> why it has no sandboxes."""
        self._failed = ""
        self._hiring: dict[str, asyncio.Task[None]] = {}
        self._started: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None

    # -- starting

    async def _start(self) -> None:
        if self._started is None:
            self._started = asyncio.create_task(self._start_once())
        await asyncio.shield(self._started)

    async def _start_once(self) -> None:
        await asyncio.to_thread(_join_cluster)
        import ray

        self._parcels = Parcels(ray.put)
        await self._see_nodes()
        await asyncio.gather(*self._hiring.values())
        if not self._nodes:
            why = next(iter(self._unfit.values()), self._failed)
            raise SandboxUnavailable(why or "the cluster has no node with CPUs: add one")
        self._isolation = _weakest(self.name, {node.name: node.isolation for node in self._nodes.values()})
        self._watching = asyncio.create_task(self._watch())

    async def _see_nodes(self) -> None:
        """Hire new nodes and drop dead ones."""
        import ray

        about = {row["NodeID"]: row for row in await asyncio.to_thread(ray.nodes)}
        alive = {name: row for name, row in about.items() if row["Alive"] and row["Resources"].get("CPU")}
        for name, node in self._nodes.items():
            if name not in alive:
                node.lose("Ray says that it is dead")
        self._nodes = {name: node for name, node in self._nodes.items() if node.lost is None}
        for name, row in alive.items():
            if name not in self._nodes and name not in self._hiring and name not in self._unfit:
                self._hiring[name] = asyncio.create_task(self._hire(RayNode(row)))

    async def _hire(self, node: RayNode) -> None:
        try:
            await node.start(self._on)
            assert node.isolation is not None
            if self._isolation is not None:
                worse = [name for name, has in self._isolation.features.items() if has > node.isolation.features[name]]
                if worse:  # the run manifest promises more
                    raise SandboxUnavailable(
                        f"node {node.name} isolates less than the others ({', '.join(worse)}): run "
                        "`clawgym doctor` there"
                    )
            self._nodes[node.id] = node
        except SandboxUnavailable as error:
            self._unfit[node.id] = str(error)
            _logger.warning("no sandboxes on node %s: %s", node.name, error)
            node.end()
        except InfraError as error:  # the node or its actor failed: tried again
            self._failed = str(error)
            _logger.warning("no sandboxes on node %s: %s", node.name, error)
            node.end()
        except asyncio.CancelledError:
            node.end()
            raise
        finally:
            del self._hiring[node.id]

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            with contextlib.suppress(Exception):  # the head node does not answer at the moment
                await self._see_nodes()
            await asyncio.gather(*(node.look() for node in self._nodes.values()))

    async def probe(self) -> Isolation:
        await self._start()
        return self.isolation

    def machine(self) -> Machine:
        """All nodes as one machine; evaluations derive their number of concurrent episodes from it."""

        def memory() -> float:
            return sum(min(node.memory_mb, node.vitals.memory_mb) for node in self._nodes.values())

        def load() -> float:
            busy = [(node.cpus, node.vitals.load) for node in self._nodes.values()]
            return sum(cpus * load for cpus, load in busy) / max(1.0, sum(cpus for cpus, _ in busy))

        return Machine(max(1, int(sum(node.cpus for node in self._nodes.values()))), memory, load)

    # -- sandboxes

    def _place(self, spec: SandboxSpec) -> RayNode:
        """The node with the fewest sandboxes per CPU, preferring nodes with enough memory left."""
        nodes = [node for node in self._nodes.values() if node.lost is None]
        if not nodes:
            raise InfraError("no node is left: start nodes (`ray start --address ...`), and run the same command again")
        wanted = spec.limits.memory_mb
        return min(nodes, key=lambda node: (node.vitals.memory_mb < wanted, (node.sandboxes + 1) / node.cpus, node.id))

    async def create(self, spec: SandboxSpec) -> Sandbox:
        await self._start()
        if spec.join_network_of is None:
            node = self._place(spec)
        elif isinstance(spec.join_network_of, RaySandbox) and isinstance(spec.join_network_of.node, RayNode):
            node = spec.join_network_of.node
        else:
            raise SandboxError("only the network of a sandbox of the same backend can be joined: create both with one")
        return await self._create(node, spec, "create")

    async def fork(self, snapshot: Snapshot, spec: SandboxSpec | None = None) -> Sandbox:
        await self._start()
        if snapshot.backend != self.name or not isinstance(snapshot.handle, RayNode):
            raise SandboxError("this snapshot was dropped or belongs to another backend: take a new one")
        return await self._create(snapshot.handle, spec or snapshot.spec, "fork", snapshot.id)

    async def _create(self, node: RayNode, spec: SandboxSpec, how: str, *which: str) -> RaySandbox:
        task = asyncio.ensure_future(self._open(node, spec, how, *which))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(close_late)
            raise

    async def _open(self, node: RayNode, spec: SandboxSpec, how: str, *which: str) -> RaySandbox:
        node.sandboxes += 1
        try:
            sources = await asyncio.to_thread(shared_folders.checked, spec)
            sent = await asyncio.gather(*(self._parcels.deliver(source, node) for source in sources.values()))
            readonly = await asyncio.to_thread(_readonly, spec)
            there = dataclasses.replace(spec, readonly=readonly, join_network_of=None, mounts={})
            joined = spec.join_network_of.id if spec.join_network_of is not None else None
            layers = dict(zip(sources, sent, strict=True))
            opened: OpenedSandbox = await node.call(how, *which, there, joined, layers)
        except BaseException:
            node.sandboxes -= 1
            raise

        def forget(name: str) -> None:
            node.sandboxes -= 1
            self.sandboxes.pop(name, None)

        sandbox = self.sandboxes[opened.id] = RaySandbox(node, opened, spec, self.isolation, forget)
        return sandbox

    async def drop(self, snapshot: Snapshot) -> None:
        if isinstance(snapshot.handle, RayNode):
            with contextlib.suppress(InfraError):  # it is gone with its node
                await snapshot.handle.call("drop", snapshot.id)

    async def aclose(self) -> None:
        tasks = [task for task in (self._watching, *self._hiring.values()) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(sandbox.close() for sandbox in list(self.sandboxes.values())), return_exceptions=True)
        await asyncio.gather(*(node.aclose() for node in self._nodes.values()))
        self._nodes = {}


def _join_cluster() -> None:
    """Connect this process to the cluster that the user named."""
    try:
        import ray
    except ImportError:
        raise MissingDependency("the ray backend needs Ray: pip install 'clawgym[ray]'") from None
    if ray.is_initialized():
        return
    address = os.environ.get("RAY_ADDRESS")
    if not address:
        raise SandboxUnavailable(_NO_CLUSTER)
    try:
        host, _, port = address.rpartition(":")
        if port.isdigit():
            socket.create_connection((host.strip("[]"), int(port)), 10).close()  # Ray would wait for a minute
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError) as error:
        text = " ".join(str(error).split())[:300]
        raise SandboxUnavailable(
            f"no Ray cluster answers at RAY_ADDRESS={address} ({text}): compare it with what `ray start` printed"
        ) from error


def _readonly(spec: SandboxSpec) -> Mapping[str, Any]:
    return {folder: held(files) for folder, files in spec.readonly.items()}


def _weakest(name: str, found: Mapping[str, Isolation | None]) -> Isolation:
    """What holds on every node; a note is added if nodes differ."""
    all_of = {node: isolation for node, isolation in found.items() if isolation is not None}
    tiers = {node: isolation.tier for node, isolation in all_of.items()}
    worst = min(all_of.values(), key=lambda isolation: (sum(isolation.features.values()), isolation.tier))
    features = {key: all(one.features.get(key, False) for one in all_of.values()) for key in worst.features}
    notes = list(dict.fromkeys(note for isolation in all_of.values() for note in isolation.notes))
    if len({(isolation.tier, tuple(isolation.features.items())) for isolation in all_of.values()}) > 1:
        each = ", ".join(f"{node}: {tier}" for node, tier in sorted(tiers.items()))
        notes.append(f"nodes differ, and this is what holds on all of them ({each})")
    return Isolation(name, worst.tier, features, tuple(notes))
