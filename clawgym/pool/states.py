"""Episodes and batches, as returned by a pool."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from clawgym.records import Image, TrainingSequence, Turn

__all__ = ["PROCESS_REWARD", "Batch", "BatchEpisode", "BatchGroup", "EpisodeEnd", "PooledEpisode", "TrainingPool"]

PROCESS_REWARD = "judge"
"""The name of the turn rewards that training uses as process rewards."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeEnd:
    """What an episode is closed with."""

    outcome: str
    """An :class:`~clawgym.records.Outcome` except ``unsupported``."""
    cause: str | None = None
    reward: float | None = None
    """What training uses; ``None`` where the episode was not graded."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Named scores beside it (``strict``, ``official``)."""
    penalties: Mapping[str, float] = field(default_factory=dict)
    """Name -> what training adds to the reward of the whole episode, 0 or less."""
    meta: Mapping[str, Any] = field(default_factory=dict)
    """Overlays what was given when the episode was opened."""


@dataclass(frozen=True)
class PooledEpisode:
    """An episode in the pool, without its turns (:meth:`~clawgym.pool.Pool.turns`)."""

    id: str
    channel: str
    task_id: str
    task_hash: str
    group: str
    """Id of its group; its own id if it was opened without one."""
    sample: int
    seed: int
    agent: str
    secret_sha256: str
    state: str
    """``open`` or ``closed``."""
    n_turns: int
    opened_at: float
    """Seconds since 1970, like all times here."""
    closed_at: float | None = None
    outcome: str | None = None
    """An :class:`~clawgym.records.Outcome`; None while open."""
    cause: str | None = None
    reward: float | None = None
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Named scores beside the reward (``strict``, ``official``)."""
    penalties: Mapping[str, float] = field(default_factory=dict)
    """Name -> what training adds to the reward of the whole episode, 0 or less."""
    n_samples: int | None = None
    """Number of training sequences of role ``main``; None while open."""
    trainable: bool | None = None
    """Decision of curation; None: undecided."""
    tags: tuple[str, ...] = ()
    note: str = ""
    fate: str | None = None
    """``delivered``, or why it was left out (``infra``, ``curated``, ``empty``, ``stale``, ``late``, ``dropped``); None
    while undecided."""
    meta: Mapping[str, Any] = field(default_factory=dict)
    """Metadata from opening, overlaid with metadata from closing."""


@dataclass(frozen=True)
class BatchEpisode:
    """An episode in a batch."""

    episode: PooledEpisode
    sequences: tuple[TrainingSequence, ...]
    """At least one training sequence, of the requested roles."""
    process_rewards: Mapping[int, float] = field(default_factory=dict)
    """Index of the turn -> what a judge scored it with."""


@dataclass(frozen=True)
class BatchGroup:
    """Episodes of one task, for advantages within the group."""

    id: str
    task_id: str
    episodes: tuple[BatchEpisode, ...]


@dataclass(frozen=True)
class Batch:
    """The batch of one step of one consumer; see :meth:`~clawgym.pool.Pool.fetch`."""

    consumer: str
    step: int
    groups: tuple[BatchGroup, ...]
    lease_until: float
    """Seconds since 1970, by the clock of the database."""
    acked: bool = False
    """Whether the step was acknowledged before: a consumer that resumed an older checkpoint gets the same batch."""


class TrainingPool(Protocol):
    """What training asks of a :class:`~clawgym.pool.Pool`, which may be on another machine."""

    def stats(self) -> dict[str, Any]: ...

    def fetch(
        self, consumer: str, step: int, *, channel: str, groups: int, min_episodes: int, lease_seconds: float
    ) -> Batch | None: ...

    def ack(self, consumer: str, step: int) -> None: ...

    def turns(self, id: str) -> tuple[Turn, ...]: ...

    def about_turn_rewards(self, id: str) -> dict[str, dict[int, dict[str, Any]]]: ...

    def image(self, sha256: str) -> Image: ...
