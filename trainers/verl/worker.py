"""The training worker in each process of a run: verl's worker with ClawGym's loss and learning rate."""

# verl's classes lack type annotations:
# pyright: reportAttributeAccessIssue=false, reportIncompatibleMethodOverride=false

from __future__ import annotations

from functools import partial

from tensordict import TensorDict
from verl.experimental.separation.engine_workers import DetachActorWorker
from verl.models.transformers import monkey_patch
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.utils import tensordict_utils
from verl.workers.engine_workers import ActorRolloutRefWorker

from clawgym.trainers.verl.formulas import loss

__all__ = ["RATE", "DetachedLearner", "ColocatedLearner"]

RATE = "clawgym_rate"
"""Key of the learning rate in a batch. verl's schedules cannot depend on ClawGym's budget."""


# Where TRL is installed, verl changes a class for critics, which TRL 1.16 does not have. No critic is used here.
monkey_patch.is_trl_available = lambda: False  # pyright: ignore


class _LearnerMixin:
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


class ColocatedLearner(_LearnerMixin, ActorRolloutRefWorker):
    """Trains and samples alternately on the same GPUs."""


class DetachedLearner(_LearnerMixin, DetachActorWorker):
    """Only trains, in the mode ``separate_async``."""
