"""Conversations with simulated users: a request, then replies and answers until the user is content.

Invariants: the user answers every reply. The assistant learns the rules from complaints only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from clawgym.engines.protocol import Engine, Sampling
from clawgym.records import Episode, Observation, Outcome, Step
from clawgym.records.manifest import now
from clawgym.simulation.users import THANKS, ReplyScore, User, UserRequest

__all__ = ["SimulatedSession", "sessions_to_stable", "talk"]


@dataclass(frozen=True)
class SimulatedSession:
    """One conversation."""

    request: UserRequest
    replies: tuple[str, ...]
    answers: tuple[str, ...]
    """The user's answer to each reply."""
    scores: tuple[ReplyScore, ...]
    """The score of each reply; neither the assistant nor a judge sees it."""

    @property
    def content(self) -> bool:
        """Whether the user was content in the end."""
        return self.answers[-1] == THANKS

    def episode(self) -> Episode:
        """The conversation as an episode. Its transcript includes the last answer, which is in no prompt, for
        judges."""
        steps = tuple(
            Step("agent", reply, now(), observations=(Observation(answer),))
            for reply, answer in zip(self.replies, self.answers, strict=True)
        )
        outcome = Outcome.SOLVED if self.content else Outcome.FAILED
        return Episode(self.request.text, "", 0, 0, "assistant", outcome, steps=steps)


async def talk(
    engine: Engine,
    user: User,
    request: UserRequest,
    *,
    turns: int,
    sampling: Sampling,
    seed: Callable[[int], int] | None = None,
) -> SimulatedSession:
    """Run a conversation: ``user`` sends the request and complains until content.

    Args:
        engine: writes the replies.
        user: the simulated user.
        request: what the user asks.
        turns: most replies, at least 1.
        sampling: parameters of the engine.
        seed: seed of each reply, by its index.

    Raises the errors of the engine, and :class:`ValueError` if ``turns`` is less than 1.
    """
    if turns < 1:
        raise ValueError(f"turns={turns}: a conversation has a reply: give 1 or more")
    messages: list[dict[str, Any]] = [{"role": "user", "content": request.text}]
    replies: list[str] = []
    answers: list[str] = []
    scores: list[ReplyScore] = []
    while len(replies) < turns and THANKS not in answers:
        asked = sampling if seed is None else replace(sampling, seed=seed(len(replies)))
        reply = (await engine.complete(messages, sampling=asked)).text
        answer = user.answer(request, reply)
        replies.append(reply)
        answers.append(answer)
        scores.append(user.score(request, reply))
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": answer}]
    return SimulatedSession(request, tuple(replies), tuple(answers), tuple(scores))


def sessions_to_stable(scores: Sequence[float], *, threshold: float = 0.8, window: int = 16) -> int | None:
    """The number of sessions after which the mean of the last ``window`` scores stays at ``threshold`` or above.

    None if it does not stay there to the end.
    """
    stable = None
    for end in range(len(scores), window - 1, -1):
        if sum(scores[end - window : end]) < threshold * window - 1e-9:
            break
        stable = end
    return stable
