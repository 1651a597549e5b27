"""Batches: choose the groups for a step of a consumer, and acknowledge, renew or release them.

The transactions run one after another. Invariants: a group is in at most one batch; once acknowledged it is consumed. A
consumer gets the same batch for the same step until the batch is released, or given to another consumer after its lease
has expired.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from clawgym.errors import PoolError
from clawgym.pool._episodes import TRAINABLE_ROLES
from clawgym.pool._pack import from_json, text, to_json
from clawgym.pool._schema import batches, episodes, groups, turn_rewards

__all__ = ["FetchRequest", "ack", "claim", "release", "renew", "may_claim"]

ZERO_VARIANCE = "zero-variance"
"""Why a group was dropped: its episodes have equal rewards (``replaced``)."""
_AT_ONCE = 8


@dataclass(frozen=True)
class FetchRequest:
    """A consumer's request; see :meth:`~clawgym.pool.Pool.fetch`."""

    consumer: str
    step: int
    channel: str
    groups: int
    min_episodes: int
    policy_version: int | None
    max_staleness: int | None
    roles: tuple[str, ...]
    lease_seconds: float
    only: str | None = None
    replaced: int = 0

    def __post_init__(self) -> None:
        text("consumer", self.consumer)
        if self.groups < 1 or self.min_episodes < 1 or self.lease_seconds <= 0:
            raise ValueError("groups, min_episodes and lease_seconds must be positive: correct them")
        if self.replaced < 0:
            raise ValueError("replaced must be 0 or more: correct it")
        if self.max_staleness is not None and self.policy_version is None:
            raise ValueError("max_staleness needs policy_version: give the version that is being trained")
        if not self.roles or set(self.roles) - set(TRAINABLE_ROLES):
            raise ValueError(f"roles {self.roles} cannot be trained: choose among {', '.join(TRAINABLE_ROLES)}")


def may_claim(db: sa.Connection, now: float, want: FetchRequest) -> bool:
    """Whether a claim may succeed now: a cheap check before taking the write lock."""
    g = groups.c
    ready = sa.select(g.seq).where(g.channel == want.channel, g.state == "ready").limit(want.groups)
    due = sa.select(g.seq).where(g.state == "open", g.deadline <= now).limit(1)
    expired = sa.select(batches.c.seq).where(batches.c.state == "leased", batches.c.lease_until < now).limit(1)
    return len(db.execute(ready).all()) >= want.groups or any(db.execute(q).first() for q in (due, expired))


def claim(db: sa.Connection, now: float, want: FetchRequest) -> sa.RowMapping | None:
    """The row of the batch for this step. Made now if there is none and enough groups are ready; otherwise None."""
    known = _batch(db, want.consumer, want.step, missing_ok=True)
    if known is not None:
        roles = json.dumps(sorted(want.roles))
        if known["channel"] != want.channel or known["roles"] != roles:
            raise PoolError(
                f"step {want.step} of {want.consumer}: fetched before from channel {known['channel']!r} with roles "
                f"{known['roles']}: ask for the same, or release it"
            )
        if known["state"] == "acked":
            return known
        if _intact(db, known):
            _lease(db, known, now + want.lease_seconds)
            return _batch(db, want.consumer, want.step)
        _give_back(db, known)
    _expire(db, now)
    _ripen(db, now, want.channel)
    contents = _choose(db, want)
    if contents is None:
        return None
    db.execute(
        batches.insert().values(
            consumer=want.consumer,
            step=want.step,
            channel=want.channel,
            roles=json.dumps(sorted(want.roles)),
            state="leased",
            lease_until=now + want.lease_seconds,
            fetched_at=now,
            contents=to_json("batch", contents),
        )
    )
    made = _batch(db, want.consumer, want.step)
    assert made is not None
    taken = [seq for seq, _ in contents]
    db.execute(groups.update().where(groups.c.seq.in_(taken)).values(batch=made["seq"]))
    _lease(db, made, now + want.lease_seconds)
    return made


def ack(db: sa.Connection, consumer: str, step: int) -> None:
    """Mark the groups of a batch as consumed."""
    row = _held(db, consumer, step)
    if row["state"] != "acked":
        _lease(db, row, row["lease_until"])
        db.execute(groups.update().where(groups.c.batch == row["seq"]).values(state="consumed"))
        db.execute(batches.update().where(batches.c.seq == row["seq"]).values(state="acked"))


