"""The pack ``gui-basic``: every generator's solution passes, nothing cheap or wrong does, and seeds stay apart.

Lists of actions are carried out over HTTP, without a browser: the solution at a server that runs as it does in a box.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from clawgym.desktop import parse
from clawgym.records import Site, Task
from clawgym.tasks.packs import gui_basic as pack
from clawgym.tasks.packs.gui_basic import _build
from clawgym.tasks.packs.seeded import draft_of
from clawgym.tasks.worlds.sites import SITE_FILE

from .paper_browser import Browser, Local, Served, scores

WEB = [name for name, made in pack.GENERATORS.items() if made.family not in ("files", "notes")]
"""The others: ``test_gui_native.py``."""
CASES = [(name, seed) for name in WEB for seed in (0, 1)]
each_case = pytest.mark.parametrize(("name", "seed"), CASES if os.environ.get("CLAWGYM_WHOLE") else CASES[1::2])
each_generator = pytest.mark.parametrize("name", pack.GENERATORS)
GONE = [name for name in pack.GENERATORS if name.endswith("-gone")]


def site_of(task: Task) -> Site:
    assert task.desktop is not None
    assert task.desktop.site is not None
    return task.desktop.site


def steps_of(task: Task) -> list[dict[str, Any]]:
    return json.loads(task.solution[0].read())


@each_case
def test_solution_passes(name: str, seed: int, tmp_path: Path) -> None:
    task = pack.make(name, seed)
    assert task.desktop is not None
    with Served(site_of(task), tmp_path) as served:
        browser = Browser(served, task.desktop.page)
        assert set(scores(task, served.workspace, [], tmp_path / "nothing").values()) == {0.0}
        browser.run(task.solution[0])
        got = scores(task, served.workspace, browser.said, tmp_path / "all")
        assert not served.log.read_text()
        assert set(got.values()) == {1.0}, got
        assert 1 <= len(got) <= 6
        assert len(browser.said) < task.limits.max_steps
        for rest in (browser.said[:-1], [*browser.said, {"name": "computer_use", "arguments": {"action": "wait"}}]):
            unsaid = scores(task, served.workspace, rest, tmp_path / f"unsaid-{len(rest)}")
            assert set(unsaid.values()) == {0.0}, "paid without the right last word"


@each_case
def test_wrong_solutions_fail(name: str, seed: int, tmp_path: Path) -> None:
    task = pack.make(name, seed)
    assert task.desktop is not None
    assert len({file.path for file in task.wrong_solutions}) >= 3
    for file in task.wrong_solutions:
        folder = tmp_path / Path(file.path).stem
        site = Local(site_of(task), folder)
        before = site.dump()
        browser = Browser(site, task.desktop.page)
        browser.run(file)
        got = scores(task, site.workspace, browser.said, folder)
        assert min(got.values()) < 1.0, f"{file.path} passes"
        word = browser.said[-1]["arguments"]["action"]
        if word != steps_of(task)[-1]["arguments"]["action"] or site.dump() == before:
            assert set(got.values()) == {0.0}, f"{file.path} is paid"


@pytest.mark.parametrize("name", ["table-edit", "table-edit-gone"])
def test_missing_state_scores_zero(name: str, tmp_path: Path) -> None:
    """A site that went down, or was never there, is no reason to pay for ``done`` or ``fail``."""
    task = pack.make(name, 1)
    said = steps_of(task)[-1:]
    (tmp_path / "workspace").mkdir()
    assert set(scores(task, tmp_path / "workspace", said, tmp_path).values()) == {0.0}
    (tmp_path / "workspace" / SITE_FILE).write_bytes(b"SQLite format 3\0" + bytes(5000))
    assert set(scores(task, tmp_path / "workspace", said, tmp_path / "again").values()) == {0.0}


def test_any_submit_message_but_fail_passes(tmp_path: Path) -> None:
    """As it does where the tools are described."""
    task = pack.make("forms-signup", 1)
    assert task.desktop is not None
    site = Local(site_of(task), tmp_path)
    browser = Browser(site, task.desktop.page)
    browser.run(task.solution[0])
    said = [*browser.said[:-1], {"name": "submit", "arguments": {"message": "It is sent."}}]
    assert set(scores(task, site.workspace, said, tmp_path).values()) == {1.0}
    said = [{"name": "submit", "arguments": {"message": "fail"}}]
    gone = pack.make("forms-option-gone", 1)
    assert set(scores(gone, Local(site_of(gone), tmp_path / "gone").workspace, said, tmp_path / "gone").values()) == {0}


@each_generator
def test_splits_have_different_instances(name: str) -> None:
    seeds = (*range(12), 10**12, 10**12 + 1)
    drafts = {seed: draft_of(pack.GENERATORS[name], seed, _build.chain_of) for seed in seeds}
    for of in (lambda draft: draft.instruction, _build.chain_of):
        sides = [{of(draft) for seed, draft in drafts.items() if seed % 2 == side} for side in (0, 1)]
        assert not sides[0] & sides[1]
        for seed, draft in drafts.items():
            assert hashlib.sha256(of(draft).encode()).digest()[0] % 2 == seed % 2
    assert len({draft.instruction for draft in drafts.values()}) == len(seeds)


@each_generator
def test_form(name: str) -> None:
    for seed in range(2, 8):
        task = pack.make(name, seed)
        assert [file.path for file in task.solution] == ["solve.json"]
        for file in (*task.solution, *task.wrong_solutions):
            assert re.fullmatch(r"[a-z0-9-]+\.json", file.path)
            calls = json.loads(file.read())
            assert all(call["name"] == "computer_use" for call in calls)
            for call in calls:
                points = {key: [1, 1] for key in ("coordinate", "start_coordinate") if key in call["arguments"]}
                parse({**call["arguments"], **points}, 1024, 768)
            words = [call["arguments"]["action"] in ("done", "fail") for call in calls]
            assert words == [False] * (len(words) - 1) + [True]
        reachable = {file.sha256 for file in (site_of(task).files if name in WEB else task.inputs)}
        assert not reachable & {file.sha256 for file in task.verifier.files}


def test_families_and_levels() -> None:
    levels: dict[str, set[int]] = {}
    for generator in pack.GENERATORS.values():
        levels.setdefault(generator.family, set()).add(generator.level)
    assert len(levels) == 8
    assert all(found == {1, 2, 3} for found in levels.values())
    assert len(pack.GENERATORS) >= 22


@pytest.mark.parametrize("name", GONE)
def test_infeasible_tasks_have_a_feasible_twin(name: str) -> None:
    """Whose words are the same but for names and numbers, so that they do not tell which of the two it is."""
    twin = name.removesuffix("-gone")
    assert pack.GENERATORS[name].level == pack.GENERATORS[twin].level

    def words(name: str, seed: int) -> str:
        text = pack.make(name, seed).instruction
        quoted = re.sub(r'"[^"]*"|[A-Z]\w+( \w+)?|\b[a-z.]+@example.org', "X", text)
        return re.sub(r"\d+|\bX\b|\w+(?=;)|: .*", "", quoted)

    plain = {words(twin, seed) for seed in range(60)}
    assert {words(name, seed) for seed in range(12)} <= plain


def test_load() -> None:
    tasks = pack.load()
    assert (tasks.name, tasks.version) == ("gui-basic:heldout", pack.VERSION)
    assert len(tasks) == 2 * len(pack.GENERATORS)
    assert len(GONE) >= 4
