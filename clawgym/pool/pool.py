"""The durable store of episodes and turns between collection and training.

Invariants: every method is one transaction, which is durable when the method returns and rolled back if it raises.
Turns are returned exactly as they were stored, and each is stored once.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from clawgym.pool import _store  # first: its error names the missing extra

# isort: split
import sqlalchemy as sa

from clawgym.errors import PoolError
from clawgym.frames import Table, frame
from clawgym.pool import _episodes, _fetch, _load
from clawgym.pool._schema import episodes, images
from clawgym.pool.states import PROCESS_REWARD, Batch, EpisodeEnd, PooledEpisode
from clawgym.records import Image, Role, Turn

if TYPE_CHECKING:
    import pandas

__all__ = ["Pool"]

_PAGE = 500


class Pool:
    """A pool in a SQLite file (``where`` is its path) or a PostgreSQL database (``postgresql://...``).

    Thread-safe. Raises :class:`~clawgym.errors.PoolError` for refused operations and database errors,
    :class:`~clawgym.errors.MissingDependency` without the extra ``pool`` (or ``postgres``).
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
        """Open a group that is ready with ``size`` episodes, or after ``deadline`` seconds. Returns its id.

        Repeating the call has no effect.
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
        """Open an episode, in ``group`` or in a group of its own. Returns its id. Repeating the call has no effect.

        A group accepts as many episodes as its size, plus one for each that ended as ``infra``.
        """
        row = {"channel": channel, "task_id": task_id, "task_hash": task_hash, "sample": sample, "seed": seed,
               "agent": agent, "secret_sha256": secret_sha256}  # fmt: skip
        return self._store.retried(
            lambda db: _episodes.open_episode(db, self._store.now(db), id, group, row, meta or {})
        )

    def append(self, turns: Sequence[tuple[str, int, Turn]], *, images: Iterable[Image] = ()) -> None:
        """Store turns, each as (episode id, index in the episode, turn), and their images: all or nothing.

        The index must be the next one of its episode. A turn that is stored already is skipped. Raises
        :class:`~clawgym.errors.PoolError` for a different turn at a stored index, or a closed episode.
        """
        given, shown = list(turns), list(images)

        def work(db: _store.Driver) -> None:
            _episodes.put_images(db, shown)
            _episodes.append(db, given)

        self._store.driven(work)

    def put_images(self, images: Iterable[Image]) -> None:
        """Store images by their hash; existing ones are skipped."""
        shown = list(images)
        self._store.driven(lambda db: _episodes.put_images(db, shown))

    def image(self, sha256: str) -> Image:
        """The image with this hash. Raises :class:`~clawgym.errors.PoolError` if it is not in the pool."""
        with self._store.read() as db:
            row = db.execute(sa.select(images).where(images.c.sha256 == sha256)).mappings().first()
        if row is None:
            raise PoolError(f"no image {sha256} in this pool: put it first")
        return Image(row["sha256"], bytes(row["data"]), row["media_type"])

    def close_episode(self, id: str, end: EpisodeEnd) -> None:
        """Close an episode: it takes no more turns, and counts for its group. The same end again changes nothing.

        Raises :class:`~clawgym.errors.PoolError` for an unknown episode, one that was closed with another end, and for
        values that cannot be stored.
        """
        self._store.retried(lambda db: _episodes.close(db, self._store.now(db), id, end))

    def revoke(self, id: str) -> None:
        """Delete the secret of an episode, so that no request can be made for it; it may still be closed."""

        def work(db: sa.Connection) -> None:
            seq = _episodes.locked(db, id)["seq"]
            db.execute(episodes.update().where(episodes.c.seq == seq).values(secret_sha256=""))

        self._store.retried(work)

    def erase(self, id: str) -> None:
        """Delete an episode: its turns, its rewards, and the images and tools that no other turn has.

        It is gone from its batch too, so a consumer that fetches an unacknowledged batch again gets the rest. In a
        SQLite file the deleted bytes are overwritten. Raises :class:`~clawgym.errors.PoolError` for an unknown id.
        """
        self._store.retried(lambda db: _episodes.erase(db, id), leasing=True)
        self._store.flush()

    def set_turn_rewards(
        self,
        id: str,
        rewards: Mapping[int, float],
        *,
        name: str = PROCESS_REWARD,
        about: Mapping[int, Mapping[str, Any]] | None = None,
    ) -> None:
        """Rewards of single turns (index -> reward), given by ``name``; in pieces, before or after the end.

        ``about`` says where a value comes from, or why a turn has none (index -> anything that JSON can carry: votes,
        texts, the judge's version). A value stands once it is given, with what was said about it, and none is taken
        after the episode went to training: a judge that training must wait for scores before the episode is closed.
        """
        scored = {turn: said for turn, said in (about or {}).items() if turn in rewards}
        unscored = {turn: said for turn, said in (about or {}).items() if turn not in rewards}

        def work(db: sa.Connection) -> None:
            _episodes.reward(db, id, name, rewards, scored)
            _episodes.reward(db, id, name + _load.UNSCORED, dict.fromkeys(unscored, 0.0), unscored)

        self._store.retried(work)

    def turn_rewards(self, id: str) -> dict[str, dict[int, float]]:
        """Name -> index of the turn -> reward."""
        with self._store.read() as db:
            seq = _load.row(db, id)["seq"]
            return _load.turn_rewards_of(db, [seq]).get(seq, {})

    def about_turn_rewards(self, id: str) -> dict[str, dict[int, dict[str, Any]]]:
        """Name -> index of the turn -> what was said about its reward, or about the lack of one."""
        with self._store.read() as db:
            return _load.about_turn_rewards(db, _load.row(db, id)["seq"])

    def fetch(
        self,
        consumer: str,
        step: int,
        *,
        channel: str = "train",
        groups: int = 1,
        only: str | None = None,
        min_episodes: int = 2,
        policy_version: int | None = None,
        max_staleness: int | None = None,
        roles: Sequence[Role] = ("main",),
        lease_seconds: float = 600,
        wait: float = 0,
        replaced: int = 0,
    ) -> Batch | None:
        """Fetch the batch for a step of a consumer: ``groups`` groups, earliest ready first.

        Returns None if too few are ready within ``wait`` seconds. With ``only``, the id of a group, no other group is
        delivered.

        The same consumer and step get the same batch again, acknowledged or not, so a restarted consumer can repeat the
        steps after its last checkpoint. Episodes are left out of their group, and counted, if they ended as ``infra``,
        are curated as not trainable, have no training sequence of ``roles``, or, with ``max_staleness``, have ids
        sampled more than that many versions before ``policy_version`` (or by an unknown version). A group with fewer
        than ``min_episodes`` episodes left (or its size, if that is less) is dropped. So is a group whose episodes have
        equal rewards and no rewards of turns, as long as fewer than ``replaced`` were dropped for each step so far: the
        next ready group takes its place (dynamic sampling, DAPO, arXiv 2503.14476).

        The lease ends after ``lease_seconds``: then other consumers can get the groups, unless they were acknowledged
        (:meth:`ack`) or the lease was renewed.

        Raises:
            ValueError: invalid arguments.
            PoolError: the step was fetched before, from another channel or with other roles.
        """
        want = _fetch.FetchRequest(consumer, step, channel, groups, min_episodes, policy_version, max_staleness,
                             tuple(roles), lease_seconds, only, replaced)  # fmt: skip
        end, pause = time.monotonic() + wait, 0.02
        row = self._store.retried(lambda db: _fetch.claim(db, self._store.now(db), want), leasing=True)
        while row is None and time.monotonic() < end:
            time.sleep(min(pause, max(0.0, end - time.monotonic())))
            pause = min(2 * pause, 0.5)
            with self._store.read() as db:
                worth_it = _fetch.may_claim(db, self._store.now(db), want)
            if worth_it:
                row = self._store.retried(lambda db: _fetch.claim(db, self._store.now(db), want), leasing=True)
        if row is None:
            return None
        with self._store.read() as db:
            return _load.batch(db, row)

    def ack(self, consumer: str, step: int) -> None:
        """Acknowledge the batch of a step: its groups are consumed, and never delivered to another consumer.

        Call it once the checkpoint that was trained on the batch is on disk. Idempotent. Raises
        :class:`~clawgym.errors.PoolError` if the lease expired and another consumer got one of the groups.
        """
        self._store.retried(lambda db: _fetch.ack(db, consumer, step), leasing=True)

    def release(self, consumer: str, step: int) -> None:
        """Release a batch without training on it; its groups are delivered by the next fetch."""
        self._store.retried(lambda db: _fetch.release(db, consumer, step), leasing=True)

    def renew(self, consumer: str, step: int, lease_seconds: float = 600) -> float:
        """Extend the lease to ``lease_seconds`` from now. Returns its end. Raises the errors of :meth:`ack`."""

        def work(db: sa.Connection) -> float:
            return _fetch.renew(db, self._store.now(db), consumer, step, lease_seconds)

        return self._store.retried(work, leasing=True)

    def stats(self) -> dict[str, Any]:
        """Counts by channel; see ``docs/reference/pool.md``. Takes milliseconds."""
        with self._store.read() as db:
            return _load.stats(db) | {"name": self.name, "bytes": self._store.size(db)}

    def flaws(self) -> dict[str, dict[str, int]]:
        """Channel -> flaw (``docs/concepts/exact-tokens.md``) -> how many turns have it, those of open episodes
        included. Reads every turn of the episodes that have one."""
        with self._store.read() as db:
            return _load.flaws(db)

    def group_states(self, channel: str = "train") -> dict[str, str]:
        """Each group's id and state (``open``, ``ready``, ``leased``, ``consumed``, ``dropped``), oldest first."""
        with self._store.read() as db:
            return _load.group_states(db, channel)

    def curate(
        self, id: str, *, trainable: bool | None = None, tags: Iterable[str] | None = None, note: str | None = None
    ) -> None:
        """Set the curation of an episode; None leaves a value unchanged. Episodes that are not trainable are never
        fetched."""
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
        """One episode without its turns. Raises :class:`~clawgym.errors.PoolError` if it is not in the pool."""
        with self._store.read() as db:
            return _load.pooled(_load.row(db, id))

    def turns(self, id: str) -> tuple[Turn, ...]:
        """The turns of an episode."""
        with self._store.read() as db:
            seq = _load.row(db, id)["seq"]
            return _load.turns_of(db, {seq: id})[seq]

    def episodes(
        self, *, channel: str | None = None, state: str | None = None, task_id: str | None = None
    ) -> Iterator[PooledEpisode]:
        """All episodes in the order of their opening, read a page at a time."""
        where = {"channel": channel, "state": state, "task_id": task_id}
        after = 0
        while True:
            with self._store.read() as db:
                page = _load.page(db, after, _PAGE, {name: v for name, v in where.items() if v is not None})
            if not page:
                return
            yield from (episode for _, episode in page)
            after = page[-1][0]

    def to_pandas(
        self, *, channel: str | None = None, state: str | None = None, task_id: str | None = None
    ) -> pandas.DataFrame:
        """:meth:`episodes` as a data frame, one row each; ``polars.from_pandas`` makes one of Polars.

        Raises :class:`~clawgym.errors.MissingDependency` without pandas.
        """
        found = self.episodes(channel=channel, state=state, task_id=task_id)
        names = [field.name for field in dataclasses.fields(PooledEpisode) if field.name != "secret_sha256"]
        return frame(Table(names, ([getattr(one, name) for name in names] for one in found)))

    def close(self) -> None:
        """Close the database connection. Everything stored is durable already."""
        self._store.close()

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
