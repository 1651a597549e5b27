"""Hindsight distillation during training: the policy, given a hint of the judge, is the teacher of its own turns.

Invariants: a teacher scores exactly the sampled ids. A turn without a hint, or whose context cannot be rebuilt exactly,
has no teacher and no distillation term.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping

from clawgym.gateway.render import Renderer
from clawgym.pool.states import PROCESS_REWARD, Batch, TrainingPool
from clawgym.records.judge import Judgement
from clawgym.rewards.hints import HintedTurn, NoTeacher, Teacher, teach, tools_of
from clawgym.rewards.scoring import Scorer
from clawgym.trainers.config import Distillation

__all__ = ["Teachers", "find_teachers"]

Teachers = Mapping[tuple[str, int], Teacher]
"""(episode, turn) -> the teacher of that turn."""


async def find_teachers(
    batch: Batch, about: Distillation, pool: TrainingPool, renderer: Renderer, scorer: Scorer
) -> tuple[Teachers, dict[str, float]]:
    """The teachers of a batch, from the hints of its judge; and metrics: turns with a teacher, and turns without one by
    cause.

    ``scorer`` computes log-probs under the policy before the step."""
    asked: dict[tuple[str, int], HintedTurn] = {}
    for episode in (member.episode for group in batch.groups for member in group.episodes):
        turns = await asyncio.to_thread(pool.turns, episode.id)
        said = await asyncio.to_thread(pool.about_turn_rewards, episode.id)
        for index, judgement in said.get(PROCESS_REWARD, {}).items():
            tools = await asyncio.to_thread(tools_of, pool, turns, index)
            asked[episode.id, index] = HintedTurn(turns, index, Judgement.from_about(judgement).hints, tools)
    teachers = await teach(list(asked.values()), renderer, scorer, top_k=about.top_k, how=about.choose)
    found: dict[tuple[str, int], Teacher] = {}
    missing: Counter[str] = Counter()
    overlaps: list[float] = []
    for key, teacher in zip(asked, teachers, strict=True):
        match teacher:
            case NoTeacher(cause):
                missing[cause] += 1
            case Teacher():
                found[key] = teacher
                if len(teacher.hints) > 1:
                    overlaps.append(float(teacher.overlap.max(0).mean()))
    metrics = {f"opd/no_teacher_{cause}": float(n) for cause, n in missing.items()}
    metrics["opd/turns_taught"] = float(len(found))
    if overlaps:
        metrics["opd/overlap"] = sum(overlaps) / len(overlaps)
    return found, metrics
