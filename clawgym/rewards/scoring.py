"""Log-probabilities of sampled ids under a model. It works on ids only, never on text.

torch is imported at the first score.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    import torch

__all__ = ["Scored", "Scorer", "TorchScorer"]


@dataclass(frozen=True)
class Scored:
    """Log-probabilities of S sampled ids, in nats, normalised over the whole vocabulary."""

    logprobs: np.ndarray
    """(S,) float32"""
    top_ids: np.ndarray
    """(S, K) int64: the most likely ids at each position, in descending order."""
    top_logprobs: np.ndarray
    """(S, K) float32"""


class Scorer(Protocol):
    """A model that scores ids."""

    async def score(
        self, prompt_ids: Sequence[int], sampled_ids: Sequence[int], *, top_k: int = 0, temperature: float = 1.0
    ) -> Scored:
        """log softmax(logits / temperature) at each of ``sampled_ids`` after ``prompt_ids``, with the ``top_k`` ids."""
        ...


class TorchScorer:
    """Scores with a causal language model of transformers in this process.

    One forward pass processes prompt and sample. Logits are computed at the S sampled positions only, and the
    log-softmax of ``chunk`` positions at a time, in float32. The module runs on a thread, one score at a time, in
    evaluation mode and without gradients; it must not be changed or trained meanwhile. It may be the module of an
    engine, while that does not sample (``Gateway.weights_change``, or the engine's ``update_weights``).
    """

    def __init__(self, model: torch.nn.Module, *, chunk: int = 512) -> None:
        if chunk < 1:
            raise ValueError(f"chunk={chunk}: must be 1 or more: correct it")
        self._model: Any = model
        self._chunk = chunk
        self._alone = asyncio.Lock()

    async def score(
        self, prompt_ids: Sequence[int], sampled_ids: Sequence[int], *, top_k: int = 0, temperature: float = 1.0
    ) -> Scored:
        """See :class:`Scorer`. NaN if there are more ids than the model's maximum length.

        Raises :class:`ValueError` for an empty prompt or sample, or a temperature of 0 or less.
        """
        if not prompt_ids or not sampled_ids or not temperature > 0:
            raise ValueError(
                f"{len(prompt_ids)} ids of prompt, {len(sampled_ids)} sampled, temperature {temperature}: all must be "
                "positive: give the turn as it was sampled"
            )
        async with self._alone:
            # Shielded: a forward pass cannot be interrupted, and the next one waits for its end.
            work = asyncio.ensure_future(
                asyncio.to_thread(self._score, tuple(prompt_ids), tuple(sampled_ids), top_k, temperature)
            )
            try:
                return await asyncio.shield(work)
            except asyncio.CancelledError:
                await asyncio.wait([work])
                raise

    def _score(self, prompt: tuple[int, ...], sampled: tuple[int, ...], top_k: int, temperature: float) -> Scored:
        import torch

        model, count = self._model, len(sampled)
        if len(prompt) + count > model.config.get_text_config().max_position_embeddings:
            nothing = np.full((count, top_k), np.nan, np.float32)
            return Scored(np.full(count, np.nan, np.float32), np.full((count, top_k), -1), nothing)
        training = model.training
        device = next(model.parameters()).device
        model.eval()
        try:
            with torch.inference_mode():
                # Sampled ids are predicted at the position before each; the last position is not needed.
                ids = torch.tensor([prompt + sampled], device=device)
                logits = model(input_ids=ids, use_cache=False, logits_to_keep=count + 1).logits[0, -count - 1 : -1]
                chosen = torch.tensor(sampled, device=device)
                parts: list[tuple[torch.Tensor, ...]] = []
                for start in range(0, count, self._chunk):
                    rows = (logits[start : start + self._chunk].float() / temperature).log_softmax(-1)
                    own = rows.gather(1, chosen[start : start + self._chunk, None])[:, 0]
                    best = rows.topk(min(top_k, rows.shape[-1]), dim=-1)
                    parts.append((own, best.indices, best.values))
                own, places, values = (torch.cat(column).cpu().numpy() for column in zip(*parts, strict=True))
        finally:
            model.train(training)
        return Scored(own, places, values)
