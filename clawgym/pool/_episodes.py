"""Open, append to and close episodes and groups. Each function is a part of a write transaction."""

from __future__ import annotations

import hashlib
import json
import math
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from clawgym.errors import EpisodeClosed, PoolError
from clawgym.pool._pack import from_json, pack, text, to_json, unpack
from clawgym.pool._schema import batches, episodes, groups, images, turn_rewards, turns
from clawgym.pool._store import Driver
from clawgym.pool.sequences import Shape, paths_of
from clawgym.pool.states import EpisodeEnd
from clawgym.records import Image, Outcome, Turn
from clawgym.statistics import as_float

__all__ = ["ENDS", "append", "close", "erase", "locked", "open_episode", "open_group", "put_images", "reward"]

ENDS = tuple(outcome for outcome in Outcome if outcome is not Outcome.UNSUPPORTED)
"""The outcomes that an episode of a pool can be closed with."""

TRAINABLE_ROLES = ("main", "subagent", "compaction")
"""Roles whose turns can be trained on; ``unknown`` never is."""


def number(where: str, value: float | None) -> float | None:
    """``value`` as a float, or :class:`PoolError` if it is not finite."""
    if value is None:
        return None
    if not isinstance(value, int | float) or not math.isfinite(as_float(value)):
        raise PoolError(f"{where}: {value!r} is not a finite number: correct it")
    return float(value)


# Made once: building a statement costs more than running it.
_BY_ID = {t: sa.select(t).where(t.c.id == sa.bindparam("of")).with_for_update() for t in (episodes, groups)}
_CHANGE = {t: t.update().where(t.c.seq == sa.bindparam("of")) for t in (episodes, groups)}
_INSERT = {t: t.insert() for t in (episodes, groups, turns, turn_rewards)}
_GROUP_OF = (
    sa.select(groups)
    .where(groups.c.seq == sa.select(episodes.c.group_seq).where(episodes.c.id == sa.bindparam("of")).scalar_subquery())
    .with_for_update()
)


def locked(db: sa.Connection, id: str, table: sa.Table = episodes) -> sa.RowMapping:
    """The row of an episode (or group), locked until this transaction ends."""
    row = db.execute(_BY_ID[table], {"of": id}).mappings().first()
    if row is None:
        raise PoolError(f"no {table.name[:-1]} {id!r} in this pool: open it first")
    return row


def open_group(db: sa.Connection, now: float, id: str | None, channel: str, task_id: str, size: int,
               deadline: float | None) -> str:  # fmt: skip
    if size < 1:
        raise PoolError(f"group {id}: size {size} is not at least 1: correct it")
    row: dict[str, Any] = {"channel": text("channel", channel), "task_id": text("task_id", task_id), "size": size}
    known = None if id is None else db.execute(_BY_ID[groups], {"of": text("group id", id)}).mappings().first()
    id = uuid.uuid4().hex if id is None else id
    if known is not None:
        _same(f"group {id}", known, row)
        return id
    _new_group(db, now, {**row, "id": id, "members": 0, "deadline": None if deadline is None else now + deadline})
    return id


def _new_group(db: sa.Connection, now: float, row: Mapping[str, Any]) -> int:
    fixed = {"closed": 0, "infra": 0, "state": "open", "opened_at": now}
    result = db.execute(_INSERT[groups], {**row, **fixed})
    return result.inserted_primary_key[0]  # type: ignore[index]


