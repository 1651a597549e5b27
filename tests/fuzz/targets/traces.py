"""Trace files of others: reading them, checking them, taking them into a pool."""

from __future__ import annotations

import json

from clawgym.errors import PoolError, TraceError
from clawgym.pool import Pool
from clawgym.pool.check import check
from clawgym.pool.exchange import import_
from clawgym.pool.traces import read_traces

from ..source import Source, scratch_folder

READS = ("pool.traces", "pool.check", "pool.exchange", "pool._rows", "pool.documents")

_TURN = {"prompt_ids": [1, 2], "response_ids": [3, 4], "logprobs": [-0.5, -0.1], "response_mask": [1, 1], "index": 0}
_ATIF = {
    "schema_version": "ATIF-v1.2", "session_id": "s",
    "steps": [
        {"source": "user", "message": "hi"},
        {"source": "agent", "message": [{"type": "text", "text": "a"}], "reasoning_content": "hm",
         "tool_calls": [{"tool_call_id": "c", "function_name": "f", "arguments": {"x": 1}}],
         "observation": {"results": [{"source_call_id": "c", "content": "done"}]},
         "metrics": {"prompt_token_ids": [1, 2], "completion_token_ids": [3], "logprobs": [-0.5], "extra": {"turn": 0, "parent": None}}},
        {"source": "agent", "message": "b", "extra": {}, "metrics": {"prompt_token_ids": [1, 2, 3, 4], "completion_token_ids": [5],
         "logprobs": [0.0], "extra": {"parent": 0, "role": "main", "policy_version": 1}}},
    ],
    "extra": {"clawgym": {"outcome": "solved", "reward": 1.0, "task_id": "t", "channel": "train", "cause": None}},
}  # fmt: skip
_LIKE = (
    {"episode": "e", **_TURN, "role": "main", "flaw": None, "policy_version": 1, "attention_mask": [1, 1, 1, 1]},
    {"episode_id": 3, "turns": [_TURN, {"tokens": [1, 2, 3], "loss_mask": [0, 0, 1], "logprobs": {"content": [{"logprob": -1}]}}]},
    _ATIF,
    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "a"}], "episode": "e", "turns": [0],
     "outcome": "failed", "reward": 0.5},
    {"response": {"output": [{"generation_token_ids": [1], "prompt_token_ids": [2], "generation_log_probs": [-1.0]}]}},
    {"message_log": [{"role": "user", "token_ids": [1]}, {"role": "assistant", "token_ids": [2], "generation_logprobs": [-1]}]},
    {"prompt": {"token_ids": [1]}, "response": {"token_ids": [2], "logprobs": [[-1.0, 2, "x"]]}, "choices": [{"token_ids": [2]}]},
)  # fmt: skip


def fuzz(data: bytes) -> None:
    source = Source(data)
    path = scratch_folder() / "traces.jsonl"
    path.write_bytes(b"\n".join(source.json(source.pick(_LIKE)) for _ in range(1 + source.number(0, 2))))
    try:
        for name, turns in read_traces(path):
            json.dumps([str(finding) for finding in check(name, turns).findings])
    except TraceError as error:
        assert str(error)
    with Pool(scratch_folder() / f"{source.byte() % 4}.sqlite") as pool:
        try:
            import_(pool, path)
        except (TraceError, PoolError) as error:
            assert str(error)
