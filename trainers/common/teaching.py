"""Hindsight distillation while training: the policy, told what it learnt afterwards, teaches what it should have said.

Invariants: a teacher's log-probs are those of the sampled ids themselves; a turn without a hint, or whose context
cannot be rebuilt exactly, has no teacher, and its term is dropped.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence

from clawgym.gateway.render import Renderer
from clawgym.pool import Pool
from clawgym.pool.states import PROCESS_REWARD, Batch
from clawgym.records.judge import Judgement
from clawgym.rewards.hints import NoTeacher, Teacher, teach, tools_of
from clawgym.rewards.scoring import Scorer
from clawgym.trainers.config import Distillation

__all__ = ["Taught", "teachers"]

Taught = Mapping[tuple[str, int], Sequence[float]]
"""(episode, turn) -> the teacher's log-prob of each sampled id."""


async def teachers(
    batch: Batch, about: Distillation, pool: Pool, renderer: Renderer, scorer: Scorer
) -> tuple[Taught, dict[str, float]]:
    """The teachers of a batch by the hints that its judge gave, and how many turns have none, by cause.

    ``scorer`` is the policy before the step."""
    found: dict[tuple[str, int], Sequence[float]] = {}
    missing: Counter[str] = Counter()
    overlaps: list[float] = []
    for episode in (member.episode for group in batch.groups for member in group.episodes):
        turns = await asyncio.to_thread(pool.turns, episode.id)
        said = await asyncio.to_thread(pool.about_turn_rewards, episode.id)
        for index, judgement in said.get(PROCESS_REWARD, {}).items():
            hints = Judgement.from_about(judgement).hints
            tools = await asyncio.to_thread(tools_of, pool, turns, index)
            teacher = await teach(
                turns, index, hints, renderer, scorer, tools=tools, top_k=about.top_k, how=about.choose
            )
            match teacher:
                case NoTeacher(cause):
                    missing[cause] += 1
                case Teacher():
                    found[episode.id, index] = teacher.logprobs.tolist()
                    if len(teacher.hints) > 1:
                        overlaps.append(float(teacher.overlap.max(0).mean()))
    figures = {f"opd/no_teacher_{cause}": float(n) for cause, n in missing.items()}
    figures["opd/turns_taught"] = float(len(found))
    if overlaps:
        figures["opd/overlap"] = sum(overlaps) / len(overlaps)
    return found, figures