def _same(what: str, known: Any, given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if known[name] != value:
            raise PoolError(f"{what}: {name} is {known[name]!r} already, not {value!r}: choose another id")


def open_episode(db: sa.Connection, now: float, id: str | None, group: str | None, row: Mapping[str, Any],
                 meta: Mapping[str, Any]) -> str:  # fmt: skip
    known = None if id is None else db.execute(_BY_ID[episodes], {"of": text("episode id", id)}).mappings().first()
    id = uuid.uuid4().hex if id is None else id
    row = {name: text(name, v) if isinstance(v, str) else v for name, v in row.items()}
    if known is not None:
        _same(f"episode {id}", known, row)
        if known["state"] != "open":
            raise PoolError(f"episode {id}: closed already: choose another id")
        return id
    if group is None:
        alone = {"id": id, "channel": row["channel"], "task_id": row["task_id"], "size": 1, "members": 1}
        group_seq = _new_group(db, now, alone)
    else:
        group_seq = _join(db, group, row)
    fixed: dict[str, Any] = {"id": id, "group_seq": group_seq, "state": "open", "n_turns": 0, "tags": "[]", "note": ""}
    fixed |= {"opened_at": now, "meta": to_json(f"episode {id}: meta", meta)}
    db.execute(_INSERT[episodes], {**row, **fixed})
    return id


def _join(db: sa.Connection, id: str, row: Mapping[str, Any]) -> int:
    """Add an episode to a group. In a full group only episodes that ended as ``infra`` may be replaced."""
    group = locked(db, id, groups)
    if group["channel"] != row["channel"] or group["task_id"] not in ("", row["task_id"]):
        raise PoolError(f"group {id}: of channel {group['channel']!r}, task {group['task_id']!r}: open another group")
    if group["state"] not in ("open", "ready"):
        raise PoolError(f"group {id}: {group['state']} already: open another group")
    if group["members"] - group["infra"] >= group["size"]:
        raise PoolError(f"group {id}: has its {group['size']} episodes: open another group, or a larger one")
    change = {"members": group["members"] + 1, "state": "open", "ready_at": None}
    db.execute(_CHANGE[groups], {"of": group["seq"], **change})
    return group["seq"]


_PUT = {
    postgres: kind.insert(images).on_conflict_do_nothing() for postgres, kind in ((True, postgresql), (False, sqlite))
}


def put_images(db: Driver, given: Iterable[Image]) -> None:
    """Store each image once. Raises :class:`PoolError` if a hash does not match its data."""
    for image in given:
        if hashlib.sha256(image.data).hexdigest() != image.sha256:
            raise PoolError(f"image {image.sha256}: its data has another SHA-256: hash the bytes that are stored")
        row = {"sha256": image.sha256, "media_type": text("media_type", image.media_type), "data": image.data}
        db.run(_PUT[db.postgres], [row])


def append(db: Driver, given: Sequence[tuple[str, int, Turn]]) -> None:
    """Store turns of any number of episodes, each at the next index of its episode."""
    lists: dict[str, list[tuple[int, Turn]]] = {}
    for id, index, turn in given:
        lists.setdefault(id, []).append((index, turn))
    there = _locked_in_order(db, lists)
    rows: list[dict[str, Any]] = []
    grown: list[dict[str, Any]] = []
    for id, some in lists.items():
        seq, state, n_turns = there[id]
        fresh: list[dict[str, Any]] = []
        for index, turn in sorted(some, key=lambda pair: pair[0]):
            row = pack(id, index, turn)
            row |= {"episode_seq": seq, "index": index, "n_sampled": len(turn.sampled_ids)}
            expected = n_turns + len(fresh)
            if index < expected:
                known = fresh[index - n_turns] if index >= n_turns else None
                _repeated(db, id, seq, index, row, known)
            elif index > expected:
                raise PoolError(f"episode {id}: turn {index} came where turn {expected} is next: append in order")
            elif state != "open":
                raise EpisodeClosed(f"episode {id}: closed already: open a new episode")
            else:
                fresh.append(row)
        if fresh:
            grown.append({"of": seq, "total": n_turns + len(fresh)})
            rows += fresh
    _images_there(db, {name for _, _, turn in given for name in turn.images})
    if rows:
        db.run(_GROW, grown)
        db.run(_INSERT[turns], rows)


_LOCK = {
    postgres: sa.select(*episodes.c["id", "seq", "state", "n_turns"])
    .where(episodes.c.id.in_(sa.text(f"SELECT value FROM {list_of}(:ids)")))
    .order_by(episodes.c.id)  # always in the same order, to avoid deadlocks between writers
    .with_for_update()
    for postgres, list_of in ((True, "json_array_elements_text"), (False, "json_each"))
}
_GROW = episodes.update().where(episodes.c.seq == sa.bindparam("of")).values(n_turns=sa.bindparam("total"))
_STORED = sa.select(turns).where(
    turns.c.episode_seq == sa.bindparam("of"), turns.c["index"] == sa.bindparam("position")
)


def _locked_in_order(db: Driver, ids: Iterable[str]) -> dict[str, tuple[int, str, int]]:
    """Id -> sequence number, state and number of turns, locked until the transaction ends."""
    found = {id: (seq, state, n) for id, seq, state, n in db.rows(_LOCK[db.postgres], ids=json.dumps(list(ids)))}
    for id in ids:
        if id not in found:
            raise PoolError(f"no episode {id!r} in this pool: open it first")
    return found


def _repeated(db: Driver, id: str, seq: int, index: int, row: Any, known: Any) -> None:
    if known is None:
        (stored,) = db.rows(_STORED, of=seq, position=index)
        known = dict(zip(turns.c.keys(), stored, strict=True))
    if unpack(id, index, known) != unpack(id, index, row):
        raise PoolError(f"episode {id}: another turn {index} is stored already: number the turns of an episode once")


_SHOWN = sa.select(images.c.sha256).where(images.c.sha256 == sa.bindparam("name"))


def _images_there(db: Driver, names: set[str]) -> None:
    for name in sorted(names):
        if not db.rows(_SHOWN, name=name):
            raise PoolError(f"image {name}: not in this pool: put the images before the turns that show them")


def close(db: sa.Connection, now: float, id: str, end: EpisodeEnd) -> None:
    """Close an episode; its group is ready when this was the last one it waited for."""
    if end.outcome not in ENDS:
        raise PoolError(f"episode {id}: outcome {end.outcome!r} is not one of {', '.join(ENDS)}: correct it")
    reward = number(f"episode {id}: reward", end.reward)
    row = {"outcome": str(end.outcome), "reward": reward, "cause": end.cause}
    if end.cause is not None:
        text(f"episode {id}: cause", end.cause)
    closing: dict[str, Any] = {
        "rewards": {name: number(f"episode {id}: reward {name}", value) for name, value in end.rewards.items()},
        "meta": from_json(to_json(f"episode {id}: meta", end.meta)),
    }
    if end.penalties:
        closing["penalties"] = {name: _penalty(id, name, value) for name, value in end.penalties.items()}
    closing = json.loads(json.dumps(closing))
    group = db.execute(_GROUP_OF, {"of": id}).mappings().first()  # before the episode, as a fetch locks them
    episode = locked(db, id)
    assert group is not None
    if episode["state"] == "closed":
        if any(episode[name] != value for name, value in row.items()) or from_json(episode["closing"]) != closing:
            raise PoolError(
                f"episode {id}: closed already as {episode['outcome']}, {episode['reward']}: an end is final, "
                "open another episode"
            )
        return
    ended = {**row, **_summary(db, episode["seq"]), "state": "closed", "closed_at": now}
    ended["closing"] = to_json("closing", closing)
    db.execute(_CHANGE[episodes], {"of": episode["seq"], **ended})
    change: dict[str, Any] = {"closed": group["closed"] + 1, "infra": group["infra"] + (row["outcome"] == "infra")}
    if group["state"] == "open" and change["closed"] == group["members"] >= group["size"]:
        change |= {"state": "ready", "ready_at": now}
    db.execute(_CHANGE[groups], {"of": group["seq"], **change})


def _penalty(id: str, name: str, value: float) -> float:
    checked = number(f"episode {id}: penalty {name}", value)
    if checked is None or checked > 0:
        raise PoolError(f"episode {id}: penalty {name} is {value!r}: give what it takes off, 0 or less")
    return checked


_SHAPES = (
    sa.select(*turns.c["parent", "role", "flaw", "n_sampled", "policy_version"])
    .where(turns.c.episode_seq == sa.bindparam("of"))
    .order_by(turns.c["index"])
)


def _summary(db: sa.Connection, seq: int) -> dict[str, Any]:
    """Counts of the episode's training sequences by role, so that a fetch does not have to read its ids."""
    c = turns.c
    found = db.execute(
        sa.select(c.parent, c.role, c.flaw, c.n_sampled, c.policy_version)
        .where(c.episode_seq == seq).order_by(c["index"])
    ).all()  # fmt: skip
    shapes = [Shape(row.parent, row.role, row.flaw, row.n_sampled > 0) for row in found]
    rows: dict[str, Any] = {}
    for role in TRAINABLE_ROLES:
        paths = paths_of(shapes, roles=(role,))
        if paths:
            used = [found[index] for path in paths for index in path.trained]
            versions = [row.policy_version for row in used]
            oldest = None if None in versions else min(versions)
            rows[role] = [len(paths), sum(row.n_sampled for row in used), oldest]
    main = rows.get("main", [0, 0, None])
    flawed = sum(row.flaw is not None for row in found)
    return {"rows": json.dumps(rows), "n_samples": main[0], "n_trained": main[1], "n_flawed": flawed}


def reward(db: sa.Connection, id: str, name: str, values: Mapping[int, float],
           about: Mapping[int, Mapping[str, Any]]) -> None:  # fmt: skip
    """Rewards of single turns; the same value twice is no change, and so is the same word about it."""
    text("name of the reward", name)
    episode = locked(db, id)
    if episode["fate"] == "delivered":
        raise PoolError(f"episode {id}: delivered to training already: judge it before it is fetched")
    c = turn_rewards.c
    at = (c.episode_seq == episode["seq"]) & (c.name == name)
    there = {line[0]: line for line in db.execute(sa.select(c["index"], c.value, c.about).where(at))}
    known = {index: line[1] for index, line in there.items()}
    fresh = []
    for index, given in values.items():
        value = number(f"episode {id}, turn {index}: reward {name}", given)
        if value is None or not 0 <= index < episode["n_turns"]:
            raise PoolError(f"episode {id}: no turn {index} to reward with {given!r}: correct the index or the value")
        if known.setdefault(index, value) != value:
            raise PoolError(f"episode {id}, turn {index}: reward {name} is {known[index]} already: use another name")
        said = None if index not in about else to_json(f"episode {id}, turn {index}: about {name}", dict(about[index]))
        if (
            said is not None
            and index in there
            and (there[index][2] is None or from_json(there[index][2]) != from_json(said))
        ):
            raise PoolError(f"episode {id}, turn {index}: reward {name} was given otherwise: use another name")
        fresh.append({"episode_seq": episode["seq"], "name": name, "index": index, "value": value, "about": said})
    if fresh := [row for row in fresh if row["index"] not in there]:
        db.execute(_INSERT[turn_rewards], fresh)


def erase(db: sa.Connection, id: str) -> None:
    """Delete an episode with its turns and rewards, and the images that no other turn shows."""
    group = db.execute(_GROUP_OF, {"of": id}).mappings().first()  # before the episode, as a fetch locks them
    episode = locked(db, id)
    assert group is not None
    seq = episode["seq"]
    shown = _shown(db, turns.c.episode_seq == seq)
    for table in (turns, turn_rewards):
        db.execute(table.delete().where(table.c.episode_seq == seq))
    if group["batch"] is not None:
        _take_out(db, group["batch"], group["seq"], seq)
    db.execute(episodes.delete().where(episodes.c.seq == seq))
    if group["members"] == 1:
        db.execute(groups.delete().where(groups.c.seq == group["seq"]))
    else:
        left = {"members": group["members"] - 1, "closed": group["closed"] - (episode["state"] == "closed")}
        left["infra"] = group["infra"] - (episode["outcome"] == "infra")
        db.execute(_CHANGE[groups], {"of": group["seq"], **left})
    if shown:
        db.execute(images.delete().where(images.c.sha256.in_(shown - _shown(db, sa.true()))))


def _shown(db: sa.Connection, which: sa.ColumnElement[bool]) -> set[str]:
    """The hashes of images and tools in some turns."""
    found: set[str] = set()
    for document in db.scalars(sa.select(turns.c.document).where(which)):
        about = from_json(document)
        found.update((*about.get("images", ()), *filter(None, [about.get("tools")])))
    return found


def _take_out(db: sa.Connection, batch: int, group: int, episode: int) -> None:
    """Take an episode out of a batch; a batch without episodes goes, unless it was trained on."""
    row = db.execute(sa.select(batches).where(batches.c.seq == batch).with_for_update()).mappings().first()
    if row is None:
        return
    contents = []
    for seq, fates in from_json(row["contents"]):
        if seq == group:
            fates = {fate: [one for one in seqs if one != episode] for fate, seqs in fates.items()}
        if fates["delivered"]:
            contents.append((seq, fates))
    at = batches.c.seq == batch
    if contents or row["state"] == "acked":
        db.execute(batches.update().where(at).values(contents=to_json("batch", contents)))
    else:
        db.execute(batches.delete().where(at))
