"""Episodes as Parquet rows: one lossless row per turn. The last turn of each training sequence also contains that.

``docs/reference/pool.md`` describes the columns.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from clawgym.errors import MissingDependency, PoolError, TraceError
from clawgym.pool._pack import document_of, from_document, pack
from clawgym.pool.sequences import sequences_of
from clawgym.pool.states import PooledEpisode
from clawgym.records import Image, Turn

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["episodes_of", "is_ours", "rows_from", "rows_of", "schema", "turn_of"]

_MARK = b"clawgym.turns"
_VERSION = b"1"
_EPISODE = ("channel", "task_id", "task_hash", "group", "sample", "seed", "agent", "outcome", "cause", "reward",
            "trainable", "note", "opened_at", "closed_at")  # fmt: skip
_TURN = ("parent", "role", "policy_version", "finish_reason", "flaw", "malformed_calls")


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MissingDependency("parquet needs pyarrow: pip install 'clawgym[pool]'") from error
    return pyarrow


def schema() -> pa.Schema:
    """The Parquet schema."""
    pa = _pyarrow()
    ids, floats, text = pa.list_(pa.int32()), pa.list_(pa.float64()), pa.string()
    image = pa.struct([("sha256", text), ("media_type", text), ("data", pa.binary())])
    kinds: dict[str, Any] = {
        "episode": text, "channel": text, "task_id": text, "task_hash": text, "group": text, "sample": pa.int64(),
        "seed": pa.int64(), "agent": text, "outcome": text, "cause": text, "reward": pa.float64(), "rewards": text,
        "penalties": text,
        "trainable": pa.bool_(), "tags": pa.list_(text), "note": text, "meta": text, "opened_at": pa.float64(),
        "closed_at": pa.float64(), "index": pa.int32(), "parent": pa.int32(), "role": text,
        "policy_version": pa.int64(), "finish_reason": text, "flaw": text, "malformed_calls": pa.int64(),
        "context_ids": ids, "sampled_ids": ids, "logprobs": floats, "document": text, "turn_rewards": text,
        "about_turn_rewards": text, "digest": pa.binary(), "row_turns": pa.list_(pa.int32()), "row_ids": ids,
        "row_mask": pa.list_(pa.int8()), "row_logprobs": floats, "row_versions": pa.list_(pa.int64()),
        "image_files": pa.list_(image),
    }  # fmt: skip
    return pa.schema(list(kinds.items()), metadata={_MARK: _VERSION})


def rows_from(
    episode: PooledEpisode,
    turns: tuple[Turn, ...],
    rewards: Mapping[str, Mapping[int, float]],
    said: Mapping[str, Mapping[int, Any]],
    images: Iterable[Image],
) -> list[dict[str, Any]]:
    """The rows of one episode; an episode without turns has one row with a null index."""
    about = {name: getattr(episode, name) for name in _EPISODE}
    about |= {
        "episode": episode.id,
        "rewards": json.dumps(dict(episode.rewards)),
        "penalties": json.dumps(dict(episode.penalties)),
        "meta": json.dumps(dict(episode.meta)),
    }
    about["tags"] = list(episode.tags)
    ends = {sample.turns[-1]: sample for sample in sequences_of(turns)}
    rows = []
    for index, turn in enumerate(turns):
        row = about | {name: getattr(turn, name) for name in _TURN}
        row |= {"index": index, "digest": pack(episode.id, index, turn)["digest"]}
        row |= {name: list(getattr(turn, name)) for name in ("context_ids", "sampled_ids", "logprobs")}
        row["document"] = json.dumps(document_of(turn))
        for column, of in (("turn_rewards", rewards), ("about_turn_rewards", said)):
            row[column] = json.dumps({name: given[index] for name, given in of.items() if index in given})
        if (sample := ends.get(index)) is not None:
            row |= {"row_turns": list(sample.turns), "row_ids": list(sample.ids), "row_mask": list(sample.mask)}
            row |= {"row_logprobs": list(sample.logprobs), "row_versions": list(sample.policy_versions)}
        rows.append(row)
    rows = rows or [about]
    shown = [{"sha256": i.sha256, "media_type": i.media_type, "data": i.data} for i in images]
    rows[0]["image_files"] = shown or None
    return rows


def turn_of(row: Mapping[str, Any]) -> Turn:
    """The turn of a row. Raises :class:`PoolError` if the row was modified or is invalid."""
    where = f"episode {row['episode']}, turn {row['index']}"
    try:
        columns: dict[str, Any] = {name: row[name] for name in _TURN}
        turn = Turn(
            context_ids=tuple(row["context_ids"]),
            sampled_ids=tuple(row["sampled_ids"]),
            logprobs=tuple(row["logprobs"]),
            **columns,
            **from_document(json.loads(row["document"])),
        )
        packed = pack(row["episode"], row["index"], turn)
    except (PoolError, KeyError, TypeError, ValueError) as error:
        raise PoolError(f"{where}: cannot be a turn ({error}): export it again") from error
    if packed["digest"] != row["digest"]:
        raise PoolError(f"{where}: changed since it was exported: export it again")
    return turn


def is_ours(path: Path) -> bool:
    """Whether ClawGym exported the Parquet file. Raises :class:`TraceError` for a damaged file or a later version."""
    pa = _pyarrow()
    try:
        version: bytes | None = (pa.parquet.read_schema(path).metadata or {}).get(_MARK)
    except (pa.ArrowException, OSError) as error:
        raise TraceError(f"{path}: damaged parquet ({error}): write the file again") from error
    if version not in (None, _VERSION):
        raise TraceError(f"{path}: version {version.decode()}, this library reads 1: update the library")
    return version is not None


def rows_of(path: Path, columns: list[str] | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (number, row) of any Parquet file, reading a few hundred rows at a time."""
    pa = _pyarrow()
    number = 0
    try:
        with pa.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=256, columns=columns):
                for row in batch.to_pylist():
                    number += 1
                    yield number, cast("dict[str, Any]", row)
    except (pa.ArrowException, OSError) as error:
        raise TraceError(f"{path}: row {number + 1}: {error}: write the file again") from error


def episodes_of(path: Path, columns: list[str] | None = None) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield (episode, its rows) of an exported file, in the order of the file."""
    for name, rows in groupby((row for _, row in rows_of(path, columns)), key=lambda row: row["episode"]):
        yield name, list(rows)
