"""Read episodes, turns, batches and counts, without changing anything."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

import sqlalchemy as sa

from clawgym.errors import PoolError
from clawgym.pool._fetch import delivered
from clawgym.pool._pack import from_json, text, unpack
from clawgym.pool._schema import batches, episodes, groups, images, turn_rewards, turns
from clawgym.pool.sequences import sequences_of
from clawgym.pool.states import PROCESS_REWARD, Batch, BatchEpisode, BatchGroup, PooledEpisode
from clawgym.records import Turn

__all__ = [
    "UNSCORED",
    "about_turn_rewards",
    "batch",
    "flaws",
    "page",
    "pooled",
    "row",
    "stats",
    "turn_rewards_of",
    "turns_of",
]

_T = TypeVar("_T")
_TOOLS_TYPE = "application/json"
"""Media type of the tool definitions that are kept beside the images."""
_AT_ONCE = 500
UNSCORED = "-unscored"
"""After the name of a reward: what was said about turns that got none; the stored value has no meaning."""
_PENALTY = "penalty-"
_JOINED = sa.select(*episodes.c, groups.c.id.label("group")).join(groups, groups.c.seq == episodes.c.group_seq)
_SAME = [f.name for f in fields(PooledEpisode) if f.name not in ("rewards", "penalties", "tags", "meta")]
_TURN = [c for c in turns.c if c.name != "n_sampled"]


def row(db: sa.Connection, id: str) -> sa.RowMapping:
    """The row of an episode, with the id of its group. Raises :class:`PoolError` for an invalid or unknown id."""
    text("episode id", id)
    found = db.execute(_JOINED.where(episodes.c.id == id)).mappings().first()
    if found is None:
        raise PoolError(f"no episode {id!r} in this pool: open it first")
    return found


def pooled(found: Any) -> PooledEpisode:
    """The record for a row of :func:`row`."""
    closing = {"rewards": {}, "meta": {}} if found["closing"] is None else from_json(found["closing"])
    return PooledEpisode(
        **{name: found[name] for name in _SAME},
        rewards=closing["rewards"],
        penalties=closing.get("penalties", {}),
        tags=tuple(json.loads(found["tags"])),
        meta={**from_json(found["meta"]), **closing["meta"]},
    )


def page(db: sa.Connection, after: int, size: int, where: Mapping[str, Any]) -> list[tuple[int, PooledEpisode]]:
    """Episodes after the number ``after``, each with its number."""
    narrow = [episodes.c[name] == value for name, value in where.items()]
    query = _JOINED.where(episodes.c.seq > after, *narrow).order_by(episodes.c.seq).limit(size)
    return [(found["seq"], pooled(found)) for found in db.execute(query).mappings()]


def turns_of(db: sa.Connection, names: Mapping[int, str]) -> dict[int, tuple[Turn, ...]]:
    """The turns of the episodes (number -> id). Raises :class:`PoolError` if a stored turn was modified."""
    found: dict[int, list[Turn]] = {seq: [] for seq in names}
    for some in _pieces(list(names)):
        query = sa.select(*_TURN).where(turns.c.episode_seq.in_(some)).order_by(turns.c.episode_seq, turns.c["index"])
        for line in db.execute(query).mappings():
            seq, index = line["episode_seq"], line["index"]
            found[seq].append(unpack(names[seq], index, line))
    return {seq: tuple(those) for seq, those in found.items()}


def turn_rewards_of(db: sa.Connection, seqs: Sequence[int]) -> dict[int, dict[str, dict[int, float]]]:
    """Episode -> name -> index -> reward."""
    found: dict[int, dict[str, dict[int, float]]] = {}
    for some in _pieces(seqs):
        query = sa.select(*turn_rewards.c["episode_seq", "name", "index", "value"])
        for line in db.execute(query.where(turn_rewards.c.episode_seq.in_(some))):
            seq, name, index, value = tuple(line)
            if not name.endswith(UNSCORED):
                found.setdefault(seq, {}).setdefault(name, {})[index] = value
    return found


def about_turn_rewards(db: sa.Connection, seq: int) -> dict[str, dict[int, dict[str, Any]]]:
    """Name -> index -> what was said about the reward, or about the lack of one."""
    c = turn_rewards.c
    found: dict[str, dict[int, dict[str, Any]]] = {}
    said = sa.select(c.name, c["index"], c.about).where(c.episode_seq == seq, c.about.is_not(None))
    for name, index, about in db.execute(said):
        found.setdefault(name.removesuffix(UNSCORED), {})[index] = from_json(about)
    return found


def batch(db: sa.Connection, claimed: Any) -> Batch:
    """A claimed batch with its groups, episodes and samples."""
    roles = json.loads(claimed["roles"])
    wanted = delivered(claimed)
    seqs = [seq for _, members in wanted for seq in members]
    records = {
        found["seq"]: pooled(found)
        for some in _pieces(seqs)
        for found in db.execute(_JOINED.where(episodes.c.seq.in_(some))).mappings()
    }
    histories = turns_of(db, {seq: records[seq].id for seq in seqs})
    rewards = turn_rewards_of(db, seqs)

    def member(seq: int) -> BatchEpisode:
        named = rewards.get(seq, {})
        samples = tuple(sequences_of(histories[seq], roles=roles))
        return BatchEpisode(_with_old_penalties(records[seq], named), samples, named.get(PROCESS_REWARD, {}))

    made = tuple(
        BatchGroup(records[members[0]].group, records[members[0]].task_id, tuple(map(member, members)))
        for _, members in wanted
    )
    return Batch(claimed["consumer"], claimed["step"], made, claimed["lease_until"], claimed["state"] == "acked")


def _with_old_penalties(episode: PooledEpisode, named: Mapping[str, Mapping[int, float]]) -> PooledEpisode:
    """Version 0.1 stored a penalty as the reward ``penalty-NAME`` of the first turn."""
    old = {name.removeprefix(_PENALTY): sum(v.values()) for name, v in named.items() if name.startswith(_PENALTY)}
    return replace(episode, penalties=old) if old else episode


def group_states(db: sa.Connection, channel: str) -> dict[str, str]:
    """Id -> state of each group of a channel."""
    g = groups.c
    return {
        row.id: row.state for row in db.execute(sa.select(g.id, g.state).where(g.channel == channel).order_by(g.seq))
    }


def stats(db: sa.Connection) -> dict[str, Any]:
    """Counts by channel, and of batches and images."""
    e, g = episodes.c, groups.c
    channels: dict[str, dict[str, Any]] = {}

    def of(channel: str) -> dict[str, Any]:
        empty: dict[str, Any] = {"episodes": {}, "fates": {}, "groups": {}, "dropped": {}, "newest": 0.0}
        return channels.setdefault(
            channel, empty | dict.fromkeys(("turns", "flawed_turns", "samples", "trained_ids"), 0)
        )

    sums = (sa.func.sum(c) for c in (e.n_turns, e.n_flawed, e.n_samples, e.n_trained))
    counted = sa.select(e.channel, e.state, e.outcome, e.fate, sa.func.count(), sa.func.max(e.opened_at), *sums)
    sampled: dict[str, tuple[int, int]] = {}
    for line in db.execute(counted.group_by(e.channel, e.state, e.outcome, e.fate)):
        channel, state, outcome, fate, count, newest, *totals = tuple(line)
        into = of(channel)
        into["newest"] = max(into["newest"], newest)
        key = outcome or state
        into["episodes"][key] = into["episodes"].get(key, 0) + count
        if fate is not None:
            into["fates"][fate] = into["fates"].get(fate, 0) + count
        for name, total in zip(("turns", "flawed_turns", "samples", "trained_ids"), totals, strict=True):
            into[name] += int(total or 0)
        if state == "closed" and outcome != "infra":
            rows, ended = sampled.get(channel, (0, 0))
            sampled[channel] = rows + int(totals[2] or 0), ended + count
    for channel, state, reason, count in db.execute(
        sa.select(g.channel, g.state, g.reason, sa.func.count()).group_by(g.channel, g.state, g.reason)
    ):
        into = of(channel)
        into["groups"][state] = into["groups"].get(state, 0) + count
        if reason is not None:
            into["dropped"][reason] = count
    for channel, into in channels.items():
        rows, ended = sampled.get(channel, (0, 0))
        into["samples_per_episode"] = rows / ended if ended else None
    is_image = sa.case((images.c.media_type == _TOOLS_TYPE, "tools"), else_="images")
    kept = {line[0]: line[1] for line in db.execute(sa.select(is_image, sa.func.count()).group_by(is_image))}
    by_state = sa.select(batches.c.state, sa.func.count()).group_by(batches.c.state)
    return {
        "channels": channels,
        "batches": {line[0]: line[1] for line in db.execute(by_state)},
        "images": kept.get("images", 0),
        "tools": kept.get("tools", 0),
    }


def flaws(db: sa.Connection) -> dict[str, dict[str, int]]:
    """Channel -> flaw -> turns that have it, those of open episodes included."""
    e, t = episodes.c, turns.c
    counted = (
        sa.select(e.channel, t.flaw, sa.func.count())
        .join_from(episodes, turns, t.episode_seq == e.seq)
        .where(t.flaw.is_not(None), sa.or_(e.n_flawed > 0, e.state == "open"))
        .group_by(e.channel, t.flaw)
    )
    found: dict[str, dict[str, int]] = {}
    for channel, flaw, count in db.execute(counted):
        found.setdefault(channel, {})[flaw] = count
    return found


def _pieces(values: Sequence[_T]) -> Iterator[Sequence[_T]]:
    """Split ``values`` into pieces within any database's limit on parameters."""
    for start in range(0, len(values), _AT_ONCE):
        yield values[start : start + _AT_ONCE]
