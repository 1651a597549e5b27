"""Log-probabilities of sampled ids under a model. It works on ids only, never on text.

torch is imported at the first score.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    import torch

__all__ = ["ScoreRequest", "Scored", "Scorer", "TorchScorer", "score_batch", "score_batches"]

_MAX_LOGITS = 2**27
"""Most logits that are held at once: sampled ids times vocabulary."""


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """Ids to score: S sampled ids after a prompt.

    Raises :class:`ValueError` for an empty prompt or sample, or a temperature of 0 or less."""

    prompt_ids: Sequence[int]
    sampled_ids: Sequence[int]
    top_k: int = 0
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if not self.prompt_ids or not self.sampled_ids or not self.temperature > 0:
            raise ValueError(
                f"{len(self.prompt_ids)} ids of prompt, {len(self.sampled_ids)} sampled, temperature "
                f"{self.temperature}: all must be positive: give the turn as it was sampled"
            )

    def __len__(self) -> int:
        """Ids of prompt and sample."""
        return len(self.prompt_ids) + len(self.sampled_ids)


@dataclass(frozen=True)
class Scored:
    """Log-probabilities of S sampled ids, in nats, normalised over the whole vocabulary."""

    logprobs: np.ndarray
    """(S,) float32"""
    top_ids: np.ndarray
    """(S, K) int64: the most likely ids at each position, in descending order."""
    top_logprobs: np.ndarray
    """(S, K) float32"""

    @classmethod
    def nothing(cls, request: ScoreRequest) -> Scored:
        """The scores of a request that cannot be scored: NaN, and ids -1."""
        shape = len(request.sampled_ids), request.top_k
        return cls(np.full(shape[0], np.nan, np.float32), np.full(shape, -1), np.full(shape, np.nan, np.float32))


class Scorer(Protocol):
    """A model that scores ids."""

    async def score(self, requests: Sequence[ScoreRequest]) -> list[Scored]:
        """For each request, log softmax(logits / temperature) at each of ``sampled_ids`` after ``prompt_ids``, with the
        ``top_k`` most likely ids."""
        ...


class TorchScorer:
    """Scores with a causal language model of transformers in this process.

    Requests of similar length share a forward pass of at most ``tokens`` ids, padding included (or of one request).
    Logits are computed at the sampled positions only, and the log-softmax of ``chunk`` positions at a time, in float32.
    The module runs on a thread, one forward pass at a time, in evaluation mode and without gradients; it must not be
    changed or trained meanwhile. It may be the module of an engine, while that does not sample
    (``Gateway.weights_change``, or the engine's ``update_weights``).
    """

    def __init__(self, model: torch.nn.Module, *, tokens: int = 8192, chunk: int = 512) -> None:
        for name, value in (("tokens", tokens), ("chunk", chunk)):
            if value < 1:
                raise ValueError(f"{name}={value}: must be 1 or more: correct it")
        self._model: Any = model
        self._tokens = tokens
        self._chunk = chunk
        self._alone = asyncio.Lock()

    async def score(self, requests: Sequence[ScoreRequest]) -> list[Scored]:
        """See :class:`Scorer`. NaN for a request with more ids than the model's maximum length."""
        found = [Scored.nothing(request) for request in requests]
        about = self._model.config.get_text_config()
        window, vocab = about.max_position_embeddings, about.vocab_size
        async with self._alone:
            for batch in score_batches(requests, tokens=self._tokens, window=window, vocab=vocab):
                # Shielded: a forward pass cannot be interrupted, and the next one waits for its end.
                of_batch = [requests[n] for n in batch]
                work = asyncio.ensure_future(asyncio.to_thread(score_batch, self._model, of_batch, chunk=self._chunk))
                try:
                    scores = await asyncio.shield(work)
                except asyncio.CancelledError:
                    await asyncio.wait([work])
                    raise
                for n, scored in zip(batch, scores, strict=True):
                    found[n] = scored
        return found


def score_batches(requests: Sequence[ScoreRequest], *, tokens: int, window: int, vocab: int) -> Iterator[list[int]]:
    """Indices of the requests of each forward pass of at most ``tokens`` ids. Requests of more than ``window`` ids are
    left out. The order of the requests determines them."""
    held: list[int] = []
    sampled = 0
    for n in sorted(range(len(requests)), key=lambda n: -len(requests[n])):
        if len(requests[n]) > window:
            continue
        count = len(requests[n].sampled_ids)
        if held and (
            (len(held) + 1) * len(requests[held[0]]) > tokens
            or 2 * len(requests[n]) < len(requests[held[0]])
            or (sampled + count) * vocab > _MAX_LOGITS
        ):
            yield held
            held, sampled = [], 0
        held.append(n)
        sampled += count
    if held:
        yield held


def score_batch(model: Any, batch: Sequence[ScoreRequest], *, chunk: int = 512) -> list[Scored]:
    """The scores of some requests, by one forward pass of a model of transformers; see :class:`TorchScorer`."""
    import torch

    width = max(map(len, batch))
    device = next(model.parameters()).device
    # Padding comes last, where no other id attends to it.
    ids = np.zeros((len(batch), width), np.int64)
    for row, request in zip(ids, batch, strict=True):
        row[: len(request)] = (*request.prompt_ids, *request.sampled_ids)
    counts = [len(request.sampled_ids) for request in batch]
    # A sampled id is predicted at the position before it.
    starts = [n * width + len(request.prompt_ids) - 1 for n, request in enumerate(batch)]
    where = np.concatenate([np.arange(start, start + count) for start, count in zip(starts, counts, strict=True)])
    predicts, chosen = torch.from_numpy(where).to(device), torch.from_numpy(ids.ravel()[where + 1]).to(device)
    heat = torch.tensor([request.temperature for request in batch], device=device)
    heat = heat.repeat_interleave(torch.tensor(counts, device=device))[:, None]
    top_k = max(request.top_k for request in batch)

    def only_predicting(_: Any, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (given[0].flatten(0, 1)[predicts][None],)

    training = model.training
    hook = model.get_output_embeddings().register_forward_pre_hook(only_predicting)
    model.eval()
    try:
        with torch.no_grad():  # sharded modules cannot run in inference mode
            logits = model(input_ids=torch.from_numpy(ids).to(device), use_cache=False).logits[0]
            parts: list[tuple[torch.Tensor, ...]] = []
            for start in range(0, len(logits), chunk):
                part = slice(start, start + chunk)
                rows = (logits[part].float() / heat[part]).log_softmax(-1)
                best = rows.topk(min(top_k, rows.shape[-1]), dim=-1)
                parts.append((rows.gather(1, chosen[part, None])[:, 0], best.indices, best.values))
            columns = [torch.cat(column).cpu().numpy() for column in zip(*parts, strict=True)]
    finally:
        hook.remove()
        model.train(training)
    ends = np.cumsum(counts)[:-1]
    scores = zip(batch, *(np.split(column, ends) for column in columns), strict=True)
    return [Scored(own, top[:, : r.top_k], values[:, : r.top_k]) for r, own, top, values in scores]
