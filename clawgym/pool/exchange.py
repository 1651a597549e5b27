"""Export episodes of a pool to files, and import them.

Invariants: files are written atomically. Run the same import again to resume it. A pool is never completely in memory.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from clawgym.errors import PoolError, TraceError
from clawgym.pool import _episodes, documents, parquet
from clawgym.pool.pool import Pool
from clawgym.pool.states import EpisodeEnd, PooledEpisode
from clawgym.pool.traces import json_rows, readable
from clawgym.records import Image, Turn
from clawgym.registry import did_you_mean

__all__ = ["Exported", "Format", "Imported", "export", "import_"]

Format = Literal["parquet", "atif", "messages", "openai"]
_FORMATS: tuple[Format, ...] = get_args(Format)
_SUFFIXES: Mapping[str, tuple[Format, ...]] = {".parquet": ("parquet",), ".jsonl": ("atif", "messages", "openai")}
"""Suffix of a file -> the formats that it may have, its default first."""
_NO_OUTCOME = "imported without an outcome"


@dataclass(frozen=True, slots=True)
class Exported:
    """What an export did."""

    episodes: int
    """Written."""
    left_open: int
    """Chosen but for their state: still open, and so left out."""


@dataclass
class Imported:
    """The result of an import."""

    episodes: int = 0
    turns: int = 0
    flawed: int = 0
    """Number of turns that got a flaw, and so are never trained on."""
    known: int = 0
    """Number of episodes that were in the pool already."""


def export(
    pool: Pool,
    out: str | Path,
    *,
    format: Format | None = None,
    channel: str | None = None,
    task_ids: Collection[str] | None = None,
    outcome: str | None = None,
    include_open: bool = False,
    progress: Callable[[int], None] = lambda done: None,
) -> Exported:
    """Write the closed episodes of a pool to ``out``, in the order in which they were opened; with ``include_open``
    also the open ones, as they are now.

    The format is that of the suffix if none is given: ``.parquet`` is parquet, ``.jsonl`` is atif; any other file gets
    parquet.

    ``parquet``: one row per turn, lossless, with training sequences; ``atif``: one ATIF document per line;
    ``messages``: chat messages, one line per branch of the main agent; ``openai``: the same in OpenAI's fine-tuning
    format, with nothing but messages and tools. Raises :class:`~clawgym.errors.PoolError` if the
    file cannot be written, and for a format that its suffix contradicts.
    """
    writers = {"parquet": _write_parquet, "atif": _write_atif, "messages": _write_messages, "openai": _write_openai}
    format = _format_of(Path(out), format)
    if format not in writers:
        raise PoolError(
            f"there is no export format {format!r}.{did_you_mean(format, writers)} Known: {', '.join(writers)}"
        )
    count = left_open = 0

    def chosen() -> Iterator[tuple[PooledEpisode, tuple[Turn, ...]]]:
        nonlocal count, left_open
        for episode in pool.episodes(channel=channel):
            if outcome not in (None, episode.outcome) or (task_ids and episode.task_id not in task_ids):
                continue
            if episode.state == "open" and not include_open:
                left_open += 1
                continue
            yield episode, pool.turns(episode.id)
            count += 1
            progress(count)

    with _whole(Path(out)) as path:
        writers[format](pool, chosen(), path)
    return Exported(count, left_open)


def _format_of(out: Path, format: Format | None) -> Format:
    """The format that was asked for, or that of the suffix."""
    fits = _SUFFIXES.get(out.suffix.lower())
    if format is None:
        return fits[0] if fits else "parquet"
    if fits and format in _FORMATS and format not in fits:
        raise PoolError(
            f"{out}: a {out.suffix} file is not {format}: give --format {' or '.join(fits)}, or another name"
        )
    return format


Chosen = Iterator[tuple[PooledEpisode, tuple[Turn, ...]]]


@contextmanager
def _whole(out: Path) -> Iterator[Path]:
    """Yield a file beside ``out``, which replaces ``out`` at the end, or is removed after an error."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        number, name = tempfile.mkstemp(prefix=f".{out.name}.", dir=out.parent)
        os.close(number)
    except OSError as error:
        raise PoolError(f"{out}: cannot be written ({error.strerror}): give another file") from error
    fresh = Path(name)
    try:
        yield fresh
        with fresh.open("rb+") as file:
            os.fsync(file.fileno())
        fresh.replace(out)
    except OSError as error:
        raise PoolError(f"{out}: cannot be written ({error.strerror}): make room, then try again") from error
    finally:
        fresh.unlink(missing_ok=True)


