"""What opens a session. Importing this imports neither the gateway nor a database."""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from clawgym.engines.protocol import Sampling

__all__ = ["Opened", "SessionRequest", "reserve"]


@dataclass(frozen=True, slots=True)
class Opened:
    """What an agent needs to join: shown once, the secret is not kept."""

    id: str
    secret: str = field(repr=False)


def reserve() -> Opened:
    """Id and key of a session that may be opened later: until then it is an unknown one."""
    return Opened(uuid.uuid4().hex, secrets.token_urlsafe(24))


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionRequest:
    """What a session of the gateway begins with, and its episode in the pool.

    Whoever lets the library run an episode (:class:`~clawgym.rollout.EpisodeRequest`) gives ``channel``, ``group``,
    ``sampling``, ``adapter`` and ``meta``; the rest is filled in.
    """

    channel: str = "train"
    """What the episode is for: a trainer fetches from one channel."""
    group: str | None = None
    """A group of the pool (:meth:`~clawgym.pool.Pool.open_group`); ``None``: a group of one."""
    sampling: Sampling | None = None
    """Overrides what the requests of the agent ask for. ``None``: an agent with a gateway of its own chooses."""
    adapter: str | None = None
    """The LoRA adapter of the engine that samples."""
    meta: Mapping[str, Any] = field(default_factory=dict)
    """Stored with the episode; anything that JSON can hold."""
    task_id: str = ""
    task_hash: str = ""
    sample: int = 0
    """0-based index of the episode among those of its task or group."""
    seed: int = 0
    agent: str = ""
    most_turns: int | None = None
    """Model calls; further ones are refused. ``None``: no limit."""