def renew(db: sa.Connection, now: float, consumer: str, step: int, lease_seconds: float) -> float:
    """Extend a lease. Returns its new end."""
    row = _held(db, consumer, step)
    if row["state"] == "acked":
        raise PoolError(f"step {step} of {consumer}: acked already: fetch the next step")
    _lease(db, row, now + lease_seconds)
    return now + lease_seconds


def release(db: sa.Connection, consumer: str, step: int) -> None:
    """Release the groups of a batch for the next fetch."""
    row = _batch(db, consumer, step)
    assert row is not None
    if row["state"] == "acked":
        raise PoolError(f"step {step} of {consumer}: acked already: fetch the next step")
    _give_back(db, row)


def _batch(db: sa.Connection, consumer: str, step: int, *, missing_ok: bool = False) -> sa.RowMapping | None:
    at = (batches.c.consumer == consumer) & (batches.c.step == step)
    row = db.execute(sa.select(batches).where(at).with_for_update()).mappings().first()
    if row is None and not missing_ok:
        raise PoolError(f"step {step} of {consumer}: not fetched, or released: fetch it first")
    return row


def _held(db: sa.Connection, consumer: str, step: int) -> sa.RowMapping:
    row = _batch(db, consumer, step)
    assert row is not None
    if row["state"] != "acked" and not _intact(db, row):
        raise PoolError(
            f"step {step} of {consumer}: its lease expired and its groups were given to another consumer: discard what "
            "was trained on them, and fetch again"
        )
    return row


def _intact(db: sa.Connection, row: sa.RowMapping) -> bool:
    """Whether the batch still owns all of its groups; locks them until the transaction ends."""
    g = groups.c
    own = sa.select(g.seq).where(g.batch == row["seq"], g.state.in_(("leased", "ready"))).with_for_update()
    return len(db.execute(own).all()) == len(from_json(row["contents"]))


def _lease(db: sa.Connection, row: sa.RowMapping, until: float) -> None:
    db.execute(groups.update().where(groups.c.batch == row["seq"]).values(state="leased"))
    db.execute(batches.update().where(batches.c.seq == row["seq"]).values(state="leased", lease_until=until))
    for _, fates in from_json(row["contents"]):
        _mark(db, fates)


def _give_back(db: sa.Connection, row: sa.RowMapping) -> None:
    _free(db, row)
    db.execute(groups.update().where(groups.c.batch == row["seq"]).values(batch=None))
    db.execute(batches.delete().where(batches.c.seq == row["seq"]))


def _free(db: sa.Connection, row: sa.RowMapping) -> None:
    """Make the groups of a batch ready again, at their old position."""
    own = groups.c.batch == row["seq"], groups.c.state == "leased"
    seqs = list(db.scalars(sa.select(groups.c.seq).where(*own).with_for_update()))
    db.execute(groups.update().where(groups.c.seq.in_(seqs)).values(state="ready"))
    db.execute(episodes.update().where(episodes.c.group_seq.in_(seqs)).values(fate=None))


def _expire(db: sa.Connection, now: float) -> None:
    over = sa.select(batches).where(batches.c.state == "leased", batches.c.lease_until < now)
    for row in db.execute(over.with_for_update()).mappings().all():
        _free(db, row)
        db.execute(batches.update().where(batches.c.seq == row["seq"]).values(state="expired"))


def _ripen(db: sa.Connection, now: float, channel: str) -> None:
    """Make groups ready whose deadline has passed."""
    g = groups.c
    due = (g.state == "open") & (g.deadline <= now) & (g.channel == channel)
    db.execute(groups.update().where(due).values(state="ready", ready_at=g.deadline))


