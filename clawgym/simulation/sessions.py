"""Conversations: a request, a reply, what the person says to it, until they are content or tired.

Invariants: every reply has an answer of the person; the rules themselves reach the assistant in complaints alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from clawgym.engines.protocol import Engine, Sampling
from clawgym.records import Episode, Observation, Outcome, Step
from clawgym.records.manifest import now
from clawgym.simulation.users import THANKS, Request, Score, User

__all__ = ["Session", "sessions_to_stable", "talk"]


@dataclass(frozen=True)
class Session:
    """One conversation."""

    request: Request
    replies: tuple[str, ...]
    answers: tuple[str, ...]
    """What the person said to each."""
    scores: tuple[Score, ...]
    """Of each; neither the assistant nor a judge sees them."""

    @property
    def content(self) -> bool:
        """Whether the person was content in the end."""
        return self.answers[-1] == THANKS

    def episode(self) -> Episode:
        """The conversation as a transcript: what was said last is in no prompt, and a judge finds it here."""
        steps = tuple(
            Step("agent", reply, now(), observations=(Observation(answer),))
            for reply, answer in zip(self.replies, self.answers, strict=True)
        )
        outcome = Outcome.SOLVED if self.content else Outcome.FAILED
        return Episode(self.request.text, "", 0, 0, "assistant", outcome, steps=steps)


async def talk(
    engine: Engine,
    user: User,
    request: Request,
    *,
    turns: int,
    sampling: Sampling,
    seed: Callable[[int], int] | None = None,
) -> Session:
    """Let ``user`` ask, and complain until content, ``turns`` replies at most. ``seed``: of each reply, by its number.

    Raises what the engine raises, and :class:`ValueError` for no turn at all."""
    if turns < 1:
        raise ValueError(f"turns={turns}: a conversation has a reply: give 1 or more")
    messages: list[dict[str, Any]] = [{"role": "user", "content": request.text}]
    replies: list[str] = []
    answers: list[str] = []
    scores: list[Score] = []
    while len(replies) < turns and THANKS not in answers:
        asked = sampling if seed is None else replace(sampling, seed=seed(len(replies)))
        reply = (await engine.complete(messages, sampling=asked)).text
        answer = user.answer(request, reply)
        replies.append(reply)
        answers.append(answer)
        scores.append(user.score(request, reply))
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": answer}]
    return Session(request, tuple(replies), tuple(answers), tuple(scores))


def sessions_to_stable(scores: Sequence[float], *, threshold: float = 0.8, window: int = 16) -> int | None:
    """After how many sessions the mean of the last ``window`` scores reaches ``threshold`` and stays there to the end;
    ``None`` where it does not."""
    stable = None
    for end in range(len(scores), window - 1, -1):
        if sum(scores[end - window : end]) < threshold * window - 1e-9:
            break
        stable = end
    return stable
