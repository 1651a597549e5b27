"""The critic of an advantage that uses values, such as ``gae``: a linear value head on the policy's hidden states.

The value of a turn is that of the state before it: V = w . x + b. Here x is the policy's last hidden state at the last
token before the turn's first sampled token, normalised to length 1 (LayerNorm, divided by the root of its width). There
is one value for a turn, not for each token: between two turns the environment changes the state, within a turn nothing
but the policy does. So gamma and lambda count decisions, and rewards, which are given for turns, keep their meaning.

The head is linear, and the gradient of its loss does not reach the policy. A second model, or a shared gradient, is
more expressive. But this one costs one vector, no forward pass beyond the one for old log-probs, and cannot disturb the
policy; its problem is convex, so it needs no seed and no warm-up phase. What a linear function of the policy's states
cannot tell apart, it cannot value. ``critic/vf_explained_var`` says how much it explains.

Invariants: it starts at V = 0, where advantages are returns. Hidden states are those of the policy before the step.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from clawgym.errors import TrainingError
from clawgym.trainers import algorithms
from clawgym.trainers.config import Critic

__all__ = ["ValueHead"]


class ValueHead:
    """The critic with its optimizer (AdamW without weight decay)."""

    def __init__(self, width: int, config: Critic, device: torch.device | str = "cpu") -> None:
        self._config = config
        self.weight = torch.zeros(width, device=device, requires_grad=True)
        self.bias = torch.zeros((), device=device, requires_grad=True)
        self.parameters: list[torch.Tensor] = [self.weight, self.bias]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=config.lr, weight_decay=0.0)
        self.updates = 0

    def copies(self) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """All parameters, for the checkpoint: no file of the model has them."""
        for number, each in enumerate(self.parameters):
            yield number, each, each

    def values(self, states: torch.Tensor) -> torch.Tensor:
        """(N,) values of (N, H) hidden states."""
        width = len(self.weight)
        x = torch.nn.functional.layer_norm(states.float(), (width,)) / width**0.5
        return x @ self.weight + self.bias

    def train_step(self, states: torch.Tensor, returns: torch.Tensor, episodes: torch.Tensor) -> dict[str, float]:
        """Train towards the ``returns`` (N,) of the turns with ``states`` (N, H), for ``critic.updates`` updates.

        ``episodes`` (N,): the episode of each turn; episodes are weighted equally. Returns metrics, those of the values
        before the first update. Raises :class:`~clawgym.errors.TrainingError` for a NaN or infinite loss."""
        about = self._config
        old, weights = self.values(states).detach(), algorithms.token_weights(episodes)
        metrics = {
            "critic/vpred_mean": float(old.mean()),
            "critic/returns_mean": float(returns.mean()),
            "critic/vf_explained_var": _explained(old, returns),
        }
        for number in range(about.updates):
            loss, clipped = algorithms.value_loss(self.values(states), old, returns, weights, clip=about.clip)
            if not torch.isfinite(loss):
                raise TrainingError(
                    "the loss of the critic is NaN or infinite: resume from the last checkpoint with a lower critic.lr"
                )
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            if number == 0:
                metrics["critic/vf_loss"] = float(loss.detach())
            metrics["critic/vf_clipfrac"] = float(clipped)
        self.updates += about.updates
        return metrics


def _explained(values: torch.Tensor, returns: torch.Tensor) -> float:
    """1 - Var(returns - values) / Var(returns); 0 for returns without variance."""
    total = float(returns.var(correction=0))
    return 1 - float((returns - values).var(correction=0)) / total if total > 0 else 0.0
