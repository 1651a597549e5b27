"""Hindsight hints: distillation from the policy with a hint in its prompt to the policy without it.

Invariants: the teacher scores the sampled ids, never re-encoded text. Its prompt equals the stored ids except for the
message with the hint. If that cannot be guaranteed, or there is no hint, there is no teacher, and the loss term of
these tokens is left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from clawgym.errors import ClawGymError, PoolError
from clawgym.records import Turn, common_prefix, prompt_ids
from clawgym.rewards.scoring import Scored, Scorer, ScoreRequest

if TYPE_CHECKING:
    from clawgym.gateway.render import Renderer
    from clawgym.pool.states import TrainingPool

__all__ = ["Choice", "HintedTurn", "NoTeacher", "Teacher", "choose", "hinted_prompt", "teach", "tools_of", "with_hint"]

Choice = Literal["sequence", "token", "shortest"]
"""How to choose among several hints. ``sequence``: the teacher whose most likely ids overlap most with the student's
over the whole turn. ``token``: the same at each token. ``shortest``: the hint with the fewest characters."""


@dataclass(frozen=True)
class Teacher:
    """The log-probabilities of one turn's S sampled ids under the hinted policy."""

    logprobs: np.ndarray
    """(S,) float32, at the temperature of the turn."""
    top_ids: np.ndarray
    """(S, K) int64"""
    top_logprobs: np.ndarray
    """(S, K) float32"""
    hint_of: np.ndarray
    """(S,) int64: index into ``hints`` of the teacher at each token."""
    hints: tuple[str, ...]
    """The hints whose prompts could be built."""
    overlap: np.ndarray
    """(C, S) float32: share of the student's K most likely ids that are among the teacher's; NaN with one hint."""


@dataclass(frozen=True)
class HintedTurn:
    """A turn of an episode, and the hints for it."""

    turns: Sequence[Turn]
    """The turns of the episode."""
    index: int
    hints: Sequence[str]
    tools: Sequence[Mapping[str, Any]] = ()
    """The turn's tools (:func:`tools_of`)."""

    @property
    def turn(self) -> Turn:
        """The turn itself."""
        return self.turns[self.index]

    @property
    def temperature(self) -> float:
        """The temperature at which the turn was sampled."""
        asked = self.turn.sampling.get("temperature")
        return 1.0 if asked is None else float(asked)


@dataclass(frozen=True)
class NoTeacher:
    """Why a turn has no teacher.

    ``cause`` is ``no-hint``, ``flaw``, ``no-sample``, ``greedy``, ``images``, ``context`` (the prompt cannot be
    rendered again exactly) or ``not-finite``.
    """

    cause: str


def with_hint(message: Mapping[str, Any], hint: str) -> dict[str, Any]:
    """A user's message with the paragraph ``[hint] ...`` appended."""
    content, paragraph = message.get("content"), f"[hint] {hint.strip()}"
    if isinstance(content, list):
        return {**message, "content": [*content, {"type": "text", "text": f"\n\n{paragraph}"}]}
    return {**message, "content": f"{content}\n\n{paragraph}" if content else paragraph}


def tools_of(pool: TrainingPool, turns: Sequence[Turn], index: int) -> list[dict[str, Any]]:
    """The tool definitions of a turn, as stored by the gateway; empty if there were none or they were not stored."""
    try:
        return json.loads(pool.image(turns[index].tools).data) if turns[index].tools else []
    except PoolError:
        return []


def hinted_prompt(
    turns: Sequence[Turn], index: int, hint: str, renderer: Renderer, tools: Sequence[Mapping[str, Any]] = ()
) -> tuple[int, ...] | None:
    """The prompt ids of ``turns[index]`` with ``hint`` in the last user message on its path; None if that is
    impossible.

    Only the context that contains this message is rendered again; all other ids are the stored ones. It is also
    rendered without the hint. If that reproduces the stored ids, they are replaced by the rendering with the hint. If
    it does not (tools with keys in another order, a template that inserts the date), it must reproduce them from the
    end of an earlier message on; the stored ids before that are kept.
    """
    path, above = [index], turns[index].parent
    while above is not None:
        path.append(above)
        above = turns[above].parent
    for place, at in enumerate(path):
        messages = [dict(message) for message in turns[at].messages]
        users = [n for n, message in enumerate(messages) if message.get("role") == "user"]
        if not users:
            continue
        with_the_hint = [*messages[: users[-1]], with_hint(messages[users[-1]], hint), *messages[users[-1] + 1 :]]
        before = turns[path[place + 1]].sampled_ids if place + 1 < len(path) else None
        try:
            plain, hinted = (
                renderer.prompt(m, tools) if before is None else renderer.increment(before, m, tools)
                for m in (messages, with_the_hint)
            )
        except (ClawGymError, KeyError, TypeError):  # refused by the template, or not a message of the gateway
            return None
        context = _spliced(turns[at].context_ids, plain, hinted, renderer.stop_ids)
        if context is None:
            return None
        whole = prompt_ids(turns, index)
        up_to = len(prompt_ids(turns, at))
        return (*whole[: up_to - len(turns[at].context_ids)], *context, *whole[up_to:])
    return None


