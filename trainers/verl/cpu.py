"""verl on plain CPUs: a platform, rollout servers made of our engine, and how weights reach servers that stand apart.

verl has no such platform, and its rollout engines want GPUs. With this module a laptop and the tests run its trainer as
it is, through the three registries that it has for the purpose; nothing of verl is changed. It is imported by every
process of a run, by ``VERL_USE_EXTERNAL_MODULES``, where ``VERL_PLATFORM`` is ``cpu``, and not at all on GPUs.

Invariants: a request is sampled by one version of the weights; an aborted one gives back what it has.
"""

# What verl's classes say of themselves does not hold (methods that return None by their types, and are awaited):
# pyright: reportIncompatibleMethodOverride=false, reportAssignmentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import asyncio
import contextlib
import os
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import numpy as np
import ray
import torch
from transformers import AutoModelForCausalLM
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry
from verl.workers.rollout.base import _ROLLOUT_REGISTRY, BaseRollout
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput
from verl.workers.rollout.utils import ensure_async_iterator

from clawgym.engines import GenerateRequest, Sampling, TransformersEngine
from clawgym.engines.folders import load_weights
from clawgym.rewards.scoring import TorchScorer

__all__ = ["ENGINE", "SHIPPED"]

ENGINE = "transformers"
"""``actor_rollout_ref.rollout.name`` of our servers."""
SHIPPED = "clawgym_ray"
"""``checkpoint_engine.backend`` that ships weights through Ray."""
_PIECE = 256 << 20
"""Bytes of weights in one message."""


