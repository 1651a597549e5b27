"""Gradient checkpointing changes memory and time, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from clawgym.engines.protocol import GenerateRequest, Sampling
from clawgym.engines.tiny import make_tiny_model
from clawgym.trainers.common.batch import make_batch
from clawgym.trainers.common.policy import base_of, load_policy
from clawgym.trainers.config import TrainConfig
from clawgym.trainers.local.learner import Learner

from ..batches import some_batch

LORA = [pytest.param(None, id="full"), pytest.param({"rank": 4}, id="lora")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("m") / "model", layers=3, spread=0.05)


class Recorded:
    """A learner whose gradients and calls of a layer are recorded."""

    def __init__(self, folder: Path, lora: Any, checkpointing: bool) -> None:
        self.config = TrainConfig.model_validate(
            {
                "model": {"lora": lora},
                "compute": {"row_tokens": 64, "micro_tokens": 64, "checkpointing": checkpointing},
                "optimizer": {"lr": 1e-3},
                "guards": {"max_kl": 1e9},
            }
        )
        self.policy = load_policy(self.config.model, folder, self.config.compute, seed=1)
        self.learner = Learner(self.policy, self.config)
        self.gradients: list[torch.Tensor] = []
        self.calls = 0
        for name, weight in self.policy.module.named_parameters():
            if "lora_B" in name:  # 0 at first: A would have no gradient
                torch.nn.init.normal_(weight, std=0.05, generator=torch.Generator().manual_seed(0))
        self.learner.optimizer.register_step_pre_hook(self._keep)

    def _keep(self, *_: Any) -> None:
        self.gradients += [p.grad.clone() for p in self.learner.parameters if p.grad is not None]

    def _count(self, *_: Any) -> None:
        self.calls += 1

    def train(self, seed: int = 0) -> int:
        """One step, in which the calls of a layer are counted. Returns the number of micro-batches."""
        batch = make_batch(some_batch(seed), self.config, seed=0)
        assert any(not row.plain for row in batch.rows)  # rows with a mask of their own
        layer = base_of(self.policy.module).model.layers[1].mlp
        with layer.register_forward_pre_hook(self._count):
            self.calls = 0
            self.learner.train_step(batch, seed=seed)
        return len(list(self.learner._micro(batch.rows)))


@pytest.mark.parametrize("lora", LORA)
def test_gradients_are_equal_and_layers_run_twice(folder: Path, lora: Any) -> None:
    plain, again = (Recorded(folder, lora, on) for on in (False, True))
    count = plain.train()
    assert again.train() == count > 1
    assert plain.calls == 2 * count + 1  # log-probs of the old policy, the loss, a guard
    assert again.calls == plain.calls + count
    assert len(plain.gradients) == len(again.gradients) > 0
    for one, other in zip(plain.gradients, again.gradients, strict=True):
        assert one.abs().max() > 0
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("lora", LORA)
async def test_engine_samples_as_without_it(folder: Path, lora: Any) -> None:
    found, weights = [], None
    for on in (False, True):
        made = Recorded(folder, lora, on)
        cache = base_of(made.policy.module).config.use_cache
        engine = made.policy.engine()
        made.train()
        if weights is None:
            weights = {name: value.clone() for name, value in made.policy.module.state_dict().items()}
        made.policy.module.load_state_dict(weights)  # equal up to rounding, which may change a sample
        await made.policy.publish(engine, 1)
        tokens: list[Any] = []
        for seed, temperature in ((0, 0.0), (1, 1.0)):
            sampling = Sampling(max_tokens=12, seed=seed, temperature=temperature)
            request = GenerateRequest([9, 300, 400], sampling, adapter=made.policy.adapter)
            async for delta in engine.generate(request):  # how many tokens a delta has is a matter of timing
                tokens += zip(delta.ids, delta.logprobs, [delta.policy_version] * len(delta.ids), strict=True)
        assert all(p.grad is None for p in engine._model.parameters())
        assert base_of(made.policy.module).config.use_cache == engine._model.config.use_cache == cache
        assert made.policy.module.training
        assert not engine._model.training
        count = made.train(seed=1)  # sampling has not turned it off
        assert made.calls == (3 if on else 2) * count + 1
        await engine.aclose()
        found.append(tokens)
    plain, again = found
    assert [t[0] for t in plain] == [t[0] for t in again]
    for (_, one, version), (_, other, _) in zip(plain, again, strict=True):
        assert one == pytest.approx(other, abs=1e-5)
        assert version == 1
