"""Log-probabilities of ids that were sampled, by a model that reads them again. Ids in, numbers out; no text.

torch is imported when a score is asked for.
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
    """What a model gives to S sampled ids, in nats, over the whole vocabulary."""

    logprobs: np.ndarray
    """(S,) float32"""
    top_ids: np.ndarray
    """(S, K) int64: the likeliest ids at each place, the likeliest first."""
    top_logprobs: np.ndarray
    """(S, K) float32"""


class Scorer(Protocol):
    """A model that reads ids."""

    async def score(
        self, prompt_ids: Sequence[int], sampled_ids: Sequence[int], *, top_k: int = 0, temperature: float = 1.0
    ) -> Scored:
        """log softmax(logits / temperature) at each of ``sampled_ids`` after ``prompt_ids``."""
        ...


class TorchScorer:
    """Scores with a causal language model of transformers in this process.

    One forward pass reads prompt and sample; logits are made at the S sampled places only, and the log-softmax of
    ``chunk`` places at a time, in float32. The module is run as it is, in evaluation mode, without gradients, one score
    at a time, on a thread: nobody else may change it or train it meanwhile. It may be the module that an engine samples
    from, while that samples nothing (``Gateway.weights_change``, or the engine's ``update_weights``).
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
        """See :class:`Scorer`; NaN for more ids than the model was made for. Raises :class:`ValueError` for no prompt,
        no sample, or a temperature that is not above 0."""
        if not prompt_ids or not sampled_ids or not temperature > 0:
            raise ValueError(
                f"{len(prompt_ids)} ids of prompt, {len(sampled_ids)} sampled, temperature {temperature}: all must be "
                "positive: give the turn as it was sampled"
            )
        async with self._alone:
            # Shielded: a forward pass cannot be stopped, and the next one waits until it has ended.
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
                # The sample is predicted from the place before it on; what follows its last id is nobody's business.
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
