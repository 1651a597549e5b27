"""The input and the result of an episode: :class:`EpisodeRequest` and :class:`Ended`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from clawgym.gateway.request import SessionRequest
from clawgym.pool import EpisodeEnd
from clawgym.records import Episode, Task, VerifierResult
from clawgym.verifiers.reuse import Grades

__all__ = ["Ended", "EpisodeRequest", "RewardName", "reward_of"]

RewardName = Literal["strict", "official", "corrected", "checks"]
"""The score that is the reward of an episode; see :func:`reward_of`."""


@dataclass(frozen=True, kw_only=True)
class EpisodeRequest:
    """One attempt at one task.

    >>> request = EpisodeRequest(task=task, seed=7, reward="corrected", baseline=0.25)  # doctest: +SKIP
    """

    task: Task
    seed: int
    """Seed of all randomness in the episode, in [0, 2**31)."""
    sample: int = 0
    """0-based index among the attempts at this task."""
    reward: RewardName = "strict"
    baseline: float | None = None
    """The no-model baseline: the best score of the policies without a model, in [0, 1]. For the baseline-adjusted
    score."""
    keep_workspace: bool = True
    """Whether the episode contains the final workspace as an archive."""
    milestones: bool = False
    """Whether to measure the progress after each turn (:mod:`clawgym.rollout.milestones`). Not for a
    :class:`~clawgym.agents.protocol.ResidentAgent`, whose turns do not pass through the library's tools."""
    grades: Grades | None = None
    """Reports of verifiers on identical workspaces of earlier episodes, to reuse; ``None``: every verifier is run."""
    session: SessionRequest | None = None
    """Settings of the gateway session, for an agent whose model calls go through a gateway. ``None``: channel ``eval``,
    and the agent's own settings."""

    def session_of(self, agent: str) -> SessionRequest:
        """Return :attr:`session` with the task, sample and seed of this attempt and the name of ``agent``."""
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
    """The score that the request chose; ``None`` after an infrastructure error."""
    truncated: bool
    """Whether a budget or an infrastructure error ended the work (Gymnasium's ``truncated``)."""
    penalties: Mapping[str, float] = field(default_factory=dict)
    """Name -> penalty that training adds to the reward, 0 or less."""
    progress: tuple[float | None, ...] = ()
    """Mean score of the verifier's plain checks, before the first turn and after each turn; None where it could not be
    measured. Empty unless the request asked for ``milestones`` and the task allows it, and if it is ``unstable``."""
    unstable: bool = False
    """Whether two measurements of the progress of the final workspace differ: the verifier is not deterministic."""

    def end(self) -> EpisodeEnd:
        """Return what the pool stores about the end of the episode."""
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
    """Return the reward of a graded workspace, or ``None`` without a result.

    ``strict`` and ``official``: the score of that name. ``corrected``: the baseline-adjusted score, or the strict score
    if the task has no baseline. ``checks``: the sum of the named checks, in [0, number of checks].
    """
    if result is None:
        return None
    if reward == "checks":
        return float(sum(result.checks.values()))
    value = getattr(result, reward)
    return float(result.strict if value is None else value)