def _write_parquet(pool: Pool, chosen: Chosen, path: Path) -> None:
    schema = parquet.schema()
    import pyarrow as pa
    import pyarrow.parquet as pq

    shown: set[str] = set()
    waiting: list[dict[str, Any]] = []
    ids = 0
    with pq.ParquetWriter(path, schema, compression="zstd") as file:
        for episode, turns in chosen:
            names = dict.fromkeys(name for turn in turns for name in (*turn.images, turn.tools) if name not in shown)
            shown |= names.keys()
            files = [image for name in names if (image := _file(pool, name)) is not None]
            given = pool.turn_rewards(episode.id), pool.about_turn_rewards(episode.id)
            rows = parquet.rows_from(episode, turns, *given, files)
            waiting += rows
            ids += sum(len(row.get(name) or ()) for row in rows for name in ("context_ids", "sampled_ids", "row_ids"))
            if ids > 2_000_000 or len(waiting) > 5_000:
                file.write_table(pa.Table.from_pylist(waiting, schema))
                waiting, ids = [], 0
        file.write_table(pa.Table.from_pylist(waiting, schema))


def _write_lines(path: Path, rows: Iterator[Mapping[str, Any]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, separators=(",", ":")) + "\n")


def _write_atif(pool: Pool, chosen: Chosen, path: Path) -> None:
    _write_lines(path, (documents.atif_of(episode, turns) for episode, turns in chosen))


def _write_messages(pool: Pool, chosen: Chosen, path: Path) -> None:
    _write_lines(path, _conversations(pool, chosen))


def _write_openai(pool: Pool, chosen: Chosen, path: Path) -> None:
    _write_lines(path, filter(None, map(documents.openai_of, _conversations(pool, chosen))))


def _conversations(pool: Pool, chosen: Chosen) -> Iterator[Mapping[str, Any]]:
    tools: dict[str, Any] = {"": None}
    for episode, turns in chosen:
        for turn in turns:
            if turn.tools not in tools:
                found = _file(pool, turn.tools)
                tools[turn.tools] = None if found is None else json.loads(found.data)
        yield from documents.conversations_of(episode, turns, tools)


def _file(pool: Pool, name: str) -> Image | None:
    """The stored image or tool definitions with this hash; None if they were not stored."""
    try:
        return pool.image(name) if name else None
    except PoolError:
        return None


def import_(pool: Pool, file: str | Path, *, progress: Callable[[int], None] = lambda done: None) -> Imported:
    """Import exported Parquet files, ATIF documents or chat messages into a pool.

    Episodes keep their ids, and existing ones are skipped, so the same call resumes an interrupted import. Exported
    Parquet files are restored completely, with groups. In other files, turns that :mod:`clawgym.pool.check` does not
    find exact get a flaw, and an episode without an outcome is closed as failed and not trainable.

    Raises:
        TraceError: the file has another format.
        PoolError: the pool has a different episode with the same id.
    """
    path = Path(file)
    done = Imported()
    try:
        with path.open("rb") as opened:
            head = opened.read(4)
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror}): give a file that was exported") from error
    entries = _parquet_entries(path) if head == b"PAR1" else _line_entries(path)
    for entry in entries:
        _store(pool, entry, done)
        progress(done.episodes + done.known)
    return done


@dataclass
class _Entry:
    """One episode of a file."""

    opening: dict[str, Any]
    """Arguments of :meth:`Pool.open_episode`."""
    turns: Sequence[Turn]
    end: EpisodeEnd
    curation: dict[str, Any] = field(default_factory=dict)
    rewards: dict[str, dict[int, float]] = field(default_factory=dict)
    """Turn rewards: name -> index -> reward."""
    about: dict[str, dict[int, Any]] = field(default_factory=dict)
    """Provenance of the turn rewards."""
    images: list[Image] = field(default_factory=list)
    group: dict[str, Any] | None = None
    """Arguments of :meth:`Pool.open_group`."""


def _store(pool: Pool, entry: _Entry, done: Imported) -> None:
    """Store an episode completely before it is closed: from then on it may be fetched."""
    id = entry.opening["id"]
    pool.put_images(entry.images)
    if _closed(pool, id):
        if pool.turns(id) != tuple(entry.turns):
            raise PoolError(f"episode {id}: another one of this id is in {pool.name}: import into another pool")
        done.known += 1
        return
    if entry.group is not None:
        pool.open_group(**entry.group)
    pool.open_episode(**entry.opening)
    pool.append([(id, index, turn) for index, turn in enumerate(entry.turns)])
    for name, values in entry.rewards.items():
        pool.set_turn_rewards(id, values, name=name, about=entry.about.get(name))
    if entry.curation:
        pool.curate(id, **entry.curation)
    pool.close_episode(id, entry.end)
    done.episodes += 1
    done.turns += len(entry.turns)
    done.flawed += sum(turn.flaw is not None for turn in entry.turns)


