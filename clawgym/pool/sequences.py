"""Convert turns to training sequences.

Invariants: a sequence consists of the ids that the engine received or sampled, in order. Every sampled id is trained on
in one sequence only. A sequence ends before a turn whose tokens are not exact. An episode without branches is one
sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, get_args

from clawgym.records import Role, TrainingSequence, Turn

__all__ = ["TurnPath", "paths_of", "sequences_of"]


class _Node(Protocol):
    """The attributes that determine the sequences: of a :class:`~clawgym.records.Turn`, or of a stored row."""

    @property
    def parent(self) -> int | None: ...
    @property
    def role(self) -> str: ...
    @property
    def flaw(self) -> str | None: ...
    @property
    def sampled(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class TurnPath:
    """One training sequence, as indices of turns."""

    turns: tuple[int, ...]
    trained: frozenset[int]
    """The turns whose sampled ids are trained on in this sequence."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The attributes of a turn that :func:`paths_of` needs."""

    parent: int | None
    role: str
    flaw: str | None
    sampled: bool


def paths_of(turns: Sequence[_Node], *, roles: Sequence[str] = ("main",)) -> list[TurnPath]:
    """The sequences of :func:`sequences_of`, without their ids."""
    wanted = frozenset(roles)
    if bad := wanted - (frozenset(get_args(Role)) - {"unknown"}):
        raise ValueError(f"roles {sorted(bad)} cannot be trained: choose among main, subagent, compaction")
    proved: list[bool] = []
    needed: set[int] = set()
    for index, turn in enumerate(turns):
        if turn.parent is not None and not 0 <= turn.parent < index:
            raise ValueError(f"turn {index} continues turn {turn.parent}: a parent comes before its child")
        proved.append(turn.flaw is None and (turn.parent is None or proved[turn.parent]))
        if proved[index] and turn.role in wanted and turn.sampled:
            above: int | None = index
            while above is not None and above not in needed:
                needed.add(above)
                above = turns[above].parent
    leaves = needed - {turns[index].parent for index in needed}
    taken: set[int] = set()
    paths = []
    for leaf in sorted(leaves):
        path: list[int] = []
        step: int | None = leaf
        while step is not None:
            path.append(step)
            step = turns[step].parent
        path.reverse()
        trained = frozenset(i for i in path if i not in taken and turns[i].role in wanted and turns[i].sampled)
        taken |= trained
        paths.append(TurnPath(tuple(path), trained))
    return paths


def sequences_of(turns: Sequence[Turn], *, roles: Sequence[Role] = ("main",)) -> list[TrainingSequence]:
    """One training sequence for every leaf of the tree of ``turns`` (by :attr:`~clawgym.records.Turn.parent`) of
    ``roles``.

    A turn with a ``flaw`` is left out, with all turns that continue it. Turns of other roles are context only; they are
    left out at the end of a sequence. Ids shared by several sequences are trained on in the first one. Raises
    :class:`ValueError` for a role that cannot be trained on.
    """
    shapes = [Shape(t.parent, t.role, t.flaw, bool(t.sampled_ids)) for t in turns]
    return [_row(turns, path) for path in paths_of(shapes, roles=roles)]


def _row(turns: Sequence[Turn], path: TurnPath) -> TrainingSequence:
    ids: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    versions: list[int | None] = []
    turn_of: list[int] = []
    images: list[str] = []
    for index in path.turns:
        turn = turns[index]
        count = len(turn.sampled_ids)
        ids += turn.context_ids
        ids += turn.sampled_ids
        mask += [0] * len(turn.context_ids)
        images += turn.images
        if index in path.trained:
            mask += [1] * count
            logprobs += turn.logprobs
            versions += [turn.policy_version] * count
            turn_of += [index] * count
        else:
            mask += [0] * count
    return TrainingSequence(
        path.turns, tuple(ids), tuple(mask), tuple(logprobs), tuple(versions), tuple(turn_of), tuple(images)
    )
