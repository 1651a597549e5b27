"""Histories as written by a gateway: a seeded engine, and an agent that branches, compacts and fails."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

from hypothesis import strategies as st

from clawgym.pool import EpisodeEnd, Pool
from clawgym.records import Turn

VOCABULARY = 50_000


def sampled(dice: random.Random, count: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
    ids = tuple(dice.randrange(VOCABULARY) for _ in range(count))
    return ids, tuple(-dice.expovariate(1.0) - 1e-9 for _ in range(count))


def turn(dice: random.Random, index: int, *, parent: int | None, **changes: object) -> Turn:
    """One clean turn, as an engine gives it."""
    ids, logprobs = sampled(dice, dice.randint(1, 30))
    made = Turn(
        context_ids=tuple(dice.randrange(VOCABULARY) for _ in range(dice.randint(1, 40))),
        sampled_ids=ids,
        logprobs=logprobs,
        policy_version=index // 3,
        parent=parent,
        sampling={"temperature": 1.0},
        seconds={"total": 0.5},
        messages=({"role": "user", "content": f"question {index}"},),
        reply={"role": "assistant", "content": f"answer {index}"},
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def chain(seed: int, length: int, **changes: object) -> list[Turn]:
    """Turns that each continue the one before; the first one continues ``changes["parent"]``, if given."""
    dice = random.Random(seed)
    first = changes.pop("parent", None)
    return [turn(dice, n, parent=n - 1 if n else first, **changes) for n in range(length)]  # type: ignore[arg-type]


@st.composite
def histories(draw: st.DrawFn, *, flaws: bool = True) -> list[Turn]:
    """Trees of turns with every role, and with flaws."""
    dice = random.Random(draw(st.integers(0, 2**32)))
    turns: list[Turn] = []
    for index in range(draw(st.integers(0, 12))):
        above = draw(st.sampled_from(["last", "last", "last", "root", "any"])) if index else "root"
        parent = None if above == "root" else index - 1 if above == "last" else draw(st.integers(0, index - 1))
        changes: dict[str, object] = {
            "role": draw(st.sampled_from(["main"] * 5 + ["subagent", "compaction", "unknown"]))
        }
        kind = draw(st.sampled_from(["clean"] * 8 + ["text", "constrained", "aborted", "silent"]))
        if kind == "text" and flaws:
            changes |= {"context_ids": (), "sampled_ids": (), "logprobs": (), "flaw": "text-only"}
        elif kind == "constrained" and flaws:
            changes |= {"flaw": "constrained"}
        elif kind == "aborted":
            changes |= {"finish_reason": "aborted"}
        elif kind == "silent":
            changes |= {"sampled_ids": (), "logprobs": (), "finish_reason": "aborted"}
        turns.append(turn(dice, index, parent=parent, **changes))
    return turns


def store(pool: Pool, turns: list[Turn], *, outcome: str | None = "solved", **kwargs: object) -> str:
    """An episode with these turns; closed unless ``outcome`` is ``None``."""
    id = pool.open_episode(**kwargs)  # type: ignore[arg-type]
    pool.append([(id, n, one) for n, one in enumerate(turns)])
    if outcome is not None:
        pool.close_episode(id, EpisodeEnd(outcome=outcome, reward=float(outcome == "solved")))
    return id


def ids_of(groups: object) -> Iterator[str]:
    for group in groups:  # type: ignore[attr-defined]
        for member in group.episodes:
            yield member.episode.id
