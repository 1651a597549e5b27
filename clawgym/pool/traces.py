"""Read trace files of ClawGym and other tools for :func:`clawgym.pool.check.check`.

Supported are pools, Parquet, ATIF, NeMo Gym and NeMo RL rollouts, and JSON or JSON Lines with ids under known names.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from clawgym.errors import PoolError, TraceError
from clawgym.pool import parquet
from clawgym.pool._rows import EPISODE, INDEX, first, id_list, turn_of
from clawgym.pool.check import TraceTurn, trace_of
from clawgym.records import Turn

__all__ = ["json_rows", "read_traces", "readable"]

_NESTED = ("turns", "triplets", "trajectory", "transitions", "steps", "calls")
Trace = tuple[str, list[TraceTurn]]


def read_traces(source: str | Path) -> Iterator[Trace]:
    """Yield (name, turns) of each episode of a file, or of a pool on PostgreSQL.

    Raises :class:`~clawgym.errors.TraceError`, which names file, line and field.
    """
    if isinstance(source, str) and source.startswith("postgresql://"):
        yield from _from_pool(source)
        return
    path = Path(source)
    try:
        with path.open("rb") as file:
            head = file.read(16)
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror}): give a trace file") from error
    if head.startswith(b"SQLite format 3"):
        yield from _from_pool(path)
    elif head.startswith(b"PAR1"):
        yield from _from_ours(path) if parquet.is_ours(path) else _from_rows(path, parquet.rows_of(path))
    else:
        yield from _from_rows(path, json_rows(path))


def _from_pool(source: str | Path) -> Iterator[Trace]:
    from clawgym.pool.pool import Pool

    with Pool(source) as pool:
        for episode in pool.episodes():
            try:
                yield episode.id, trace_of(pool.turns(episode.id))
            except PoolError as error:
                yield episode.id, [TraceTurn(problems=(str(error),))]


def _from_ours(path: Path) -> Iterator[Trace]:
    """Read exported Parquet. A modified or invalid row makes its episode broken."""
    for name, rows in parquet.episodes_of(path):
        turns: list[Turn] = []
        try:
            turns += (parquet.turn_of(row) for row in rows if row["index"] is not None)
            yield name, trace_of(turns)
        except (PoolError, ValueError) as error:
            yield name, [TraceTurn(problems=(str(error),))]


def json_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """The lines of a JSON Lines file, the single document of a JSON file, or the items of its list."""
    with path.open(encoding="utf-8") as file:
        try:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:
                    if number > 1:
                        raise TraceError(f"{path}:{number}: not JSON ({error}): correct the line") from error
                    break
                yield from ((number, item) for item in (row if isinstance(row, list) else [row]))
            else:
                return
        except UnicodeDecodeError as error:
            raise TraceError(f"{path}: neither a pool, nor parquet, nor text in UTF-8: give a trace file") from error
    try:
        document = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path}: neither JSON nor JSON lines ({error}): correct the file") from error
    if isinstance(document, list):
        yield from enumerate(document, 1)
    else:
        yield 1, document


@contextmanager
def readable(path: Path, number: int) -> Iterator[None]:
    """Turn errors from parsing a row into a :class:`TraceError`."""
    try:
        yield
    except TraceError:
        raise
    except (AttributeError, LookupError, TypeError, ValueError, ArithmeticError, RecursionError) as error:
        raise TraceError(f"{path}:{number}: of another form than it says ({error!r}): correct the line") from error


def _from_rows(path: Path, rows: Iterator[tuple[int, Any]]) -> Iterator[Trace]:
    """Yield the rows that are whole episodes, then the episodes whose rows are turns."""
    loose: dict[str, list[tuple[Any, int, TraceTurn]]] = {}
    for number, row in rows:
        if not isinstance(row, Mapping):
            raise TraceError(f"{path}:{number}: {type(row).__name__} instead of an object: give one object a line")
        name = first(row, EPISODE)
        with readable(path, number):
            nested = _nested(row)
            if nested is None:
                key = str(name) if name is not None else f"row {number}"
                loose.setdefault(key, []).append((first(row, INDEX) or 0, number, turn_of(row)))
        if nested is not None:
            yield str(name if name is not None else number), nested
    for key, found in loose.items():
        try:
            found.sort(key=lambda entry: entry[:2])
        except TypeError as error:
            raise TraceError(
                f"{path}: episode {key}: its turns are not numbered alike ({error}): number them"
            ) from error
        yield key, [turn for _, _, turn in found]


def _nested(row: Mapping[str, Any]) -> list[TraceTurn] | None:
    """The turns of a row that is a whole episode; None for other rows."""
    if str(row.get("schema_version", "")).startswith("ATIF-v1."):
        return _atif(row)
    response = row.get("response")
    if isinstance(response, Mapping) and isinstance(response.get("output"), list):
        return _items(response["output"])
    log = row.get("message_log")
    if isinstance(log, list):
        return _message_log(log)
    for key in _NESTED:
        inner = row.get(key)
        if isinstance(inner, list) and inner and all(isinstance(item, Mapping) for item in inner):
            return [turn_of(item) for item in inner]
    return None


def _atif(document: Mapping[str, Any]) -> list[TraceTurn]:
    """The agent steps, with ids in their ``metrics``."""
    turns = []
    for step in document.get("steps") or ():
        if isinstance(step, Mapping) and step.get("source") == "agent":
            metrics = step.get("metrics") or {}
            row = {**(metrics.get("extra") or {}), **{k: v for k, v in metrics.items() if k != "extra"}}
            message = step.get("message")
            if isinstance(message, str) and message.strip():
                row["text"] = message
            turns.append(turn_of(row))
    return turns


def _items(items: Sequence[Any]) -> list[TraceTurn]:
    """NeMo Gym: the last item of each model call has its ids."""
    found = [item for item in items if isinstance(item, Mapping) and "generation_token_ids" in item]
    assistant = [item for item in items if isinstance(item, Mapping) and item.get("role") == "assistant"]
    return [turn_of({k: v for k, v in item.items() if k != "role"}) for item in found or assistant]


def _message_log(log: Sequence[Any]) -> list[TraceTurn]:
    """NeMo RL: each message has its ids; the prompt consists of all earlier ones."""
    turns: list[TraceTurn] = []
    before: list[Any] = []
    for message in log:
        ids = id_list(message.get("token_ids")) if isinstance(message, Mapping) else None
        if isinstance(message, Mapping) and message.get("role") == "assistant":
            row = {k: v for k, v in message.items() if k not in ("role", "token_ids")}
            turns.append(turn_of({**row, "prompt_ids": list(before), "response_ids": ids}))
        before += ids or []
    return turns
