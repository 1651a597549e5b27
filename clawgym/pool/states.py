"""What a pool gives back: episodes, and batches of groups of episodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from clawgym.records import Sample

__all__ = ["Batch", "BatchEpisode", "BatchGroup", "PooledEpisode"]


@dataclass(frozen=True)
class PooledEpisode:
    """One row of the pool's episodes; its turns are read apart (:meth:`~clawgym.pool.Pool.turns`)."""

    id: str
    channel: str
    task_id: str
    task_hash: str
    group: str
    """Its group; its own id where it was opened without one."""
    sample: int
    seed: int
    agent: str
    secret_sha256: str
    state: str
    """``open`` or ``closed``."""
    n_turns: int
    opened_at: float
    """Seconds since 1970, as all times here."""
    closed_at: float | None = None
    outcome: str | None = None
    """An :class:`~clawgym.records.Outcome`; ``None`` while open."""
    cause: str | None = None
    reward: float | None = None
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Named parts of the reward."""
    n_samples: int | None = None
    """Rows of training of role main; ``None`` while open."""
    trainable: bool | None = None
    """What curation decided; ``None`` if nothing."""
    tags: tuple[str, ...] = ()
    note: str = ""
    fate: str | None = None
    """What became of it: ``delivered``, or why it was left out (``infra``, ``curated``, ``empty``, ``stale``,
    ``late``, ``dropped``); ``None`` while that is undecided."""
    meta: Mapping[str, Any] = field(default_factory=dict)
    """Given when it was opened, overlaid with what was given when it was closed."""


@dataclass(frozen=True)
class BatchEpisode:
    """One episode as a trainer gets it."""

    episode: PooledEpisode
    samples: tuple[Sample, ...]
    """At least one, of the roles that were asked for."""
    turn_rewards: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    """Name -> index of the turn -> reward."""


@dataclass(frozen=True)
class BatchGroup:
    """Episodes of one task, for an advantage within the group."""

    id: str
    task_id: str
    episodes: tuple[BatchEpisode, ...]


@dataclass(frozen=True)
class Batch:
    """What :meth:`~clawgym.pool.Pool.fetch` gives for one step of one consumer."""

    consumer: str
    step: int
    groups: tuple[BatchGroup, ...]
    lease_until: float
    """Seconds since 1970, by the clock of the database."""
    acked: bool = False
    """This step was acked before: a consumer that went back to an older checkpoint gets the same batch again."""
