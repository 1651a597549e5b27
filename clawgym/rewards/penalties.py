"""Penalties on form: malformed calls and overlong answers. Pure functions; off unless given a weight.

Invariant: a penalty is 0 or less, applies to the whole episode, and is stored by name beside the outcome. It is added
to the reward; setting the reward to 0 instead would punish the best episodes most.
"""

from __future__ import annotations

from collections.abc import Sequence

from clawgym.records import Turn

__all__ = ["malformed_share", "overlong", "penalties"]


def malformed_share(turns: Sequence[Turn]) -> float:
    """Share of the turns with role ``main`` that have a malformed tool call, in [0, 1]; 0 without turns."""
    main = [turn for turn in turns if turn.role == "main"]
    return sum(turn.malformed_calls > 0 for turn in main) / len(main) if main else 0.0


def overlong(length: int, *, longest: int, slack: int) -> float:
    """Soft overlong punishment, in [-1, 0]: 0 up to ``longest - slack``, then falling linearly to -1 at ``longest``.

    ``length``, ``longest`` (L_max) and ``slack`` (L_cache, 1 to ``longest``) in tokens.
    Source: DAPO (arXiv 2503.14476), equation 13. Raises :class:`ValueError` for invalid bounds.
    """
    if not 0 < slack <= longest:
        raise ValueError(f"slack {slack} of longest {longest}: give 1 to {longest} tokens of slack")
    return -min(1.0, max(0.0, (length - (longest - slack)) / slack))


def penalties(
    turns: Sequence[Turn],
    *,
    malformed: float = 0.0,
    length: float = 0.0,
    longest: int | None = None,
    slack: int | None = None,
) -> dict[str, float]:
    """The weighted penalties of one episode, by name; those with weight 0 are left out.

    Args:
        turns: the turns of the episode; only those with role ``main`` count.
        malformed: weight of :func:`malformed_share`.
        length: weight of :func:`overlong`, applied to the total number of sampled ids.
        longest: bound of ``length``, in tokens.
        slack: bound of ``length``, in tokens.

    Raises:
        ValueError: a weight is negative, or ``length`` has no bounds.
    """
    for name, weight in (("malformed", malformed), ("length", length)):
        if not weight >= 0:
            raise ValueError(f"weight {name}={weight!r}: give 0 (off) or more")
    taken = {}
    if malformed:
        taken["malformed"] = -malformed * malformed_share(turns)
    if length:
        if longest is None or slack is None:
            raise ValueError("a penalty on length needs bounds: give longest and slack, in tokens")
        sampled = sum(len(turn.sampled_ids) for turn in turns if turn.role == "main")
        taken["length"] = length * overlong(sampled, longest=longest, slack=slack)
    return taken