def _choose(db: sa.Connection, want: FetchRequest) -> list[tuple[int, dict[str, list[int]]]] | None:
    """The groups for one batch, earliest ready first, each with the fates of its episodes. None if too few are ready.

    Groups that can never be delivered are dropped.
    """
    g = groups.c
    taken: list[tuple[int, dict[str, list[int]]]] = []
    after = (float("-inf"), 0)
    while len(taken) < want.groups:
        page = db.execute(
            sa.select(g.seq, g.size, g.ready_at)
            .where(g.channel == want.channel, g.state == "ready", g.ready_at >= after[0])
            .where(sa.true() if want.only is None else g.id == want.only)
            .where(sa.or_(g.ready_at > after[0], g.seq > after[1]))
            .order_by(g.ready_at, g.seq)
            .limit(max(_AT_ONCE, want.groups - len(taken)))
            .with_for_update()
        ).all()
        if not page:
            return None
        members = _members(db, [row.seq for row in page])
        for row in page:
            fates: dict[str, list[int]] = {}
            for member in members[row.seq]:
                fates.setdefault(_fate(member, want), []).append(member["seq"])
            if len(fates.get("delivered", ())) < min(want.min_episodes, row.size):
                _drop(db, row.seq, fates)
            elif _replaceable(db, want) and _zero_variance(db, fates["delivered"]):
                _drop(db, row.seq, fates, ZERO_VARIANCE)
            else:
                taken.append((row.seq, fates))
                if len(taken) == want.groups:
                    break
        after = (page[-1].ready_at, page[-1].seq)
    return taken


def _members(db: sa.Connection, seqs: list[int]) -> dict[int, list[sa.RowMapping]]:
    e = episodes.c
    found: dict[int, list[sa.RowMapping]] = {seq: [] for seq in seqs}
    query = sa.select(e.seq, e.group_seq, e.state, e.outcome, e.trainable, e.rows)
    for row in db.execute(query.where(e.group_seq.in_(seqs)).order_by(e.seq)).mappings():
        found[row["group_seq"]].append(row)
    return found


def _fate(member: sa.RowMapping, want: FetchRequest) -> str:
    if member["state"] == "open":
        return "late"
    if member["outcome"] == "infra":
        return "infra"
    if member["trainable"] is False:
        return "curated"
    rows = json.loads(member["rows"])
    oldest = [rows[role][2] for role in want.roles if role in rows]
    if not oldest:
        return "empty"
    if want.max_staleness is None or want.policy_version is None:
        return "delivered"
    least = want.policy_version - want.max_staleness
    return "stale" if any(version is None or version < least for version in oldest) else "delivered"


def _replaceable(db: sa.Connection, want: FetchRequest) -> bool:
    """Whether one more zero-variance group may be dropped: ``replaced`` for each step of the consumer so far."""
    if not want.replaced:
        return False
    dropped = sa.select(sa.func.count()).where(groups.c.channel == want.channel, groups.c.reason == ZERO_VARIANCE)
    return (db.scalar(dropped) or 0) < want.replaced * (want.step + 1)


def _zero_variance(db: sa.Connection, members: list[int]) -> bool:
    """Whether the episodes have equal rewards and penalties, and no rewards of turns."""
    if db.execute(sa.select(turn_rewards.c.index).where(turn_rewards.c.episode_seq.in_(members)).limit(1)).first():
        return False
    e = episodes.c
    rows = db.execute(sa.select(e.reward, e.closing).where(e.seq.in_(members))).all()
    totals = {(row.reward or 0.0) + sum(from_json(row.closing or b"{}").get("penalties", {}).values()) for row in rows}
    return len(totals) == 1


def _drop(db: sa.Connection, seq: int, fates: dict[str, list[int]], reason: str | None = None) -> None:
    counts = Counter({fate: len(seqs) for fate, seqs in fates.items() if fate != "delivered"})
    reason = reason or (counts.most_common(1)[0][0] if counts else "late")
    db.execute(groups.update().where(groups.c.seq == seq).values(state="dropped", reason=reason))
    _mark(db, {("dropped" if fate == "delivered" else fate): seqs for fate, seqs in fates.items()})


def _mark(db: sa.Connection, fates: dict[str, list[int]]) -> None:
    for fate, seqs in fates.items():
        db.execute(episodes.update().where(episodes.c.seq.in_(list(seqs))).values(fate=fate))


def delivered(row: Any) -> list[tuple[int, list[int]]]:
    """(group, delivered episodes) pairs of a batch, in order."""
    return [(seq, fates["delivered"]) for seq, fates in from_json(row["contents"])]
