"""verl on CPUs: a platform, rollout servers with ClawGym's engine, and weight transfer to separate servers.

verl has no CPU platform, and its rollout engines need GPUs. This module adds both through verl's three registries, so
that verl's unchanged trainer runs on a laptop and in tests. Every process of a run imports it through
``VERL_USE_EXTERNAL_MODULES`` if ``VERL_PLATFORM`` is ``cpu``. It is not used on GPUs.

Invariants: a request is sampled with one version of the weights. An aborted request returns the tokens sampled so far.
"""

# Type annotations of verl's classes are wrong (methods annotated with None are awaited):
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
from clawgym.rewards.scoring import ScoreRequest, TorchScorer

__all__ = ["ENGINE", "SHIPPED"]

ENGINE = "transformers"
"""The name of these servers in verl's ``actor_rollout_ref.rollout.name``."""
SHIPPED = "clawgym_ray"
"""The name in verl's ``checkpoint_engine.backend`` of weight transfer through Ray."""
_PIECE = 256 << 20
"""Bytes of weights in one message."""


def _device_module() -> ModuleType:
    """``torch.cpu`` with the functions of ``torch.cuda`` that verl calls, as no-ops."""
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
    """Ranks are processes. Ray counts them as logical GPUs, since verl schedules by GPUs only."""

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
        # verl would initialise the process group with "cpu:gloo,cpu:gloo", which torch rejects. It calls this method
        # just before, and does not initialise a group that exists.
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
    """A Ray actor with an engine: ids in, ids and log-probs out. verl calls its methods."""

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
        """Sample; if aborted, return the tokens so far. With ``prompt_logprobs`` only score the prompt."""
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
        """Log-probs of each id after the first, in the format of verl's servers: the entry for an id is at the position
        before it, with a filler at the end."""
        async with self._reading:
            if self._reader is None:  # the engine's model must not be run from outside the engine
                self._reader = load_weights(AutoModelForCausalLM, Path(self._model), dtype=torch.float32)
                self._reader.load_state_dict(self._weights, strict=False)
            (scored,) = await TorchScorer(self._reader).score([ScoreRequest(ids[:1], ids[1:], top_k)])
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
        """Receive a part of the weights. ``version`` marks the last part; the new weights then take effect."""
        self._coming.update(piece)
        if version is not None:
            async with self._reading:
                self._weights, self._coming = self._coming, {}
                await self._engine.update_weights(self._weights, version)
                if self._reader is not None:
                    self._reader.load_state_dict(self._weights, strict=False)

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        """Abort running requests; new ones wait."""
        self._open.clear()
        self._aborted.set()

    async def resume_generation(self) -> None:
        """Accept requests again."""
        self._aborted.clear()
        self._open.set()

    async def address(self) -> str:
        """The name for load balancing. Nothing connects to it."""
        return f"actor:{ray.get_runtime_context().get_actor_id()}"

    async def no_op(self, *_: Any, **__: Any) -> None:
        """Do nothing: there is no GPU memory to release and no profiler."""

    wake_up = sleep = clear_kv_cache = release_kv_cache = resume_kv_cache = start_profile = stop_profile = no_op


def _name(replica: int) -> str:
    return f"clawgym_server_{replica}"


class Replica(RolloutReplica):
    """One :class:`CpuServer`."""

    async def launch_servers(self) -> None:
        model: Any = self.model_config
        # A separate actor: the environment of a worker of verl has the ranks of another process.
        actor: Any = ray.remote(CpuServer).options(
            name=_name(self.replica_rank), num_cpus=0, max_concurrency=self.max_concurrency
        )
        server = actor.remote(str(model["path"]), int(os.environ.get("OMP_NUM_THREADS", "1")))
        self.servers = [server]
        self._server_handle = server
        self._server_address = await server.address.remote()


class Weights(BaseRollout):
    """In a process with weights: sends them to the server of its replica."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        super().__init__(config, model_config, device_mesh)
        rank = int(os.environ["RANK"])
        size = config.tensor_model_parallel_size * config.data_parallel_size * config.pipeline_model_parallel_size
        self.replica_rank = rank // size if replica_rank == -1 else replica_rank
        self.is_leader_rank = rank % size == 0

    async def resume(self, tags: list[str]) -> None: ...

    async def release(self) -> None: ...

    async def update_weights(self, weights: Any, global_steps: int | None = None, **_: Any) -> None:
        """Every rank iterates over all weights, since each is gathered from all shards. The first rank sends them."""
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
    """A Ray actor that keeps messages in order for any number of readers."""

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
    """Weight transfer to separate servers, through one actor that lives as long as the run."""

    def __init__(self, bucket_size: int, is_master: bool = False, **_: Any) -> None:
        self._most = bucket_size
        self._is_master = is_master
        self._mailbox: Any = None
        self._name = ""
        self._rank = -1
        self._sent = 0

    def prepare(self) -> Mapping[str, str | None]:
        """The name of the mailbox; the master creates it."""
        if self._is_master and self._mailbox is None:
            self._name = f"clawgym_weights_{uuid.uuid4().hex}"
            self._mailbox = ray.remote(_Mailbox).options(name=self._name, num_cpus=0, max_concurrency=64).remote()
        return {"box": self._name or None}

    @classmethod
    def build_topology(cls, senders: int, receivers: int, metadata: list[Mapping[str, str | None]]) -> tuple[Any, Any]:
        """Pass the mailbox's name to all processes. Receivers have no rank."""
        name = next(one["box"] for one in metadata if one["box"])
        return (
            {"rank": list(range(senders)), "box": [name] * senders},
            {"rank": [-1] * receivers, "box": [name] * receivers},
        )

    def init_process_group(self, rank: int, box: str) -> None:
        """Connect to the mailbox."""
        self._rank = rank
        self._mailbox = self._mailbox or ray.get_actor(box)

    def finalize(self) -> None:
        """Nothing to do: the mailbox stays for the next transfer."""

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> dict[str, Any]:
        """Every rank iterates over all weights; the first one sends them."""
        held: list[tuple[str, torch.Tensor]] = []
        size = 0
        sending, self._sent = self._sent, self._sent + 1
        async for name, tensor in ensure_async_iterator(weights):
            if self._rank == 0:
                held.append((name, tensor.detach().cpu().clone()))
                size += held[-1][1].nbytes
                if size >= self._most:
                    await self._mailbox.put.remote(sending, held, False)
                    held, size = [], 0
        if self._rank == 0:
            await self._mailbox.put.remote(sending, held, True)
        return {}

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:  # type: ignore[override]
        """Yield the weights of the current transfer."""
        sending, self._sent = self._sent, self._sent + 1
        number, last = 0, False
        while not last:
            items, last = await self._mailbox.get.remote(sending, number)
            number += 1
            for name, tensor in items:
                yield name, tensor