def _spliced(
    stored: tuple[int, ...], plain: tuple[int, ...], hinted: tuple[int, ...], ends: frozenset[int]
) -> tuple[int, ...] | None:
    """``stored`` with the change from ``plain`` to ``hinted``; None if it differs within the message with the hint."""
    if plain == stored:
        return hinted
    agree, same = common_prefix(stored[::-1], plain[::-1]), common_prefix(hinted, plain)
    # A tokenizer first splits a text at special tokens, so the ids after one do not depend on the text before it. So
    # the sequences can be joined at the last end of a message that all three share.
    for cut in range(min(same, len(plain)) - 1, len(plain) - agree - 1, -1):
        if plain[cut] in ends:
            return (*stored[: len(stored) - (len(plain) - cut)], *hinted[cut:])
    return None


def choose(
    student: Scored, candidates: Sequence[Scored], how: Choice = "sequence", *, lengths: Sequence[int] = ()
) -> tuple[np.ndarray, np.ndarray]:
    """Choose the teacher of each token: indices (S,) and the overlaps (C, S) of the C candidates. Ties: the first.

    The overlap at a token is |top-K of the student and of the candidate| / K. ``lengths`` (C,) are the lengths of the
    hints, for ``shortest``. Raises :class:`ValueError` for no candidates, other shapes, or an unknown choice.
    """
    if how not in ("sequence", "token", "shortest"):
        raise ValueError(f"choice {how!r} is not known: choose sequence, token or shortest")
    if not candidates or any(c.top_ids.shape != student.top_ids.shape for c in candidates):
        raise ValueError("one candidate at least, each with as many likeliest ids as the student: score all alike")
    k = max(1, student.top_ids.shape[1])
    both = [(c.top_ids[:, :, None] == student.top_ids[:, None, :]).any(-1).sum(-1) / k for c in candidates]
    overlap = np.stack(both).astype(np.float32)
    tokens = overlap.shape[1]
    if how == "token":
        return overlap.argmax(0), overlap
    if how == "shortest" and len(lengths) != len(candidates):
        raise ValueError(f"{len(lengths)} lengths for {len(candidates)} hints: give one for each")
    best = int(np.argmin(lengths)) if how == "shortest" else int(overlap.mean(1).argmax())
    return np.full(tokens, best), overlap


async def teach(
    asked: Sequence[HintedTurn], renderer: Renderer, scorer: Scorer, *, top_k: int = 20, how: Choice = "sequence"
) -> list[Teacher | NoTeacher]:
    """Score turns with each of their candidate hints. Returns the teacher of each turn, or why it has none.

    ``scorer`` is the policy itself. It scores the prompt with each hint and, with more than one hint, the original
    prompt: those of all turns at once, so that they can share forward passes. Raises the errors of the scorer.
    """
    prompts = [_prompts(one, renderer) for one in asked]
    requests = [
        ScoreRequest(prompt, one.turn.sampled_ids, top_k, one.temperature)
        for one, found in zip(asked, prompts, strict=True)
        if not isinstance(found, NoTeacher)
        for prompt in found.values()
    ]
    scores = iter(await scorer.score(requests))
    return [
        found if isinstance(found, NoTeacher) else _chosen({hint: next(scores) for hint in found}, how)
        for found in prompts
    ]


def _prompts(one: HintedTurn, renderer: Renderer) -> dict[str | None, tuple[int, ...]] | NoTeacher:
    """The prompt with each hint; with more than one hint, also the original prompt, as None."""
    for missing, cause in (
        (not one.hints, "no-hint"),
        (one.turn.flaw is not None, "flaw"),
        (not one.turn.sampled_ids, "no-sample"),
        (not one.temperature, "greedy"),
        (_shows_images(one.turns, one.index), "images"),
    ):
        if missing:
            return NoTeacher(cause)
    found: dict[str | None, tuple[int, ...]] = {}
    for hint in one.hints:
        if (prompt := hinted_prompt(one.turns, one.index, hint, renderer, one.tools)) is not None:
            found[hint] = prompt
    if len(found) > 1:
        found[None] = prompt_ids(one.turns, one.index)
    return found or NoTeacher("context")


def _chosen(scores: dict[str | None, Scored], how: Choice) -> Teacher | NoTeacher:
    """The teacher of a turn, from the scores with each hint and without one (None)."""
    student = scores.pop(None, None)
    known = {h: scored for h, scored in scores.items() if h is not None and np.isfinite(scored.logprobs).all()}
    if not known:
        return NoTeacher("not-finite")
    hints, teachers = tuple(known), list(known.values())
    tokens = np.arange(len(teachers[0].logprobs))
    if student is None or len(hints) == 1:
        which, overlap = np.zeros(len(tokens), np.int64), np.full((1, len(tokens)), np.nan, np.float32)
    else:
        which, overlap = choose(student, teachers, how, lengths=[len(h) for h in hints])
    columns = ("logprobs", "top_ids", "top_logprobs")
    taken = {name: np.stack([getattr(t, name) for t in teachers])[which, tokens] for name in columns}
    return Teacher(**taken, hint_of=which, hints=hints, overlap=overlap)


def _shows_images(turns: Sequence[Turn], index: int) -> bool:
    at: int | None = index
    while at is not None:
        if turns[at].images:
            return True
        at = turns[at].parent
    return False
