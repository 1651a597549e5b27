"""Data of other libraries: ``datasets``, and verl's ``DataProto``.

    tasks = task_set(datasets.load_dataset("json", data_files="sums.jsonl", split="train"), {"answer": "final"})
    restore(pool, datasets.load_dataset("parquet", data_files="episodes.parquet", split="train"))
    batch = to_dataproto(pool)

Needs the package ``datasets``, or verl.

Invariants: rows are read one at a time. A row that is no task is a problem of the task set, and does not affect the
others. A pool that went through ``datasets`` is the same pool; sequences that went through ``DataProto`` are the same,
with log-probs rounded to float32.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clawgym.errors import MissingDependency, TaskError, TraceError
from clawgym.pool import Pool, sequences_of
from clawgym.pool.exchange import Imported, import_
from clawgym.records import Task, TaskSet, TrainingSequence
from clawgym.tasks.formats import collect, read_row

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["from_dataproto", "restore", "task_set", "to_dataproto"]

_ROWS = 1000
"""Rows that are in memory at a time."""


def task_set(
    dataset: Iterable[Mapping[str, Any]],
    columns: Mapping[str, str] | None = None,
    *,
    name: str = "dataset",
    limit: int | None = None,
) -> TaskSet:
    """The rows of a data set as tasks: rows of ClawGym, SWE-bench or mathematics (``docs/reference/tasks.md``).

    Args:
        dataset: a ``datasets.Dataset`` or ``IterableDataset``.
        columns: field of such a row -> the column that has it. Other columns keep their names. Nested columns are
            written with dots: ``{"answer": "reward_model.ground_truth"}``.
        name: the name of the set.
        limit: stop after this many tasks.

    Raises :class:`TaskError` if no row is a task.
    """

    def readers() -> Iterator[tuple[str, Callable[[], Task]]]:
        for index, row in enumerate(dataset):
            where = f"{name}:{index}"
            yield where, partial(_task, row, dict(columns or {}), where, f"task_{index:05d}")

    tasks = collect(name, readers(), limit=limit)
    if not tasks.tasks and limit != 0:
        why = "; ".join(list(tasks.problems.values())[:3])
        raise TaskError(f"{name}: no row is a task ({why or 'it is empty'}): map the columns with columns={{...}}")
    return tasks


def _task(row: Mapping[str, Any], columns: Mapping[str, str], where: str, default_id: str) -> Task:
    used = {path.partition(".")[0] for path in columns.values()}
    value = {key: one for key, one in row.items() if key not in used or key in columns} if columns else dict(row)
    for field, path in columns.items():
        found: Any = row
        for part in path.split("."):
            if not isinstance(found, Mapping) or part not in found:
                raise TaskError(f"{where}: there is no column {path!r}: choose among {', '.join(row)[:500]}")
            found = found[part]
        value[field] = found
    # The columns of a table are in every row; None is a field that this one does not have.
    return read_row({key: one for key, one in value.items() if one is not None}, where, default_id)


def restore(pool: Pool, dataset: Iterable[Mapping[str, Any]]) -> Imported:
    """Import the rows of an exported Parquet file that ``datasets`` has read. Raises :class:`TraceError` for others."""
    from clawgym.pool import parquet

    schema = parquet.schema()
    import pyarrow as pa
    import pyarrow.parquet as pq

    with tempfile.TemporaryDirectory(prefix="clawgym-") as folder:
        path = Path(folder, "episodes.parquet")
        try:
            with pq.ParquetWriter(path, schema, compression="zstd") as file:
                for rows in _batches(dataset):
                    file.write_table(pa.Table.from_pylist(rows, schema))
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise TraceError(f"the rows are not those of an exported pool ({error}): give such a data set") from error
        return import_(pool, path)


def _batches(dataset: Iterable[Mapping[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    rows: list[dict[str, Any]] = []
    for row in dataset:
        if "episode" not in row:
            raise TraceError("the rows have no column episode: give a data set that was exported from a pool")
        rows.append(dict(row))
        if len(rows) == _ROWS:
            yield rows
            rows = []
    yield rows


def _verl() -> Any:
    try:
        from verl import DataProto
    except ImportError as error:
        raise MissingDependency(f"verl is needed ({error}): pip install 'clawgym[verl]'") from error
    return DataProto


def to_dataproto(pool: Pool, *, channel: str | None = None, pad_id: int = 0) -> Any:
    """The training sequences of the closed episodes of ``pool``, as a ``verl.DataProto``.

    Tensors, for N sequences: ``prompts`` (N, P), padded on the left; ``responses``, ``response_mask``,
    ``rollout_log_probs`` and ``token_level_scores`` (N, R), padded on the right; ``input_ids``, ``attention_mask`` and
    ``position_ids`` (N, P + R). A response begins at the first sampled token. The score of an episode is at its last
    token. ``uid`` names the group. Episodes with an infrastructure error, without a reward, or that are not trainable,
    are left out.

    Raises :class:`TraceError` if there is no sequence.
    """
    import numpy as np
    import torch

    found = [
        (episode, sequence)
        for episode in pool.episodes(channel=channel)
        if episode.state == "closed" and episode.outcome != "infra"
        if episode.reward is not None and episode.trainable is not False
        for sequence in sequences_of(pool.turns(episode.id))
    ]
    if not found:
        raise TraceError("the pool has no training sequence: collect episodes with token ids first")
    starts = [sequence.mask.index(1) for _, sequence in found]
    prompt = max(starts)
    response = max(len(sequence.ids) - start for (_, sequence), start in zip(found, starts, strict=True))
    shape = (len(found), prompt + response)
    ids = torch.full(shape, pad_id, dtype=torch.long)
    seen, mask = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    logprobs, scores = torch.zeros(shape), torch.zeros(shape)
    for row, ((episode, sequence), start) in enumerate(zip(found, starts, strict=True)):
        where = slice(prompt - start, prompt - start + len(sequence.ids))
        ids[row, where] = torch.tensor(sequence.ids)
        seen[row, where] = 1
        mask[row, where] = torch.tensor(sequence.mask)
        logprobs[row, mask[row].bool()] = torch.tensor(sequence.logprobs, dtype=torch.float32)
        assert episode.reward is not None, "others were left out"
        scores[row, where.stop - 1] = episode.reward
    named = {
        name: [getattr(sequence, name) for _, sequence in found] for name in ("turns", "policy_versions", "turn_of")
    }
    others = {
        "uid": [episode.group or episode.id for episode, _ in found],
        "episode": [episode.id for episode, _ in found],
        "task_id": [episode.task_id for episode, _ in found],
        "images": [sequence.images for _, sequence in found],
        **named,
    }
    return _verl().from_dict(
        tensors={
            "prompts": ids[:, :prompt],
            "responses": ids[:, prompt:],
            "response_mask": mask[:, prompt:],
            "rollout_log_probs": logprobs[:, prompt:],
            "token_level_scores": scores[:, prompt:],
            "input_ids": ids,
            "attention_mask": seen,
            "position_ids": (seen.cumsum(-1) - 1).clamp(min=0),
        },
        non_tensors={name: _objects(np, values) for name, values in others.items()},
    )


def _objects(np: Any, values: list[Any]) -> Any:
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array


def from_dataproto(batch: Any) -> list[tuple[str, TrainingSequence]]:
    """The sequences of :func:`to_dataproto`, each with the id of its episode."""
    found = []
    tensors, others = batch.batch, batch.non_tensor_batch
    prompt = tensors["prompts"].shape[1]
    for row in range(len(batch)):
        real = tensors["attention_mask"][row].bool()
        trained = tensors["response_mask"][row].bool()
        sequence = TrainingSequence(
            turns=tuple(others["turns"][row]),
            ids=tuple(tensors["input_ids"][row][real].tolist()),
            mask=(0,) * int(real[:prompt].sum()) + tuple(tensors["response_mask"][row][real[prompt:]].tolist()),
            logprobs=tuple(tensors["rollout_log_probs"][row][trained].tolist()),
            policy_versions=tuple(others["policy_versions"][row]),
            turn_of=tuple(others["turn_of"][row]),
            images=tuple(others["images"][row]),
        )
        found.append((str(others["episode"][row]), sequence))
    return found
