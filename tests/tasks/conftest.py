"""A small sound task folder, to be changed by each test."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clawgym.errors import TaskSetNotFound
from clawgym.records import DEFAULT_WORKSPACE, TaskSet
from clawgym.tasks import load
from clawgym.verifiers.protocols.reward_sh import standard_reward_sh

Maker = Callable[..., Path]


def published_clone(name: str, repository: str) -> TaskSet:
    """The published set ``name`` in a clone of ``repository``, which ``CLAWGYM_DATA`` may hold; skips without one."""
    if not os.environ.get("CLAWGYM_DATA"):
        pytest.skip(f"CLAWGYM_DATA is not set: it may hold a clone of {repository} called {name.lower()}")
    try:
        return load(name)
    except TaskSetNotFound as error:
        pytest.skip(str(error))


@pytest.fixture
def make_task(tmp_path: Path) -> Maker:
    """``make_task(name, **entry)`` writes a task folder; an entry of ``None`` is left out."""

    def make(name: str = "task_0000", **changes: Any) -> Path:
        folder = tmp_path / "set" / name
        (folder / "input_files" / "input").mkdir(parents=True)
        (folder / "input_files" / "input" / "a.csv").write_text("a,b\n1,2\n")
        (folder / "reward").mkdir()
        (folder / "reward" / "check.py").write_text("import json\nprint(json.dumps({'done': 0.0}))\n")
        (folder / "reward" / "reward.sh").write_bytes(standard_reward_sh())
        entry = {
            "task_id": name,
            "user_query": "Write output/b.csv.",
            "metadata": {"category": "", "grading_type": "automated"},
            "input_mount_dir": DEFAULT_WORKSPACE,
            **changes,
        }
        entry = {key: value for key, value in entry.items() if value is not None}
        (folder / "data_entry.json").write_text(json.dumps(entry, indent=2) + "\n")
        return folder

    return make