def _closed(pool: Pool, id: str) -> bool:
    try:
        return pool.episode(id).state == "closed"
    except PoolError:  # not in the pool
        return False


def _parquet_entries(path: Path) -> Iterator[_Entry]:
    if not parquet.is_ours(path):
        raise TraceError(f"{path}: parquet, but not of a pool: `clawgym pool check` reads it, import does not")
    members: Counter[tuple[str, str, str]] = Counter()
    for _, rows in parquet.episodes_of(path, ["episode", "group", "channel", "task_id"]):
        members[rows[0]["group"], rows[0]["channel"], rows[0]["task_id"]] += 1
    for id, rows in parquet.episodes_of(path):
        about = rows[0]
        group = None if about["group"] == id else about["group"]
        key = (about["group"], about["channel"], about["task_id"])
        names = ("channel", "task_id", "task_hash", "sample", "seed", "agent")
        rewards: dict[str, dict[int, float]] = {}
        said: dict[str, dict[int, Any]] = {}
        for row in rows:
            # Older files do not have this column.
            for column, into in (("turn_rewards", rewards), ("about_turn_rewards", said)):
                for name, value in json.loads(row.get(column) or "{}").items():
                    into.setdefault(name, {})[row["index"]] = value
        judged = about["trainable"] is not None or about["tags"] or about["note"]
        yield _Entry(
            opening={"id": id, "group": group, "meta": json.loads(about["meta"])} | {n: about[n] for n in names},
            turns=[parquet.turn_of(row) for row in rows if row["index"] is not None],
            end=_end(about, json.loads(about["rewards"]), json.loads(about.get("penalties") or "{}")),
            curation={n: about[n] for n in ("trainable", "tags", "note")} if judged else _curation(about),
            rewards=rewards,
            about=said,
            images=[Image(**image) for row in rows for image in row["image_files"] or ()],
            group=group and {"id": group, "channel": key[1], "task_id": key[2], "size": members[key]},
        )


def _line_entries(path: Path) -> Iterator[_Entry]:
    """Entries from ATIF documents and chat messages, one per line or one per file."""
    for number, row in json_rows(path):
        with readable(path, number):
            entry = _of_line(path, number, row)
        yield entry


def _of_line(path: Path, number: int, row: Any) -> _Entry:
    if isinstance(row, Mapping) and str(row.get("schema_version", "")).startswith("ATIF-v1."):
        ours = ((row.get("extra") or {}).get("clawgym")) or {}
        id, turns = row.get("session_id"), documents.turns_from_atif(row)
    elif isinstance(row, Mapping) and isinstance(row.get("messages"), list):
        ours, id, turns = row, row.get("episode"), documents.turns_from_messages(row["messages"])
        id = None if id is None else "-".join([str(id), *map(str, (row.get("turns") or ())[-1:])])
    else:
        raise TraceError(f"{path}:{number}: neither an ATIF document nor chat messages: correct the line")
    return _Entry(
        opening={
            "id": str(id) if id is not None else f"{path.stem}-{number}",
            "task_id": str(ours.get("task_id") or ""),
            "channel": str(ours.get("channel") or "train"),
            "meta": {"imported_from": path.name},
        },
        turns=turns,
        end=_end(ours),
        curation=_curation(ours),
    )


def _end(
    about: Mapping[str, Any], rewards: Mapping[str, float] | None = None, penalties: Mapping[str, float] | None = None
) -> EpisodeEnd:
    """How an episode ended; where the file does not say (it was still open), as failed without a reward."""
    known = about.get("outcome") in _episodes.ENDS
    return EpisodeEnd(
        outcome=str(about["outcome"]) if known else "failed",
        reward=about.get("reward"),
        cause=about.get("cause") if known else _NO_OUTCOME,
        rewards=rewards or {},
        penalties=penalties or {},
    )


def _curation(about: Mapping[str, Any]) -> dict[str, Any]:
    """An episode without an outcome is never trained on."""
    return {} if about.get("outcome") in _episodes.ENDS else {"trainable": False}
