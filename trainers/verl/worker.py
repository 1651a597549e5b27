"""The training workers in each process of a run: verl's workers with ClawGym's loss and learning rate."""

# verl's classes lack type annotations:
# pyright: reportAttributeAccessIssue=false, reportIncompatibleMethodOverride=false

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from verl.experimental.separation.engine_workers import DetachActorWorker
from verl.models.transformers import monkey_patch
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.utils import fsdp_utils, tensordict_utils
from verl.utils.device import get_device_id, get_device_name
from verl.utils.model import get_hf_auto_model_class
from verl.workers.config import ActorConfig, TrainingWorkerConfig
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

from clawgym.rewards.scoring import Scored, ScoreRequest, score_batch
from clawgym.trainers.verl.formulas import loss

__all__ = ["RATE", "AdapterWorker", "ColocatedLearner", "DetachedLearner"]

RATE = "clawgym_rate"
"""Key of the learning rate in a batch. verl's schedules cannot depend on ClawGym's budget."""


# Where TRL is installed, verl changes a class for critics, which TRL 1.16 does not have. No critic is used here.
monkey_patch.is_trl_available = lambda: False  # pyright: ignore

_wrapped = fsdp_utils._select_fsdp2_wrap_targets


def _wrapped_without_head(model: Any, layers: Any) -> list[Any]:
    """The modules that FSDP shards one by one. verl's fused kernels read the weight of the head and do not call it, so
    it must be gathered together with the root (verl 0.9.1 gathers it alone, unless it is that of the embeddings)."""
    return [module for module in _wrapped(model, layers) if module is not model.get_output_embeddings()]


fsdp_utils._select_fsdp2_wrap_targets = _wrapped_without_head


def _update(worker: TrainingWorker, data: TensorDict) -> TensorDict | None:
    rate = tensordict_utils.pop(data, key=RATE)
    for group in worker.engine.optimizer.param_groups:
        group["lr"] = rate
    output = worker.train_mini_batch(data=data)
    return None if output is None else output.cpu()


class _LearnerMixin:
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        super().init_model()  # type: ignore[misc]
        self.actor.set_loss_fn(partial(loss, config=self.loss_fn.keywords["config"]))

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    def update_actor(self, data: TensorDict) -> TensorDict | None:
        return _update(self.actor, data)


class ColocatedLearner(_LearnerMixin, ActorRolloutRefWorker):
    """Trains and samples alternately on the same GPUs."""


class DetachedLearner(_LearnerMixin, DetachActorWorker):
    """Only trains, in the mode ``separate_async``."""


class AdapterWorker(TrainingWorker):
    """One rank of a model with a LoRA adapter. Weights, adapter and optimizer are sharded over all ranks.

    Invariant: every rank calls the same methods in the same order, as each gathers or scatters shards."""

    def __init__(self, config: TrainingWorkerConfig, actor: ActorConfig, seed: int) -> None:
        super().__init__(config)
        self.set_loss_fn(partial(loss, config=actor))
        about = self.model_config.hf_config
        auto: Any = get_hf_auto_model_class(about)
        self._kind = auto._model_mapping[type(about)]
        self._forward = self._kind.forward  # verl replaces it by one that gives no logits
        add_adapter = self.engine._build_lora_module

        def seeded(module: Any) -> Any:
            torch.manual_seed(seed)  # as in the local trainer
            return add_adapter(module)

        self.engine._build_lora_module = seeded
        self.reset()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def adapter(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]] | None:
        """The weights of the adapter under peft's names, and its configuration; of the first rank."""
        with self._on_device():
            weights = {name: _whole(weight) for name, weight in self._trained()}
        return (weights, self.engine.module.peft_config["default"].to_dict()) if self.rank == 0 else None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_adapter(self, weights: Mapping[str, torch.Tensor] | None) -> None:
        """Replace the weights of the adapter; None: by those of an adapter that changes nothing."""
        with self._on_device(), torch.no_grad():
            for name, weight in self._trained():
                if weights is not None:
                    weight.copy_(_shard(weights[name], weight))
                elif "lora_B" in name:
                    weight.zero_()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def optimizer_state(self) -> dict[str, torch.Tensor] | None:
        """The state of the optimizer, named as in a checkpoint of the local trainer; of the first rank."""
        with self._on_device():
            found = {
                f"{number}.{name}": _whole(value)
                for number, (_, weight) in enumerate(self._trained())
                for name, value in self.engine.optimizer.state.get(weight, {}).items()
            }
        return found if self.rank == 0 else None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def restore_optimizer(self, state: Mapping[str, torch.Tensor]) -> None:
        """Replace the state of the optimizer; by nothing for a new one."""
        with self._on_device():
            self.engine.optimizer.state.clear()
            weights = [weight for _, weight in self._trained()]
            for key, value in state.items():
                number, _, name = key.partition(".")
                weight = weights[int(number)]
                self.engine.optimizer.state[weight][name] = value if name == "step" else _shard(value, weight)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"))
    def update(self, data: TensorDict) -> TensorDict | None:
        """One step of the optimizer on a mini-batch."""
        return _update(self, data)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"))
    def logprobs(self, data: TensorDict) -> TensorDict | None:
        """Log-probs and entropies of all ids."""
        return self.infer_batch(data)

    @register(dispatch_mode=Dispatch.DP_COMPUTE)
    def score(self, batches: Sequence[Sequence[ScoreRequest]]) -> list[list[Scored]]:
        """The scores of batches, as many on each rank."""
        precision = self.engine._autocast_dtype
        autocast = torch.autocast(get_device_name(), precision, enabled=precision != torch.float32)
        replaced, self._kind.forward = self._kind.forward, self._forward
        try:
            with self.engine.eval_mode(), autocast:
                return [score_batch(self.engine.module, batch) for batch in batches]
        finally:
            self._kind.forward = replaced

    def _trained(self) -> list[tuple[str, Any]]:
        named = self.engine.module.named_parameters()
        return [(name.replace(".default.", "."), weight) for name, weight in named if weight.requires_grad]

    @contextlib.contextmanager
    def _on_device(self) -> Iterator[None]:
        """With weights and optimizer on the device, in shards."""
        with self.engine.train_mode():
            for module in self.engine.module.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()  # after a forward pass without gradients the root is whole
            yield


def _whole(value: torch.Tensor) -> torch.Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().cpu().clone()


def _shard(value: torch.Tensor, like: Any) -> torch.Tensor:
    """The shard of this rank, distributed as ``like``."""
    return distribute_tensor(value.to(get_device_id(), like.dtype), like.device_mesh, like.placements)
