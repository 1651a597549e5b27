"""Files of rows: ours, of repositories, of mathematics; what is read can be written and read again."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

from clawgym.errors import TaskError
from clawgym.records import Layer
from clawgym.tasks.formats import math_rows
from clawgym.tasks.formats.rows import iter_rows, read_row, write_row

from ..source import Source, scratch_folder

READS = ("tasks.formats.rows", "tasks.formats.swe_rows", "tasks.formats.math_rows", "tasks.formats._schema")

_PATCH = "--- a/x.py\n+++ b/x.py\n@@ -1 +1 @@\n-a\n+b\n"
_OURS = {
    "prompt": "Make `out/a.json`.",
    "hook_code": "python3 reward/test.py",
    "input_files": [
        {"file_path": "reward/test.py", "content": "import json\nprint(json.dumps({'a': 1}))\n"},
        {"file_path": "./notes.txt", "content": "x", "executable": True},
    ],
    "rule": "a rule",
    "origin_template": "---\nid: 'task_1'\n---\n",
    "solution": [{"file_path": "solve.sh", "content": "true"}],
    "wrong": [{"file_path": "a.sh", "content": "true"}],
    "clawgym": {
        "protocol": "reward_sh", "workspace": "/workspace", "mode": "clean", "mutable_inputs": ["*"], "env": {"A": "b"},
        "limits": {"memory_mb": 100, "agent_seconds": 5.5}, "unsupported": None, "protected": ["b"], "metadata": {"x": [1]},
    },
}  # fmt: skip
_REPOSITORY = {
    "instance_id": "o__n-1", "repo": "o/n", "base_commit": "a" * 40, "problem_statement": "p", "patch": _PATCH,
    "test_patch": _PATCH, "FAIL_TO_PASS": '["t.py::a"]', "PASS_TO_PASS": ["t.py::b"], "version": "1.0",
}  # fmt: skip
_MATH = {
    "prompt": [{"role": "user", "content": "1 + 1?"}],
    "reward_model": {"ground_truth": "2"},
    "extra_info": {"index": 3},
    "data_source": "d",
}
_AIME = {"Problem": "1 + 1?", "Answer": 2, "ID": "2024-1"}
_LIKE: tuple[Mapping[str, Any], ...] = (_OURS, _REPOSITORY, _MATH, _AIME)


def _no_layer() -> tuple[Layer, None]:
    """Instead of the layer that is made from a package index."""
    return Layer("math", "0" * 64, Path("/nonexistent")), None


def fuzz(data: bytes) -> None:
    with (
        patch.object(math_rows, "math_layer", _no_layer),
        patch.dict(os.environ, {"CLAWGYM_REPOS": "/nonexistent"}),
    ):
        _fuzz(Source(data))


def _fuzz(source: Source) -> None:
    path = scratch_folder() / source.pick(("rows.jsonl", "rows.json"))
    rows = [source.json(source.pick(_LIKE)) for _ in range(1 + source.number(0, 2))]
    path.write_bytes(b"[" + b",".join(rows) + b"]" if path.suffix == ".json" else b"\n".join(rows))
    try:
        for _, reader in iter_rows(path):
            try:
                task = reader()
            except TaskError as error:
                _short(error)
                continue
            task.content_hash  # noqa: B018
            try:
                written = write_row(task)
            except TaskError as error:
                _short(error)
                continue
            again = read_row(json.loads(written), "again")
            assert again.content_hash == task.content_hash
    except TaskError as error:
        _short(error)


def _short(error: Exception) -> None:
    str(error).encode()
    assert "Traceback" not in str(error)
