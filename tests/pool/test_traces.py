"""Trace files of other tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from clawgym.errors import PoolError, TraceError
from clawgym.pool import Pool
from clawgym.pool.check import check
from clawgym.pool.traces import read_traces
from clawgym.records import prompt_ids

from .histories import chain, store

TURNS = chain(11, 3)
PROMPTS = [list(prompt_ids(TURNS, n)) for n in range(3)]
SAMPLES = [list(turn.sampled_ids) for turn in TURNS]
LOGPROBS = [list(turn.logprobs) for turn in TURNS]


def whole_row() -> tuple[list[int], list[int], list[int], list[float]]:
    """Prompt, response, mask and log-probs (0 where nothing was sampled) of the episode as one row."""
    response, mask, logprobs = [], [], []
    for n, turn in enumerate(TURNS):
        if n:
            response += turn.context_ids
            mask += [0] * len(turn.context_ids)
            logprobs += [0.0] * len(turn.context_ids)
        response += turn.sampled_ids
        mask += [1] * len(turn.sampled_ids)
        logprobs += turn.logprobs
    return PROMPTS[0], response, mask, logprobs


PROMPT, RESPONSE, MASK, PADDED = whole_row()

ROWS: dict[str, list[dict[str, Any]]] = {
    "generic": [
        {"episode": "a", "index": n, "prompt_ids": PROMPTS[n], "sampled_ids": SAMPLES[n], "logprobs": LOGPROBS[n]}
        for n in range(3)
    ],
    "claw-r1 steps": [
        {"prompt_ids": PROMPTS[n], "response_ids": SAMPLES[n], "rollout_log_probs": LOGPROBS[n], "trajectory_uid": "a",
         "prompt_uid": "1", "step_index": n, "policy_version": 4, "is_last": n == 2, "reward": None}
        for n in (2, 0, 1)
    ],
    "agent lightning triplets": [
        {"rollout_id": "a", "triplets": [
            {"prompt": {"token_ids": PROMPTS[n]}, "response": {"token_ids": SAMPLES[n], "logprobs":
             [{"token": "x", "logprob": p} for p in LOGPROBS[n]]}, "reward": None} for n in range(3)]}
    ],
    "nemo gym": [
        {"reward": 1.0, "response": {"output": [
            {"type": "message", "role": "assistant", "content": [], "prompt_token_ids": PROMPTS[n],
             "generation_token_ids": SAMPLES[n], "generation_log_probs": LOGPROBS[n]} for n in range(3)]}}
    ],
    "nemo rl": [
        {"message_log": [message for n, turn in enumerate(TURNS) for message in (
            {"role": "user", "content": "", "token_ids": list(turn.context_ids)},
            {"role": "assistant", "content": "", "token_ids": SAMPLES[n], "generation_logprobs": LOGPROBS[n]})]}
    ],
    "slime": [
        {"index": 0, "group_index": 0, "prompt": "text", "tokens": PROMPT + RESPONSE, "response": "text",
         "response_length": len(RESPONSE), "loss_mask": MASK, "rollout_log_probs": PADDED, "status": "completed"}
    ],
    "verl agent loop": [
        {"prompt_ids": PROMPT, "response_ids": RESPONSE, "response_mask": MASK, "response_logprobs": PADDED}
    ],
    "verl tensors": [
        {"prompts": [0] * 5 + PROMPT, "responses": RESPONSE + [0] * 9, "response_mask": MASK + [0] * 9,
         "rollout_log_probs": PADDED + [0.0] * 9,
         "attention_mask": [0] * 5 + [1] * (len(PROMPT) + len(RESPONSE)) + [0] * 9}
    ],
    "tokens and a mask over all": [
        {"tokens": PROMPT + RESPONSE, "loss_mask": [0] * len(PROMPT) + MASK,
         "logprobs": [p for p, bit in zip(PADDED, MASK, strict=True) if bit]}
    ],
    "vllm answers": [
        {"session_id": "a", "prompt_token_ids": PROMPTS[n], "choices": [{"token_ids": SAMPLES[n], "logprobs":
         {"content": [{"token": "x", "logprob": p} for p in LOGPROBS[n]]}}]} for n in range(3)
    ],
    "atif": [
        {"schema_version": "ATIF-v1.7", "session_id": "a", "agent": {"name": "x", "version": "1"}, "steps":
         [{"step_id": 1, "source": "user", "message": "q"}] + [
             {"step_id": n + 2, "source": "agent", "message": "", "metrics": {"prompt_token_ids": PROMPTS[n],
              "completion_token_ids": SAMPLES[n], "logprobs": LOGPROBS[n]}} for n in range(3)]}
    ],
}  # fmt: skip


def statuses(path: Path) -> list[str]:
    return [check(name, turns).status for name, turns in read_traces(path)]


def lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("kind", ROWS)
def test_exact_traces_of_every_kind_are_read_as_exact(kind: str, tmp_path: Path) -> None:
    (trace,) = read_traces(lines(tmp_path / "t.jsonl", ROWS[kind]))
    verdict = check(*trace)
    assert verdict.status == "exact", verdict.findings
    assert verdict.sampled == sum(map(len, SAMPLES))
    assert verdict.branches == 1


def damaged(value: Any, names: tuple[str, ...]) -> bool:
    """Take one entry from the first list under one of these names; whether there was one."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if name in names and isinstance(inner, list) and inner:
                del inner[len(inner) // 2]
                return True
            if name == "logprobs" and names[0] == "logprobs" and isinstance(inner, dict):
                del inner["content"][0]
                return True
        return any(damaged(inner, names) for inner in value.values())
    return isinstance(value, list) and any(damaged(inner, names) for inner in value)


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("what", ["logprobs", "ids"])
def test_damaged_traces_of_every_format_are_detected(kind: str, what: str, tmp_path: Path) -> None:
    rows = json.loads(json.dumps(ROWS[kind]))
    names = {
        "logprobs": ("logprobs", "rollout_log_probs", "response_logprobs", "generation_log_probs",
                     "generation_logprobs"),
        "ids": ("sampled_ids", "response_ids", "token_ids", "generation_token_ids", "tokens", "responses",
                "completion_token_ids"),
    }[what]  # fmt: skip
    if what == "ids" and kind in ("slime", "tokens and a mask over all"):
        pytest.skip("one list for everything: nothing else in the row knows its ids")
    if what == "ids" and kind == "nemo rl":
        del rows[0]["message_log"][1]["token_ids"][0]
    elif what == "ids" and kind == "agent lightning triplets":
        del rows[0]["triplets"][0]["response"]["token_ids"][0]
    else:
        assert any(damaged(row, names) for row in rows)
    assert statuses(lines(tmp_path / "t.jsonl", rows)) != ["exact"]


@pytest.mark.parametrize("suffix", ["json", "parquet"])
def test_rows_come_in_one_document_or_in_parquet_as_well(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"t.{suffix}"
    if suffix == "json":
        path.write_text(json.dumps(ROWS["generic"], indent=1))
    else:
        pq.write_table(pa.Table.from_pylist(ROWS["generic"]), path)
    assert statuses(path) == ["exact"]


def test_texts_without_ids_are_unproved(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": "q"}]}, {"input": "q", "output": "a", "score": 1}]
    assert statuses(lines(tmp_path / "t.jsonl", rows)) == ["unproved", "unproved"]
    atif = {"schema_version": "ATIF-v1.2", "steps": [{"step_id": 1, "source": "agent", "message": "a"}]}
    assert statuses(lines(tmp_path / "a.jsonl", [atif])) == ["unproved"]


@pytest.mark.parametrize("row", [{"prompt_ids": "hello", "response_ids": [1], "logprobs": [-1]},
                                 {"prompt_ids": [1], "response_ids": {"a": 1}, "logprobs": [-1]},
                                 {"prompt_ids": [1], "response_ids": [1], "logprobs": "none"},
                                 {"tokens": [1, 2], "loss_mask": [0, 1, 1], "logprobs": [-1]}])  # fmt: skip
def test_what_is_no_list_of_ids_is_broken(row: dict[str, Any], tmp_path: Path) -> None:
    assert statuses(lines(tmp_path / "t.jsonl", [row])) == ["broken"]


def test_a_pool_is_read_and_a_changed_row_is_broken(tmp_path: Path) -> None:
    import sqlite3

    with Pool(tmp_path / "p.db") as pool:
        store(pool, TURNS)
        store(pool, chain(12, 2))
        store(pool, chain(13, 2, flaw="text-only"))
    assert statuses(tmp_path / "p.db") == ["exact", "exact", "unproved"]
    with sqlite3.connect(tmp_path / "p.db") as db:
        db.execute('UPDATE turns SET logprobs = zeroblob(length(logprobs)) WHERE episode_seq = 2 AND "index" = 1')
    db.close()
    assert statuses(tmp_path / "p.db") == ["exact", "broken", "unproved"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"a": 1}\n{"b": \n', r"t:2: not JSON"),
        (b"not json", "neither JSON nor JSON lines"),
        (b"[1, 2]", r"t:1: int instead of an object"),
        (b"\xff\xfe\x00", "neither a pool, nor parquet"),
        (b"PAR1 but not really", "damaged parquet"),
    ],
)
def test_what_cannot_be_read_is_named(content: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(content)
    with pytest.raises(TraceError, match=said):
        list(read_traces(tmp_path / "t"))


def test_missing_files_and_foreign_databases_are_named(tmp_path: Path) -> None:
    import sqlite3

    with pytest.raises(TraceError, match="give a trace file"):
        list(read_traces(tmp_path / "gone"))
    with sqlite3.connect(tmp_path / "x.db") as db:
        db.execute("CREATE TABLE t (a)")
    db.close()
    with pytest.raises(PoolError, match="holds other tables"):
        list(read_traces(tmp_path / "x.db"))
