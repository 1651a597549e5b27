"""Penalties on form: calls that cannot be read, and answers that run on. Pure, and off unless given a weight.

Invariant: a penalty is 0 or less, is of the whole episode, and stays beside the outcome by its name. None sets a reward
to 0: that would punish most where there was most to lose.
"""

from __future__ import annotations

from collections.abc import Sequence

from clawgym.records import Turn

__all__ = ["malformed_share", "overlong", "penalties"]


def malformed_share(turns: Sequence[Turn]) -> float:
    """Share of the turns of role main in which at least one tool call could not be read, in [0, 1]; 0 without turns."""
    main = [turn for turn in turns if turn.role == "main"]
    return sum(turn.malformed_calls > 0 for turn in main) / len(main) if main else 0.0


def overlong(length: int, *, longest: int, slack: int) -> float:
    """Soft overlong punishment, in [-1, 0]: 0 up to ``longest - slack``, then falling evenly to -1 at ``longest``.

    ``length``, ``longest`` (L_max) and ``slack`` (L_cache, 1 to ``longest``) in tokens.
    Source: DAPO (arXiv 2503.14476), equation 13. Raises :class:`ValueError` for bounds that do not fit.
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
    """The penalties of one episode by name, each times its weight; none for a weight of 0.

    ``malformed``: weight of :func:`malformed_share`. ``length``: weight of :func:`overlong`, of the ids that the turns
    of role main sampled, all together. Raises :class:`ValueError` for a weight below 0 and a length without bounds.
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
