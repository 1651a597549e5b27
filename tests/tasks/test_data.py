"""The public data, whole: needs ``CLAWGYM_DATA``."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path

import pytest

from clawgym.tasks import load
from clawgym.tasks.curation.categories import KEYWORDS
from clawgym.tasks.formats import clawgym, harbor
from clawgym.tasks.formats.rows import read_row, write_row

pytestmark = pytest.mark.data

KINDS = {"ClawGym-Bench": {"in_process": 6, "subprocess": 15}, "ClawGym-Train": {"in_process": 31, "subprocess": 145}}


@pytest.fixture(scope="module", params=["ClawGym-Bench", "ClawGym-Train"])
def tasks(request, clawgym_data):
    return load(request.param)


def test_all_published_tasks_are_read_in_seconds(clawgym_data):
    start = time.process_time()
    found = load("ClawGym-Train")
    assert time.process_time() - start < 20
    assert (len(found), dict(found.problems)) == (2000, {})


def test_known_facts_of_published_data(tasks):
    assert len(tasks) == {"ClawGym-Bench": 200, "ClawGym-Train": 2000}[tasks.name]
    assert tasks.problems == {}
    kinds = Counter(task.verifier.executes_agent_code for task in tasks.tasks)
    assert {kind: kinds[kind] for kind in ("in_process", "subprocess")} == KINDS[tasks.name]
    assert {task.metadata["category"] for task in tasks.tasks} == set(KEYWORDS)
    assert sum(not task.inputs for task in tasks.tasks) == {"ClawGym-Bench": 0, "ClawGym-Train": 13}[tasks.name]
    assert all(task.unsupported is None for task in tasks.tasks)


def test_conversions_keep_the_hash(tasks, tmp_path):
    """And the entry comes back byte for byte, but for the final newline that upstream sometimes leaves out."""
    for task in tasks.tasks if tasks.name == "ClawGym-Bench" else tasks.tasks[::10]:
        row = read_row(json.loads(write_row(task)))
        assert row.content_hash == task.content_hash
        clawgym.write_task(row, tmp_path / "c" / task.id)
        folder = clawgym.read_task(tmp_path / "c" / task.id)
        harbor.write_task(folder, tmp_path / "h" / task.id)
        assert harbor.read_task(tmp_path / "h" / task.id).content_hash == folder.content_hash == task.content_hash
        assert (row.metadata, row.id) == (task.metadata, task.id)
        entries = [Path(root, "data_entry.json").read_text().strip() for root in (task.origin, folder.origin)]
        assert entries[0] == entries[1]


def test_share_of_tasks_that_change_an_input(tasks):
    share = sum(bool(task.verifier.mutable_inputs) for task in tasks.tasks) / len(tasks)
    assert 0.10 < share < 0.15