def _device_module() -> ModuleType:
    """``torch.cpu`` with what is asked of ``torch.cuda``: no memory of its own, nothing to wait for."""
    module = ModuleType("clawgym_cpu")
    for name in dir(torch.cpu):
        if not name.startswith("__"):
            setattr(module, name, getattr(torch.cpu, name))
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
        setattr(module, name, lambda *_, **__: 0)
    for name in ("empty_cache", "synchronize", "reset_peak_memory_stats", "ipc_collect"):
        setattr(module, name, lambda *_, **__: None)
    given: Mapping[str, Any] = {
        "is_available": lambda: False,
        "mem_get_info": lambda *_: (0, 0),
        "get_device_name": lambda *_: "CPU",
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "set_rng_state": lambda state, *_: torch.set_rng_state(state),
        "manual_seed": torch.manual_seed,
        "manual_seed_all": torch.manual_seed,
    }
    for name, value in given.items():
        setattr(module, name, value)
    return module


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    """Ranks are processes; Ray counts them as GPUs that do not exist, since verl counts nothing else."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _device_module()

    def is_available(self) -> bool:
        return True

    def current_device(self) -> str:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        # verl would begin the group with "cpu:gloo,cpu:gloo", which torch refuses. It asks for this name just before,
        # and begins nothing where a group is there already.
        group = torch.distributed
        if os.environ.get("WG_BACKEND") == "ray" and not group.is_initialized():
            rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            group.init_process_group("cpu:gloo", rank=rank, world_size=size, timeout=timedelta(minutes=10))
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None


class CpuServer:
    """An actor with an engine: ids in, ids and log-probs out. Its methods are those that verl calls."""

    def __init__(self, model: str, threads: int) -> None:
        self._engine = TransformersEngine(model, dtype="float32", threads=threads)
        self._open = asyncio.Event()
        self._open.set()
        self._aborted = asyncio.Event()
        self._coming: dict[str, torch.Tensor] = {}
        self._weights: Mapping[str, torch.Tensor] = {}
        self._model = model
        self._reading = asyncio.Lock()
        self._reader: Any = None

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling_params: Mapping[str, Any], **_: Any
    ) -> TokenOutput:
        """Sample; what was sampled until then if it is aborted. With ``prompt_logprobs`` only read the prompt."""
        await self._open.wait()
        if sampling_params.get("prompt_logprobs") is not None:
            return await self._read(prompt_ids, sampling_params["prompt_logprobs"])
        asked = Sampling(
            temperature=sampling_params.get("temperature"),
            top_p=sampling_params.get("top_p"),
            top_k=max(0, sampling_params.get("top_k") or 0),
            max_tokens=sampling_params.get("max_tokens"),
            seed=sampling_params.get("seed"),
        )
        stops = frozenset(sampling_params.get("stop_token_ids") or ())
        ids: list[int] = []
        logprobs: list[float] = []
        version, reason = self._engine.policy_version, "aborted"
        stream = cast("Any", self._engine.generate(GenerateRequest(prompt_ids, asked, stops)))
        aborted = asyncio.ensure_future(self._aborted.wait())
        async with contextlib.aclosing(stream):
            while True:
                piece = asyncio.ensure_future(anext(stream, None))
                await asyncio.wait({piece, aborted}, return_when=asyncio.FIRST_COMPLETED)
                if not piece.done():
                    piece.cancel()
                    await asyncio.gather(piece, return_exceptions=True)
                    break
                tokens = piece.result()
                if tokens is None:
                    break
                ids += tokens.ids
                logprobs += tokens.logprobs
                version = tokens.policy_version
                if tokens.finish_reason is not None:
                    reason = "length" if tokens.finish_reason == "length" else "completed"
                    break
        aborted.cancel()
        return TokenOutput(
            token_ids=ids,
            log_probs=logprobs if sampling_params.get("logprobs") else None,
            stop_reason=reason,
            num_preempted=0,
            extra_fields={"global_steps": version},
        )

    async def _read(self, ids: list[int], top_k: int) -> TokenOutput:
        """What the model gives to each id after the first, as verl's servers say it: one place before the id, and a
        filler at the end."""
        async with self._reading:
            if self._reader is None:  # the engine's own model is nobody else's to run
                self._reader = load_weights(AutoModelForCausalLM, Path(self._model), dtype=torch.float32)
                self._reader.load_state_dict(self._weights, strict=False)
            scored = await TorchScorer(self._reader).score(ids[:1], ids[1:], top_k=top_k)
            version = self._engine.policy_version
        read, said = (scored.top_ids, scored.top_logprobs) if top_k else (ids[1:], scored.logprobs)
        shape, filler = (len(ids) - 1, max(1, top_k)), [[0] * max(1, top_k)]
        fields = {
            "prompt_ids": np.reshape(read, shape).tolist() + filler,
            "prompt_logprobs": np.reshape(said, shape).tolist() + filler,
            "global_steps": version,
        }
        return TokenOutput(token_ids=[], log_probs=[], stop_reason="completed", num_preempted=0, extra_fields=fields)

    async def load(self, piece: Mapping[str, torch.Tensor], version: int | None) -> None:
        """A part of the weights; with ``version`` the last one, by which is sampled from now on."""
        self._coming.update(piece)
        if version is not None:
            async with self._reading:
                self._weights, self._coming = self._coming, {}
                await self._engine.update_weights(self._weights, version)
                if self._reader is not None:
                    self._reader.load_state_dict(self._weights, strict=False)

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        """End what runs; what comes waits."""
        self._open.clear()
        self._aborted.set()

    async def resume_generation(self) -> None:
        """Let them in again."""
        self._aborted.clear()
        self._open.set()

    async def address(self) -> str:
        """The name that requests are balanced by: nobody connects there."""
        return f"actor:{ray.get_runtime_context().get_actor_id()}"

    async def nothing(self, *_: Any, **__: Any) -> None:
        """There is no memory to give back, and no profile to take."""

    wake_up = sleep = clear_kv_cache = release_kv_cache = resume_kv_cache = start_profile = stop_profile = nothing


def _name(replica: int) -> str:
    return f"clawgym_server_{replica}"


class Replica(RolloutReplica):
    """One :class:`CpuServer`."""

    async def launch_servers(self) -> None:
        model: Any = self.model_config
        # The environment of a worker that verl starts would name ranks that are not this one's.
        actor: Any = ray.remote(CpuServer).options(
            name=_name(self.replica_rank), num_cpus=0, max_concurrency=self.max_concurrency
        )
        server = actor.remote(str(model["path"]), int(os.environ.get("OMP_NUM_THREADS", "1")))
        self.servers = [server]
        self._server_handle = server
        self._server_address = await server.address.remote()


class Weights(BaseRollout):
    """In a process that has weights: gives them to the server of its replica."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        super().__init__(config, model_config, device_mesh)
        rank = int(os.environ["RANK"])
        size = config.tensor_model_parallel_size * config.data_parallel_size * config.pipeline_model_parallel_size
        self.replica_rank = rank // size if replica_rank == -1 else replica_rank
        self.is_leader_rank = rank % size == 0

    async def resume(self, tags: list[str]) -> None: ...

    async def release(self) -> None: ...

    async def update_weights(self, weights: Any, global_steps: int | None = None, **_: Any) -> None:
        """Every rank takes all of them, since each is put together from the shards of all; the first one sends."""
        version = 0 if global_steps is None else global_steps
        server: Any = ray.get_actor(_name(self.replica_rank)) if self.is_leader_rank else None
        piece: dict[str, torch.Tensor] = {}
        async for name, tensor in ensure_async_iterator(weights):
            if server is None:
                continue
            piece[name] = tensor.detach().to("cpu", torch.float32).clone()
            if sum(t.nbytes for t in piece.values()) > _PIECE:
                await server.load.remote(piece, None)
                piece = {}
        if server is not None:
            await server.load.remote(piece, version)


