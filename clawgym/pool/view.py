"""A pool that is only looked at: lists of groups and episodes, a page at a time.

Invariants: the file is opened for reading only, also while another process writes it. A hostile file can cost time, but
runs no code: its schema must be a pool's.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from clawgym.errors import PoolError
from clawgym.pool import _load, _schema
from clawgym.pool._store import Store
from clawgym.pool.states import PooledEpisode
from clawgym.records import Image, Turn

__all__ = ["PoolView"]

_GROUP = ("id", "channel", "task_id", "size", "members", "closed", "infra", "state", "reason", "opened_at")
_LINE = ("seq", "id", "channel", "task_id", "sample", "agent", "state", "outcome", "cause", "reward", "n_turns",
         "n_flawed", "n_samples", "n_trained", "trainable", "fate", "opened_at", "closed_at")  # fmt: skip
_LARGEST_PICTURE = 64 * 2**20


class PoolView:
    """The pool in a SQLite file. Raises :class:`~clawgym.errors.PoolError` for any other file."""

    def __init__(self, path: Path) -> None:
        self._store = Store(path, read_only=True)

    def close(self) -> None:
        """Close the file."""
        self._store.close()

    def stats(self) -> dict[str, Any]:
        """:meth:`~clawgym.pool.Pool.stats`."""
        with self._store.read() as db:
            return _load.stats(db)

    def flaws(self) -> dict[str, dict[str, int]]:
        """:meth:`~clawgym.pool.Pool.flaws`."""
        with self._store.read() as db:
            return _load.flaws(db)

    def curation(self) -> dict[str, dict[bool | None, int]]:
        """Channel -> decision of curation (None: undecided) -> closed episodes."""
        e = _schema.episodes.c
        query = sa.select(e.channel, e.trainable, sa.func.count()).where(e.state == "closed")
        found: dict[str, dict[bool | None, int]] = {}
        with self._store.read() as db:
            for channel, decision, count in db.execute(query.group_by(e.channel, e.trainable)):
                found.setdefault(channel, {})[decision] = count
        return found

    def versions(self) -> list[tuple[int | None, int, int]]:
        """Version of the policy, turns that it sampled, and sampled ids."""
        t = _schema.turns.c
        query = sa.select(t.policy_version, sa.func.count(), sa.func.sum(t.n_sampled)).group_by(t.policy_version)
        with self._store.read() as db:
            return [(row[0], row[1], int(row[2] or 0)) for row in db.execute(query.order_by(t.policy_version))]

    def groups(
        self, offset: int, limit: int, where: Mapping[str, str]
    ) -> tuple[int, int, list[tuple[dict[str, Any], list[tuple[int, int, float | None]]]]]:
        """A part of the groups, newest first: number after filtering, number of all, and for each its columns and its
        members (number, sample, reward).

        ``where``: ``id``, ``channel`` or ``state`` -> value.
        """
        g, e = _schema.groups.c, _schema.episodes.c
        narrow = [g[name] == value for name, value in where.items()]
        query = sa.select(g.seq, *(g[name] for name in _GROUP)).where(*narrow)
        with self._store.read() as db:
            total, everything = self._counts(db, _schema.groups, narrow)
            rows = db.execute(query.order_by(g.seq.desc()).limit(limit).offset(offset)).mappings().all()
            members: dict[int, list[tuple[int, int, float | None]]] = {row["seq"]: [] for row in rows}
            those = sa.select(e.group_seq, e.seq, e.sample, e.reward).where(e.group_seq.in_(list(members)))
            for group, *member in db.execute(those.order_by(e.seq)):
                members[group].append((member[0], member[1], member[2]))
        return total, everything, [(dict(row), members[row["seq"]]) for row in rows]

    def episodes(
        self, offset: int, limit: int, where: Mapping[str, str], find: str = ""
    ) -> tuple[int, int, list[dict[str, Any]]]:
        """A part of the episodes, newest first: number after filtering, number of all, and their columns.

        ``where``: ``channel``, ``fate``, ``outcome`` or ``group`` -> value. ``find``: a part of the task's id.
        """
        e, g = _schema.episodes.c, _schema.groups.c
        narrow = [g.id == value if name == "group" else e[name] == value for name, value in where.items()]
        if find:
            narrow.append(e.task_id.contains(find, autoescape=True))
        joined = _schema.episodes.join(_schema.groups, g.seq == e.group_seq)
        query = sa.select(*(e[name] for name in _LINE), g.id.label("group")).select_from(joined).where(*narrow)
        with self._store.read() as db:
            total, everything = self._counts(db, joined, narrow)
            rows = db.execute(query.order_by(e.seq.desc()).limit(limit).offset(offset)).mappings()
            return total, everything, [dict(row) for row in rows]

    def _counts(self, db: sa.Connection, table: sa.FromClause, narrow: list[Any]) -> tuple[int, int]:
        """Number of rows that fit, and of all."""
        count = sa.select(sa.func.count()).select_from(table)
        return db.scalar(count.where(*narrow)) or 0, db.scalar(count) or 0

    def episode(self, seq: int) -> tuple[dict[str, Any], PooledEpisode]:
        """The columns of one episode, and the episode. Raises :class:`~clawgym.errors.PoolError` if there is none."""
        e = _schema.episodes.c
        with self._store.read() as db:
            id = db.scalar(sa.select(e.id).where(e.seq == seq))
            if id is None:
                raise PoolError(f"{self._store.name}: no episode {seq}: choose one of its list")
            row = _load.row(db, id)
            return {name: row[name] for name in (*_LINE, "group")}, _load.pooled(row)

    def find(self, id: str) -> int | None:
        """The ``seq`` of the episode with an id; None if there is none."""
        e = _schema.episodes.c
        with self._store.read() as db:
            return db.scalar(sa.select(e.seq).where(e.id == id))

    def step(self, seq: int) -> int | None:
        """The step of the consumer whose batch had the group of an episode last; None if none had."""
        e, g, b = _schema.episodes.c, _schema.groups.c, _schema.batches.c
        joined = _schema.episodes.join(_schema.groups, g.seq == e.group_seq).join(_schema.batches, b.seq == g.batch)
        with self._store.read() as db:
            return db.scalar(sa.select(b.step).select_from(joined).where(e.seq == seq))

    def turns(self, seq: int, id: str) -> tuple[Turn, ...]:
        """The turns of an episode."""
        with self._store.read() as db:
            return _load.turns_of(db, {seq: id})[seq]

    def rewards(self, seq: int) -> tuple[dict[str, dict[int, float]], dict[str, dict[int, dict[str, Any]]]]:
        """Name -> turn -> reward; and name -> turn -> what was said about it, or about the lack of one."""
        with self._store.read() as db:
            return _load.turn_rewards_of(db, [seq]).get(seq, {}), _load.about_turn_rewards(db, seq)

    def picture(self, sha256: str) -> Image | None:
        """A picture; None if it is not there."""
        i = _schema.images.c
        query = sa.select(i.media_type, i.data).where(i.sha256 == sha256, sa.func.length(i.data) <= _LARGEST_PICTURE)
        with self._store.read() as db:
            found = db.execute(query).first()
        return None if found is None else Image(sha256, bytes(found[1]), found[0])
