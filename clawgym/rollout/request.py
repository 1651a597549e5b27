"""What an episode begins with, and what it comes to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from clawgym.gateway.sessions import SessionRequest
from clawgym.pool import EpisodeEnd
from clawgym.records import Episode, Task, VerifierResult

__all__ = ["Ended", "EpisodeRequest", "RewardName", "reward_of"]

RewardName = Literal["strict", "official", "corrected", "checks"]
"""Which score of a graded workspace is the reward of its episode; see :func:`reward_of`."""


@dataclass(frozen=True, kw_only=True)
class EpisodeRequest:
    """One attempt at one task.

    >>> request = EpisodeRequest(task=task, seed=7, reward="corrected", baseline=0.25)  # doctest: +SKIP
    """

    task: Task
    seed: int
    """Of everything in the episode that is random: in [0, 2**31)."""
    sample: int = 0
    """0-based index among the attempts at this task."""
    reward: RewardName = "strict"
    baseline: float | None = None
    """The best score of the cheap policies that use no model, for the baseline-adjusted score; in [0, 1]."""
    keep_workspace: bool = True
    """Whether the episode holds the frozen workspace as an archive."""
    session: SessionRequest | None = None
    """For an agent whose model calls go through a gateway; ``None``: channel ``eval``, the rest as the agent likes."""

    def session_of(self, agent: str) -> SessionRequest:
        """:attr:`session`, with what the gateway stores about this attempt by ``agent``."""
        return replace(
            self.session or SessionRequest(channel="eval"),
            task_id=self.task.id,
            task_hash=self.task.content_hash,
            sample=self.sample,
            seed=self.seed,
            agent=agent,
        )


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How an attempt ended."""

    episode: Episode
    reward: float | None
    """The score that the request chose; ``None`` for an infrastructure error."""
    truncated: bool
    """Whether a budget or an infrastructure error ended the work, and not the agent (``truncated`` of Gymnasium)."""
    penalties: Mapping[str, float] = field(default_factory=dict)
    """Name -> what training adds to the reward, 0 or less."""

    def end(self) -> EpisodeEnd:
        """What the pool stores of it."""
        result = self.episode.result
        return EpisodeEnd(
            outcome=self.episode.outcome,
            cause=self.episode.cause,
            reward=self.reward,
            rewards={} if result is None else {"strict": result.strict, "official": result.official},
            penalties=self.penalties,
            meta={"judged_by": result.judged_by} if result is not None and result.judged_by else {},
        )


def reward_of(result: VerifierResult | None, reward: RewardName) -> float | None:
    """The reward of a graded workspace; ``None`` without a result.

    ``strict`` and ``official``: the score of that name. ``corrected``: the baseline-adjusted score, or the strict one
    where the task has no baseline. ``checks``: the sum of the named checks, in [0, number of checks].
    """
    if result is None:
        return None
    if reward == "checks":
        return float(sum(result.checks.values()))
    value = getattr(result, reward)
    return float(result.strict if value is None else value)
