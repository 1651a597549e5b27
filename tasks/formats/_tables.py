"""Read files of rows: JSON lines, a JSON list (``.json``), Parquet."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from clawgym.errors import MissingDependency, TaskError
from clawgym.tasks.formats._files import decode, parse_json

__all__ = ["iter_values"]

Value = Callable[[], dict[str, Any]]
LARGEST_ROW = 256 * 2**20
"""Most bytes of one line, and of a file that is one JSON list."""
MOST_VALUES, LARGEST_GROUP = 2**24, 2**30
"""Most values, and uncompressed bytes, of one Parquet row group, by the file's metadata. A few compressed bytes may
expand to billions of values."""


def iter_values(path: Path) -> Iterator[tuple[str, Value]]:
    """The rows of a file as (``<file>:<number>``, reader), in order; empty lines are skipped.

    Raises :class:`TaskError` if the file cannot be opened or exceeds ``LARGEST_ROW``, and :class:`MissingDependency`
    for Parquet without pyarrow. A reader raises TaskError for an invalid row.
    """
    if path.suffix == ".parquet":
        yield from _parquet(path)
        return
    try:
        file = path.open("rb")
    except OSError as error:
        raise TaskError(f"{path}: cannot be read ({error.strerror}): restore the file") from error
    with file:
        if path.suffix == ".json" and file.read(64).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"[":
            file.seek(0)
            yield from _list(decode(_bounded(file.read(LARGEST_ROW + 1), str(path)), str(path)).strip(), path)
            return
        file.seek(0)
        for number, line in enumerate(iter(partial(file.readline, LARGEST_ROW + 1), b""), start=1):
            where = f"{path.name}:{number}"
            _bounded(line, where)
            if line.removeprefix(b"\xef\xbb\xbf").strip():
                yield where, partial(_line, line, where)


def _bounded(data: bytes, where: str) -> bytes:
    if len(data) > LARGEST_ROW:
        raise TaskError(f"{where}: more than {LARGEST_ROW >> 20} MiB: write smaller tasks, one a line (.jsonl)")
    return data


def _line(line: bytes, where: str) -> dict[str, Any]:
    return parse_json(decode(line, where).strip(), where)


def _list(text: str, path: Path) -> Iterator[tuple[str, Value]]:
    for number, row in enumerate(parse_json(f'{{"rows": {text}}}', str(path))["rows"], start=1):
        where = f"{path.name}:{number}"
        yield where, partial(_object, row, where)


def _object(row: Any, where: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise TaskError(f"{where}: holds a JSON {type(row).__name__}, not an object: correct it")
    return row


def _check_groups(metadata: Any, path: Path) -> None:
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        columns = [group.column(index) for index in range(group.num_columns)]
        values = sum(column.num_values for column in columns)
        size = sum(column.total_uncompressed_size for column in columns)
        if values > MOST_VALUES or size > LARGEST_GROUP:
            raise TaskError(
                f"{path}: a row group of {values} values and {size} bytes exceeds the limits ({MOST_VALUES} values, "
                f"{LARGEST_GROUP} bytes): write it with smaller row groups"
            )


def _parquet(path: Path) -> Iterator[tuple[str, Value]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MissingDependency(f"{path.name}: parquet needs pyarrow: pip install 'clawgym[pool]'") from error
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            _check_groups(file.metadata, path)
            for batch in file.iter_batches(batch_size=64):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path.name}:{number}", partial(_object, row, path.name)
    except (pyarrow.ArrowException, OSError) as error:
        raise TaskError(f"{path}: is not a readable Parquet file ({error}): restore the file") from error