RolloutReplicaRegistry.register(ENGINE, lambda: Replica)
_ROLLOUT_REGISTRY[ENGINE, "async"] = f"{__name__}.Weights"


class _Mailbox:
    """Keeps what is put in, in its order, for any number of readers."""

    def __init__(self) -> None:
        self._held: list[tuple[int, list[Any], bool]] = []
        self._news = asyncio.Condition()

    async def put(self, sending: int, items: list[tuple[str, torch.Tensor]], last: bool) -> None:
        async with self._news:
            self._held = [one for one in self._held if one[0] == sending]
            self._held.append((sending, items, last))
            self._news.notify_all()

    async def get(self, sending: int, number: int) -> tuple[list[tuple[str, torch.Tensor]], bool]:
        def there() -> bool:
            return sum(one[0] == sending for one in self._held) > number

        async with self._news:
            await self._news.wait_for(there)
            return [one for one in self._held if one[0] == sending][number][1:]


@CheckpointEngineRegistry.register(SHIPPED)
class ShippedWeights(CheckpointEngine):
    """Weights for servers that stand apart, through one actor that lives as long as the run."""

    def __init__(self, bucket_size: int, is_master: bool = False, **_: Any) -> None:
        self._most = bucket_size
        self._is_master = is_master
        self._box: Any = None
        self._name = ""
        self._rank = -1
        self._sent = 0

    def prepare(self) -> Mapping[str, str | None]:
        """The name of the mailbox, from the one who has it."""
        if self._is_master and self._box is None:
            self._name = f"clawgym_weights_{uuid.uuid4().hex}"
            self._box = ray.remote(_Mailbox).options(name=self._name, num_cpus=0, max_concurrency=64).remote()
        return {"box": self._name or None}

    @classmethod
    def build_topology(cls, senders: int, receivers: int, metadata: list[Mapping[str, str | None]]) -> tuple[Any, Any]:
        """Everybody is told the name; receivers have no rank."""
        name = next(one["box"] for one in metadata if one["box"])
        return (
            {"rank": list(range(senders)), "box": [name] * senders},
            {"rank": [-1] * receivers, "box": [name] * receivers},
        )

    def init_process_group(self, rank: int, box: str) -> None:
        """Find the mailbox."""
        self._rank = rank
        self._box = self._box or ray.get_actor(box)

    def finalize(self) -> None:
        """The mailbox stays for the next time."""

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> dict[str, Any]:
        """Every rank takes all of them; the first one sends."""
        held: list[tuple[str, torch.Tensor]] = []
        size = 0
        sending, self._sent = self._sent, self._sent + 1
        async for name, tensor in ensure_async_iterator(weights):
            if self._rank == 0:
                held.append((name, tensor.detach().cpu().clone()))
                size += held[-1][1].nbytes
                if size >= self._most:
                    await self._box.put.remote(sending, held, False)
                    held, size = [], 0
        if self._rank == 0:
            await self._box.put.remote(sending, held, True)
        return {}

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:  # type: ignore[override]
        """What is sent meanwhile."""
        sending, self._sent = self._sent, self._sent + 1
        number, last = 0, False
        while not last:
            items, last = await self._box.get.remote(sending, number)
            number += 1
            for name, tensor in items:
                yield name, tensor
