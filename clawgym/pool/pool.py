"""The durable store of episodes and turns between collection and training.

Invariants: every method is one transaction, durable when it returns, undone if it raises; what was stored of a turn is
what comes back; a turn is stored once.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from clawgym.pool import _store  # first: it names the extra that is missing

# isort: split
import sqlalchemy as sa

from clawgym.errors import PoolError
from clawgym.pool import _episodes
from clawgym.pool._schema import episodes, groups, images, turn_rewards
from clawgym.pool.states import PooledEpisode
from clawgym.records import Image, Turn

__all__ = ["Pool"]

_PAGE = 500


class Pool:
    """A pool in a SQLite file (``where`` is its path) or in a PostgreSQL database (``postgresql://...``).

    Threads may share it. Raises :class:`~clawgym.errors.PoolError` for what it refuses and for what the database
    reports, :class:`~clawgym.errors.MissingDependency` without the extra ``pool`` (or ``postgres``).
    """

    def __init__(self, where: str | Path) -> None:
        self._store = _store.Store(where)

    @property
    def name(self) -> str:
        """The file, or the URL without its password."""
        return self._store.name

    def open_group(
        self,
        *,
        id: str | None = None,
        channel: str = "train",
        task_id: str = "",
        size: int,
        deadline: float | None = None,
    ) -> str:
        """A group that waits for ``size`` episodes, or for ``deadline`` seconds from now. Returns its id.

        The same call again changes nothing.
        """
        return self._store.retried(
            lambda db: _episodes.open_group(db, self._store.now(db), id, channel, task_id, size, deadline)
        )

    def open_episode(
        self,
        *,
        id: str | None = None,
        channel: str = "train",
        task_id: str = "",
        task_hash: str = "",
        group: str | None = None,
        sample: int = 0,
        seed: int = 0,
        agent: str = "",
        secret_sha256: str = "",
        meta: Mapping[str, Any] | None = None,
    ) -> str:
        """A new episode, in ``group`` or a group of one. Returns its id. The same call with the same id changes nothing.

        A group takes as many episodes as its size, and one more for each that ended as ``infra``.
        """
        row = {"channel": channel, "task_id": task_id, "task_hash": task_hash, "sample": sample, "seed": seed,
               "agent": agent, "secret_sha256": secret_sha256}  # fmt: skip
        return self._store.retried(
            lambda db: _episodes.open_episode(db, self._store.now(db), id, group, row, meta or {})
        )

    def append(self, turns: Sequence[tuple[str, int, Turn]], *, images: Iterable[Image] = ()) -> None:
        """Store turns, each as (episode id, index in the episode, turn), and the images that they show: all or nothing.

        The index is the next one of its episode. A turn that is stored already is passed over; another one at its
        index, and any turn after the episode was closed, is a :class:`~clawgym.errors.PoolError`.
        """
        given, shown = list(turns), list(images)

        def work(db: sa.Connection) -> None:
            _episodes.put_images(db, shown)
            _episodes.append(db, given)

        self._store.retried(work)

    def put_images(self, images: Iterable[Image]) -> None:
        """Store images by their hash; one that is there already is passed over."""
        shown = list(images)
        self._store.retried(lambda db: _episodes.put_images(db, shown))

    def image(self, sha256: str) -> Image:
        """The image of this hash. Raises :class:`~clawgym.errors.PoolError` if it is not here."""
        with self._store.read() as db:
            row = db.execute(sa.select(images).where(images.c.sha256 == sha256)).mappings().first()
        if row is None:
            raise PoolError(f"no image {sha256} in this pool: put it first")
        return Image(row["sha256"], bytes(row["data"]), row["media_type"])

    def close_episode(
        self,
        id: str,
        *,
        outcome: str,
        reward: float | None = None,
        rewards: Mapping[str, float] | None = None,
        cause: str | None = None,
        meta: Mapping[str, Any] | None = None,
    ) -> None:
        """End an episode: from now on it takes no turn, and counts for its group. The same end again changes nothing."""
        row = {"outcome": str(outcome), "reward": reward, "cause": cause}
        self._store.retried(lambda db: _episodes.close(db, self._store.now(db), id, row, rewards or {}, meta or {}))

    def set_turn_rewards(self, id: str, rewards: Mapping[int, float], *, name: str = "judge") -> None:
        """Rewards of single turns (index -> reward), given by ``name``; in pieces, before or after the episode is closed.

        A value stands once it is given, and none is taken after the episode went to training: a judge that training
        must wait for scores before the episode is closed.
        """
        self._store.retried(lambda db: _episodes.reward(db, id, name, rewards))

    def turn_rewards(self, id: str) -> dict[str, dict[int, float]]:
        """Name -> index of the turn -> reward."""
        with self._store.read() as db:
            return _rewards_of(db, self._row(db, id)["seq"])

    def curate(
        self, id: str, *, trainable: bool | None = None, tags: Iterable[str] | None = None, note: str | None = None
    ) -> None:
        """What a person or a program thinks of an episode; what is ``None`` stays as it is. Not trainable: never fetched."""
        change: dict[str, Any] = {}
        if trainable is not None:
            change["trainable"] = trainable
        if tags is not None:
            change["tags"] = json.dumps(sorted({_episodes.text("tag", tag) for tag in tags}))
        if note is not None:
            change["note"] = _episodes.text("note", note)

        def work(db: sa.Connection) -> None:
            seq = _episodes.locked(db, id)["seq"]
            if change:
                db.execute(episodes.update().where(episodes.c.seq == seq).values(change))

        self._store.retried(work)

    def episode(self, id: str) -> PooledEpisode:
        """One episode without its turns. Raises :class:`~clawgym.errors.PoolError` if it is not here."""
        with self._store.read() as db:
            return _episodes.pooled(self._row(db, id))

    def turns(self, id: str) -> tuple[Turn, ...]:
        """The turns of an episode, as they were stored."""
        with self._store.read() as db:
            return _episodes.read_turns(db, id, self._row(db, id)["seq"])

    def episodes(
        self, *, channel: str | None = None, state: str | None = None, task_id: str | None = None
    ) -> Iterator[PooledEpisode]:
        """All episodes, in the order in which they were opened, a page at a time."""
        after = 0
        narrow = [
            episodes.c[name] == value
            for name, value in (("channel", channel), ("state", state), ("task_id", task_id))
            if value is not None
        ]
        while True:
            query = _joined().where(episodes.c.seq > after, *narrow).order_by(episodes.c.seq).limit(_PAGE)
            with self._store.read() as db:
                page = db.execute(query).mappings().all()
            if not page:
                return
            yield from map(_episodes.pooled, page)
            after = page[-1]["seq"]

    def close(self) -> None:
        """Give the database back. Everything stored is safe without it."""
        self._store.close()

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _row(self, db: sa.Connection, id: str) -> sa.RowMapping:
        row = db.execute(_joined().where(episodes.c.id == id)).mappings().first()
        if row is None:
            raise PoolError(f"no episode {id!r} in this pool: open it first")
        return row


def _joined() -> sa.Select[Any]:
    return sa.select(*episodes.c, groups.c.id.label("group")).join(groups, groups.c.seq == episodes.c.group_seq)


def _rewards_of(db: sa.Connection, seq: int) -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = {}
    for row in db.execute(sa.select(turn_rewards).where(turn_rewards.c.episode_seq == seq)):
        found.setdefault(row.name, {})[row.index] = row.value
    return found
