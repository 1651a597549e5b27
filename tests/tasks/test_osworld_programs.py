"""OSWorld tasks with real programs: LibreOffice and Chromium on our desktop, from JSON to a grade."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clawgym.agents import ScriptAgent
from clawgym.records import Outcome, Task
from clawgym.sandbox import Backend
from clawgym.tasks.formats import osworld
from clawgym.tasks.formats._osworld_evaluator import office_layer
from clawgym.tasks.formats._osworld_setup import HOME

from ..rollouts import episode_of

pytestmark = pytest.mark.timeout(600)

DONE = {"action": "done"}


def key(*keys: str) -> dict[str, Any]:
    return {"action": "key", "keys": list(keys)}


def typed(text: str) -> dict[str, Any]:
    return {"action": "type", "text": text}


async def solved(task: Task, backend: Backend, *given: dict[str, Any]) -> bool:
    assert task.unsupported is None
    agent = ScriptAgent(json.dumps([{"name": "computer_use", "arguments": a} for a in (*given, DONE)]).encode())
    episode = await episode_of(task, agent, backend)
    assert episode.outcome in (Outcome.SOLVED, Outcome.FAILED), (episode.cause, episode.error)
    return episode.outcome is Outcome.SOLVED


def written(folder: Path, body: dict[str, Any]) -> Task:
    path = folder / f"{body['id']}.json"
    path.write_text(json.dumps(body))
    return osworld.read_task(path)


@pytest.fixture
def books(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes workbooks with openpyxl of the layer: rows -> file."""
    layer, missing = office_layer()
    if missing:
        pytest.skip(missing)
    monkeypatch.setattr(sys, "path", [str(layer.folder), *sys.path])
    known = set(sys.modules)
    from openpyxl import Workbook  # type: ignore[reportMissingModuleSource]  # in the layer

    def make(name: str, *rows: list[Any]) -> Path:
        book = Workbook()
        sheet: Any = book.active
        for row in rows:
            sheet.append(row)
        book.save(tmp_path / name)
        return tmp_path / name

    yield make
    for name in set(sys.modules) - known:
        if name.partition(".")[0] in ("openpyxl", "et_xmlfile"):
            del sys.modules[name]


def needs(*programs: str) -> None:
    if missing := [name for name in ("Xvfb", "openbox", *programs) if not shutil.which(name)]:
        pytest.skip(f"no {', '.join(missing)} here: install them")


async def test_calc_document_is_saved_and_compared(tmp_path: Path, backend: Backend, books: Any):
    needs("soffice")
    (tmp_path / "sum").mkdir()
    books("sum/prices.xlsx", ["fruit", "price"], ["apple", 3], ["pear", 4])
    books("sum/gold.xlsx", ["fruit", "price"], ["apple", 3], ["pear", 4], ["sum", 7])
    path = f"{HOME}/prices.xlsx"
    task = written(
        tmp_path,
        {
            "id": "sum",
            "instruction": "Write the sum of the prices into row 4, with the word sum before it.",
            "config": [
                {"type": "download", "parameters": {"files": [{"url": "https://x/prices.xlsx", "path": path}]}},
                {"type": "open", "parameters": {"path": path}},
            ],
            "related_apps": ["libreoffice_calc"],
            "evaluator": {
                "postconfig": [
                    {
                        "type": "activate_window",
                        "parameters": {"window_name": "prices.xlsx - LibreOffice Calc", "strict": True},
                    },
                    {"type": "sleep", "parameters": {"seconds": 1}},
                    {
                        "type": "execute",
                        "parameters": {"command": ["python", "-c", "import pyautogui; pyautogui.hotkey('ctrl', 's')"]},
                    },
                ],
                "func": "compare_table",
                "result": {"type": "vm_file", "path": path, "dest": "prices.xlsx"},
                "expected": {"type": "cloud_file", "path": "https://x/gold.xlsx", "dest": "gold.xlsx"},
                "options": {"rules": [{"type": "sheet_data", "sheet_idx0": 0, "sheet_idx1": "EI0"}]},
            },
        },
    )
    below = (key("ctrl", "Home"), key("down"), key("down"), key("down"))
    assert await solved(task, backend, *below, typed("sum\t=B2+B3\n"))
    assert not await solved(task, backend)
    assert not await solved(task, backend, *below, typed("sum\t8\n"))


async def test_setting_of_chromium_is_read_from_its_profile(tmp_path: Path, backend: Backend):
    needs("chromium")
    kill = {"type": "launch", "parameters": {"command": ["pkill", "chrome"]}}
    task = written(
        tmp_path,
        {
            "id": "track",
            "instruction": "Have the browser send a Do Not Track request.",
            "config": [
                {"type": "launch", "parameters": {"command": ["google-chrome", "--remote-debugging-port=1337"]}},
                {"type": "launch", "parameters": {"command": ["socat", "tcp-listen:9222,fork", "tcp:localhost:1337"]}},
            ],
            "related_apps": ["chrome"],
            "evaluator": {
                "postconfig": [kill, {"type": "launch", "parameters": {"command": ["google-chrome"]}}],
                "func": "exact_match",
                "result": {"type": "enable_do_not_track"},
                "expected": {"type": "rule", "rules": {"expected": "true"}},
            },
        },
    )
    assert not await solved(task, backend)
    switch, confirm = ({"action": "left_click", "coordinate": place} for place in ([1259, 611], [1160, 679]))
    for tens in (1, 2, 5):  # the page is drawn in pieces, and nothing in the sandbox tells when the last is there
        waits = [{"action": "wait", "seconds": 10}] * tens
        steps = (key("ctrl", "l"), typed("chrome://settings/cookies\n"), *waits, switch, waits[0], confirm)
        if await solved(task, backend, *steps):
            return
    pytest.fail("the switch was not changed")
