"""The metrics of a step with the trainer ``verl``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from .test_parity import Both

trainers: Any = pytest.importorskip("clawgym.trainers.verl.trainer")
metrics_of_verl: Any = pytest.importorskip("verl.utils.metric")


def talkative(
    logp: Any, old_logp: Any, advantages: Any, weights: Any, importance: Any = None, sequences: Any = None
) -> Any:
    """REINFORCE, with metrics of its own."""
    said = {f"number_{n}": torch.tensor(float(n)) for n in range(60)}
    mine = {"mine": torch.tensor(0.25), "n" * 65: torch.tensor(1.0), "entropy": torch.tensor(-9.0)}
    clash = {"tokens": torch.tensor(8), "grad_norm": torch.tensor(-9.0)}
    return -(weights * advantages * logp).sum(), {**mine, **clash, **said}


class Logged:
    """Keeps the metrics that the run would log."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.metrics: dict[str, float] = {}

    def budget_used(self) -> float:
        return 0.0

    def on_metrics(self, trainer: Any, metrics: dict[str, float]) -> None:
        self.metrics = metrics


def test_metrics_of_own_loss_are_logged() -> None:
    """By the update of verl's trainer, on what its training processes return."""
    both = Both({"algorithm": {"loss": f"{__name__}:talkative"}}, seed=3)
    ((loss, said),) = both.of_verl_losses(1)
    assert torch.isfinite(loss)
    Metric = metrics_of_verl.Metric
    output = {name: [Metric.aggregate_dp([one])] for name, one in said.items()}
    output |= {"grad_norm": [0.5], "lr": [1e-3], "mfu": [0.1], "loss": [2.0], "perf/cpu_memory_used_gb": [3.0]}

    trainer = object.__new__(trainers._SyncTrainer)
    trainer.callbacks, trainer._room, trainer._sampled, trainer.global_steps = Logged(both.config), 64, 0.0, 1
    trainer._step_metrics, trainer.seconds, trainer.tokens = {}, 1.0, 8
    actor = SimpleNamespace(ppo_epochs=1, data_loader_seed=0)
    rollout = SimpleNamespace(temperature=1.0)
    trainer.config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(actor=actor, rollout=rollout))
    group = SimpleNamespace(_dispatch_info={"actor": [0]}, update_actor=lambda batch: {"metrics": output})
    trainer.actor_rollout_wg = group
    batch = trainers.KVBatchMeta(partition_id="train", keys=["a"], tags=[{}], fields=[], extra_info={})
    metrics: dict[str, Any] = {}
    trainer._update_actor(batch, metrics)
    trainer._compute_metrics(batch, metrics, {}, 1, 0)

    found = trainer.callbacks.metrics
    assert found["actor/mine"] == 0.25
    assert [found[f"actor/number_{n}"] for n in range(3)] == [0, 1, 2]
    assert found["actor/entropy"] == said["actor/entropy"].aggregate() > 0
    assert found["actor/grad_norm"] == 0.5
    own = [name for name in found if name.startswith("actor/number_")]
    assert len(own) == 32 - 3  # mine, entropy and grad_norm are the others of the first 32
    assert all(len(name) <= len("actor/") + 64 for name in found)
    assert not {"actor/tokens", "actor/loss", "actor/mfu"} & set(found)
