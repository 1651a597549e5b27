"""The policy, the learner and the checkpoints of one local training run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from clawgym.trainers.common.checkpoints import Checkpoints, Progress
from clawgym.trainers.common.policy import Policy, load_policy
from clawgym.trainers.config import TrainConfig
from clawgym.trainers.local.learner import Learner

__all__ = ["TrainingState"]


@dataclass(frozen=True)
class TrainingState:
    """The policy, its learner, the checkpoints and the progress of a run."""

    policy: Policy
    learner: Learner
    checkpoints: Checkpoints
    progress: Progress

    @classmethod
    def load(
        cls, config: TrainConfig, run: Path, model: Path, *, reference: bool = False, lr: float | None = None
    ) -> TrainingState:
        """Load the model in ``model``, and the newest checkpoint of ``run`` if there is one. Raises as
        :func:`~clawgym.trainers.common.policy.load_policy` and :meth:`Checkpoints.load` do."""
        policy = load_policy(config.model, model, config.compute, reference=reference, seed=config.seed)
        learner, checkpoints = Learner(policy, config, lr=lr), Checkpoints(run)
        last = checkpoints.last()
        progress = Progress() if last is None else checkpoints.load(last, policy, learner)
        return cls(policy, learner, checkpoints, progress)

    def save(self) -> None:
        """Write a checkpoint. Raises as :meth:`Checkpoints.put` does."""
        self.checkpoints.save(self.policy, self.learner, self.progress)
