"""Hand-made batches in the form of the pool."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import numpy as np

from clawgym.pool.states import Batch, BatchEpisode, BatchGroup, PooledEpisode
from clawgym.records import TrainingSequence
from clawgym.rewards.hints import Teacher

__all__ = ["batch_of", "episode_of", "sample_of", "teacher_of"]


def sample_of(
    ids: Sequence[int], mask: Sequence[int], logprobs: Sequence[float], turns: Sequence[int] | None = None
) -> TrainingSequence:
    """A training sequence; ``turns`` gives the turn of each trained id, 0 by default."""
    count = sum(mask)
    turn_of = tuple(turns or [0] * count)
    return TrainingSequence(
        tuple(sorted(set(turn_of))), tuple(ids), tuple(mask), tuple(logprobs), (0,) * count, turn_of
    )


def episode_of(
    number: int, reward: float, samples: Sequence[TrainingSequence], judged: Mapping[int, float] | None = None
) -> BatchEpisode:
    """A closed episode with training sequences and process rewards by turn."""
    pooled = PooledEpisode(
        id=f"e{number}", channel="train", task_id="t", task_hash="", group="g", sample=number, seed=0, agent="",
        secret_sha256="", state="closed", n_turns=1, opened_at=0.0, outcome="solved" if reward == 1 else "failed",
        reward=reward, rewards={"strict": reward, "official": reward},
    )  # fmt: skip
    return BatchEpisode(pooled, tuple(samples), dict(judged or {}))


def batch_of(groups: Sequence[Sequence[BatchEpisode]]) -> Batch:
    """Groups of episodes."""
    made = tuple(BatchGroup(f"g{n}", "t", tuple(members)) for n, members in enumerate(groups))
    return Batch("trainer", 0, made, 0.0)


def teacher_of(logprobs: Sequence[float], top: tuple[np.ndarray, np.ndarray] | None = None) -> Teacher:
    """A teacher with one hint; ``top``: its (S, K) most likely ids and their log-probs, none by default."""
    count = len(logprobs)
    ids, logp = top or (np.zeros((count, 0), np.int64), np.zeros((count, 0), np.float32))
    nothing = np.full((1, count), np.nan, np.float32)
    return Teacher(np.array(logprobs, np.float32), ids, logp, np.zeros(count, np.int64), ("a hint",), nothing)


def some_batch(seed: int = 0, *, vocab: int = 600) -> Batch:
    """Two groups of four with shared prompts; one episode has two training sequences."""
    rng = random.Random(seed)
    groups = []
    for group in range(2):
        prompt = [rng.randrange(9, vocab) for _ in range(12)]
        members = []
        for n in range(4):
            rows = []
            for row in range(2 if n == 3 else 1):
                sampled = [rng.randrange(9, vocab) for _ in range(rng.randint(3, 9))]
                ids = [*prompt, *([77] * row), *sampled]
                mask = [0] * (len(ids) - len(sampled)) + [1] * len(sampled)
                rows.append(sample_of(ids, mask, [-rng.random() * 8 for _ in sampled], [row] * len(sampled)))
            members.append(episode_of(4 * group + n, float(n % 2), rows))
        groups.append(members)
    return batch_of(groups)
