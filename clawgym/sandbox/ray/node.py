"""One node of the cluster, from the owner's side: its actor, its sandboxes, and whether it is alive."""

from __future__ import annotations

import asyncio
from importlib import metadata
from typing import Any

from clawgym.errors import ClawGymError, InfraError, SandboxUnavailable
from clawgym.sandbox.protocol import Isolation
from clawgym.sandbox.ray.host import SandboxHost, Vitals

__all__ = ["RayNode"]

_AT_ONCE = 100_000
"""Most concurrent calls of one actor; most of them wait for a command or for bytes of a stream."""
_START_SECONDS = 120.0


class RayNode:
    """A node; :meth:`start` starts its actor, :meth:`call` works until :attr:`lost` is set."""

    def __init__(self, about: dict[str, Any]) -> None:
        self.id: str = about["NodeID"]
        self.name: str = about["NodeName"]
        resources = about["Resources"]
        self.cpus: float = resources["CPU"]
        self.memory_mb: float = resources.get("memory", float("inf")) / 2**20
        """Memory of the node, as configured in Ray."""
        self.vitals = Vitals(self.memory_mb, 0.0)
        self.isolation: Isolation | None = None
        self.sandboxes = 0
        """Number of sandboxes of this owner, including those being started."""
        self.layers: dict[str, asyncio.Task[None]] = {}
        self.lost: str | None = None
        """Why the node cannot be used any more."""
        self._actor: Any = None

    async def start(self, backend: str) -> None:
        """Start the actor and probe the node.

        Raises:
            SandboxUnavailable: this node cannot run sandboxes.
            InfraError: the node failed.
        """
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self._actor = (
            ray.remote(SandboxHost)
            .options(
                num_cpus=0,
                max_concurrency=_AT_ONCE,
                scheduling_strategy=NodeAffinitySchedulingStrategy(self.id, soft=False),
                # Ray would kill the supervisor together with the actor, and nothing would clean up the sandboxes.
                runtime_env={"env_vars": {"RAY_kill_child_processes_on_worker_exit": "0"}},
            )
            .remote(backend)
        )
        try:
            async with asyncio.timeout(_START_SECONDS):
                host, version, self.isolation = await self.call("probe")
        except TimeoutError:
            raise SandboxUnavailable(
                f"node {self.name}: nothing started within {_START_SECONDS:g} s: see Ray's logs there"
            ) from None
        if version != (ours := metadata.version("clawgym")):
            raise SandboxUnavailable(
                f"node {host} has ClawGym {version}, this is {ours}: install the same on every node"
            )

    async def call(self, what: str, *args: Any, **more: Any) -> Any:
        """Call a method of the actor. Raises errors of this library unchanged, and :class:`InfraError` for all
        others."""
        from ray import exceptions

        if self.lost is not None:
            raise self._gone()
        reference = None
        try:
            reference = getattr(self._actor, what).remote(*args, **more)
            return await reference
        except asyncio.CancelledError:
            if reference is not None and self.lost is None:
                self._cancel(reference)
            raise
        except exceptions.RayTaskError as error:
            if isinstance(error.cause, ClawGymError):
                raise error.cause from None
            last = str(error).strip().splitlines()[-1]
            raise InfraError(f"node {self.name}: {what} failed ({last}): see Ray's logs there") from error
        except exceptions.RayActorError as error:
            self.lose(" ".join(str(error).split())[:300])
            raise self._gone() from error
        except exceptions.RayError as error:
            last = " ".join(str(error).split())[:300]
            raise InfraError(f"node {self.name}: {what} failed ({last}): run the same command again") from error

    def _cancel(self, reference: Any) -> None:
        import ray

        try:
            ray.cancel(reference)
        except Exception:  # the call has ended, or the node is gone
            pass

    def _gone(self) -> InfraError:
        return InfraError(
            f"node {self.name} was lost with its sandboxes ({self.lost}): what ran there is run again on the others"
        )

    def lose(self, why: str) -> None:
        """Mark the node as lost, and end what may be left of its actor."""
        if self.lost is None:
            self.lost = why
            self.end()

    def end(self) -> None:
        """Kill the actor; its supervisor cleans up."""
        import ray

        if self._actor is not None and ray.is_initialized():
            try:
                ray.kill(self._actor)
            except Exception:  # gone already
                pass

    async def look(self) -> None:
        """Update the vitals. A node that does not answer is not lost: Ray decides that."""
        try:
            async with asyncio.timeout(10):
                self.vitals = await self.call("vitals")
        except (TimeoutError, InfraError):
            pass

    async def aclose(self) -> None:
        if self.lost is None:
            try:
                async with asyncio.timeout(60):
                    await self.call("aclose")
            except (TimeoutError, InfraError):
                pass
            self.lose("its owner has closed it")
