"""Episodes as a data set: the turns of a pool, or the transcripts of an evaluation.

``data/train-00000-of-00001.parquet`` is what ``datasets.load_dataset`` reads. Of a pool it is the lossless export, one
row per turn. Of a run folder it has one row per episode, with the ATIF transcript as JSON text in ``transcript``.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from clawgym.errors import MissingDependency, TraceError
from clawgym.hub._card import portable
from clawgym.hub._checkpoint import HubError
from clawgym.hub._upload import Upload, UploadPlan, refuse_secrets, render, repo_name
from clawgym.records.run_folder import MANIFEST, TRANSCRIPT, RunFolder
from clawgym.reporting.transcripts import LARGEST_TRANSCRIPT

__all__ = ["ATIF", "DATA", "OURS", "PULLED", "finish_traces", "plan_traces"]

DATA = "data/train-00000-of-00001.parquet"
ATIF = "transcripts.jsonl"
"""The transcripts of pulled episodes of a run folder, one ATIF document per line."""
PULLED = re.compile(re.escape(DATA))
OURS = re.compile(rf"{PULLED.pattern}|README\.md")
_TEXTS = ("task_id", "task_hash", "outcome", "cause", "agent", "model", "transcript")
_NUMBERS = {"sample": int, "steps": int, "prompt_tokens": int, "completion_tokens": int}
_SCORES = ("strict", "official")
_BATCH = 64
_MAX_UNPACKED = 64 * 2**30


@contextmanager
def plan_traces(source: str | Path) -> Iterator[UploadPlan]:
    """Collect and check the episodes of a pool (its file, or ``postgresql://...``) or of an evaluation's run folder.

    The data are in a temporary folder until the context ends.

    Raises:
        HubError: there is no episode, or something in one looks like a secret.
        MissingDependency: without pyarrow.
    """
    pq = _parquet()
    with tempfile.TemporaryDirectory(prefix="clawgym-push-") as scratch:
        table = Path(scratch, "train.parquet")
        if isinstance(source, Path) or "://" not in source:
            name = portable(Path(source).resolve().stem)
            is_run = (Path(source) / MANIFEST).is_file()
        else:
            name, is_run = source.rpartition("/")[2].partition("?")[0], False
        episodes = _of_run(Path(source), table) if is_run else _of_pool(source, table)
        if not episodes:
            raise HubError(f"{name}: has no finished episode: let the run finish one, or close its sessions")
        rows = pq.ParquetFile(table)
        card = render(
            "traces.md.j2", name=name, slug=repo_name(name), episodes=episodes, rows=rows.metadata.num_rows, run=is_run
        )
        refuse_secrets(_texts(rows), "the episodes")
        refuse_secrets([("README.md", card)], "the name")
        uploads = (Upload("README.md", card.encode()), Upload(DATA, table))
        yield UploadPlan(name, "dataset", f"{name}: {episodes} episodes", uploads, (), OURS)


def _parquet() -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise MissingDependency(f"traces need pyarrow ({error}): pip install 'clawgym[hub,pool]'") from error
    return pyarrow.parquet


def _of_pool(source: str | Path, table: Path) -> int:
    from clawgym.pool import Pool
    from clawgym.pool.exchange import export

    if not str(source).startswith("postgresql://") and not Path(source).is_file():
        raise HubError(f"{source}: neither a pool nor a run folder: give a pool's file or a run folder")
    with Pool(source) as pool:
        return export(pool, table, format="parquet").episodes


def _schema() -> Any:
    import pyarrow as pa

    kinds = [(name, pa.string()) for name in _TEXTS] + [(name, pa.int64()) for name in _NUMBERS]
    return pa.schema([*kinds, *((name, pa.float64()) for name in _SCORES)], metadata={"clawgym.episodes": "1"})


def _of_run(folder: Path, table: Path) -> int:
    import pyarrow as pa

    run = RunFolder.read(folder)
    model = run.manifest.engine.get("model") or run.manifest.agent.get("model")
    done = 0
    with _parquet().ParquetWriter(table, _schema(), compression="zstd") as file:
        waiting: list[dict[str, Any]] = []
        for row in run.latest.values():
            if row["key"] not in run.done or TRANSCRIPT not in (row.get("files") or {}):
                continue
            waiting.append(_episode(run, row, model))
            done += 1
            if len(waiting) == _BATCH:
                file.write_table(pa.Table.from_pylist(waiting, _schema()))
                waiting = []
        file.write_table(pa.Table.from_pylist(waiting, _schema()))
    return done


def _episode(run: RunFolder, row: Mapping[str, Any], model: Any) -> dict[str, Any]:
    try:
        transcript = json.loads(run.read_of(row, TRANSCRIPT, LARGEST_TRANSCRIPT))
    except (OSError, ValueError) as error:
        raise HubError(f"{run.path / run.place_of(row) / TRANSCRIPT}: cannot be read ({error}): restore it") from error
    usage, result = row.get("usage") or {}, row.get("result") or {}
    return {
        "task_id": row["task_id"],
        "task_hash": row["task_hash"],
        "outcome": row["outcome"],
        "cause": row.get("cause"),
        "agent": row.get("agent"),
        "model": None if model is None else portable(str(model)),
        "transcript": json.dumps(transcript, separators=(",", ":")),
        "sample": row["sample"],
        "steps": row.get("steps"),
        "prompt_tokens": usage.get("prompt_tokens"),
        "completion_tokens": usage.get("completion_tokens"),
        **{score: result.get(score) for score in _SCORES},
    }


def _texts(table: Any) -> Iterator[tuple[str, str]]:
    """Every text in the table, for the search for secrets."""
    names = [name for name in table.schema_arrow.names if str(table.schema_arrow.field(name).type) == "string"]
    number = 0
    for batch in table.iter_batches(batch_size=_BATCH, columns=names):
        for row in batch.to_pylist():
            number += 1
            yield f"row {number}", "\n".join(str(value) for value in row.values() if value)


def finish_traces(folder: Path) -> list[str]:
    """Check pulled episodes, write the transcripts of a run as ATIF lines, and return notes for the user.

    Raises :class:`HubError` if the table is none of ours, or damaged.
    """
    from clawgym.pool import parquet

    pq, path = _parquet(), folder / DATA
    try:
        table = pq.ParquetFile(path)
        if sum(table.metadata.row_group(n).total_byte_size for n in range(table.num_row_groups)) > _MAX_UNPACKED:
            raise HubError(f"{DATA}: is larger than {_MAX_UNPACKED >> 30} GiB once unpacked: ask its author")
        if b"clawgym.episodes" not in (table.schema_arrow.metadata or {}):
            if not parquet.is_ours(path):
                raise HubError(f"{DATA}: is not a table of `clawgym push traces`: load it with `datasets`")
            return [f"`clawgym pool import POOL {path.name}` puts the episodes into a pool"]
        with (folder / ATIF).open("w", encoding="utf-8") as out:
            for batch in table.iter_batches(batch_size=_BATCH, columns=["transcript"]):
                for (text,) in zip(batch.column(0).to_pylist(), strict=True):
                    document = json.loads(text)
                    if not isinstance(document, dict):
                        raise ValueError("a transcript is no object")
                    out.write(json.dumps(document, separators=(",", ":")) + "\n")
    except HubError:
        raise
    except (ValueError, TypeError, KeyError, OSError, RecursionError, TraceError) as error:
        reason = str(error).split("\n")[0][:200]
        raise HubError(f"{DATA}: is damaged ({type(error).__name__}: {reason}): ask its author") from error
    return [f"{ATIF} has the transcripts as ATIF, one per line"]
