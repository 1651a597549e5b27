"""What learns, in each process of a run: verl's worker, with our loss and at the rate that the run says."""

# verl's classes do not say what they are made of:
# pyright: reportAttributeAccessIssue=false, reportIncompatibleMethodOverride=false

from __future__ import annotations

from functools import partial

from tensordict import TensorDict
from verl.experimental.separation.engine_workers import DetachActorWorker
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.utils import tensordict_utils
from verl.workers.engine_workers import ActorRolloutRefWorker

from clawgym.trainers.verl.formulas import loss

__all__ = ["RATE", "DetachedLearner", "ColocatedLearner"]

RATE = "clawgym_rate"
"""Of a batch: the rate that it is learnt at. verl's schedules know no budget."""


class _Learns:
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        super().init_model()  # type: ignore[misc]
        self.actor.set_loss_fn(partial(loss, config=self.loss_fn.keywords["config"]))

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    def update_actor(self, data: TensorDict) -> TensorDict | None:
        rate = tensordict_utils.pop(data, key=RATE)
        for group in self.actor.engine.optimizer.param_groups:
            group["lr"] = rate
        output = self.actor.train_mini_batch(data=data)
        return None if output is None else output.cpu()


class ColocatedLearner(_Learns, ActorRolloutRefWorker):
    """Trains and samples alternately on the same GPUs."""


class DetachedLearner(_Learns, DetachActorWorker):
    """Only learns, in the mode ``separate_async``."""
