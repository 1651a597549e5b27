"""The request that opens a gateway session. Importing this module imports neither the gateway nor a database."""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from clawgym.engines.protocol import Sampling

__all__ = ["SessionCredentials", "SessionRequest", "reserve_session"]


@dataclass(frozen=True, slots=True)
class SessionCredentials:
    """Id and secret of a session, which an agent needs for requests. The secret itself is not stored."""

    id: str
    secret: str = field(repr=False)


def reserve_session() -> SessionCredentials:
    """Return credentials for a session that is opened later. Until then, requests are refused."""
    return SessionCredentials(uuid.uuid4().hex, secrets.token_urlsafe(24))


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionRequest:
    """The settings of a gateway session and its episode in the pool.

    In an :class:`~clawgym.rollout.EpisodeRequest`, give ``channel``, ``group``, ``sampling``, ``adapter`` and ``meta``;
    the library sets the other fields.
    """

    channel: str = "train"
    """The channel of the episode; a trainer fetches from one channel."""
    group: str | None = None
    """A group of the pool (:meth:`~clawgym.pool.Pool.open_group`); ``None``: a group of one."""
    sampling: Sampling | None = None
    """Overrides the sampling parameters of requests. ``None``: those of an agent that opens its own session."""
    adapter: str | None = None
    """The LoRA adapter of the engine to sample with."""
    meta: Mapping[str, Any] = field(default_factory=dict)
    """Stored with the episode; any JSON values."""
    task_id: str = ""
    task_hash: str = ""
    sample: int = 0
    """Index of the episode among those of its task or group, from 0."""
    seed: int = 0
    agent: str = ""
    most_turns: int | None = None
    """Most model calls; further ones are refused. ``None``: no limit."""
