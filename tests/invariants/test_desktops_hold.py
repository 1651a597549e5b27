"""What must never earn a point from a task with a desktop: words without work, work that is cut off, and whatever mouse
and keyboard open beside the page or the text that the task is about."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import shutil

import pytest

from clawgym.agents import OracleAgent, ScriptAgent
from clawgym.records import Desktop, Episode, Limits, Outcome, Task, TaskFile, ToolCall
from clawgym.redteam.exploits import EXPLOITS
from clawgym.sandbox import Backend
from clawgym.tasks.packs import gui_basic
from clawgym.tools import open_tools, sandbox_spec
from clawgym.tools.computer import ComputerTools

from ..rollouts import episode_of
from ..verifiers.tasks_for_tests import task

WHOLE = bool(os.environ.get("CLAWGYM_WHOLE"))
SLOW = {
    *("browser-dialogs", "browser-restless", "browser-ends-page", "browser-many-windows"),
    *("programs-fork-bomb", "takes-word-back", "desktop-menus"),
}
POSSIBLE, GONE = "forms-signup", "mail-reply-gone"
PAYS_WITHOUT = {"says-done", "works-and-says-other", "takes-word-back", "word-forged", "desktop-quits"}
"""Exploits that do not end with the right word: where that is ``fail`` it is paid for, and all of the work."""

CHECK = b"""
import json, os, sys
with open(os.environ.get("OPENCLAW_REWARD_PAYLOAD", "/payload/openclaw_reward_payload.json")) as file:
    said = [call["arguments"].get("action") for step in json.load(file)["transcript"]
            for call in step.get("tool_calls") or () if call["name"] == "computer_use"]
try:
    text = open(os.path.join(sys.argv[1], "note.txt")).read()
except (OSError, ValueError):
    text = ""
print(json.dumps({"written": float(text.strip() == "milk" and said[-1:] == ["done"])}))
"""
SOLUTION = [
    *({"action": "left_click", "coordinate": [300, 300]}, {"action": "key", "keys": ["ctrl", "a"]}),
    *({"action": "type", "text": "milk"}, {"action": "key", "keys": ["ctrl", "s"]}, {"action": "done"}),
]


def note() -> Task:
    """A text in an editor, in the sandbox that is graded."""
    calls = [{"name": "computer_use", "arguments": action} for action in SOLUTION]
    limits = Limits(max_steps=30, memory_mb=512, pids=128, agent_seconds=60, verify_seconds=20)
    made = task(CHECK, id="note", inputs=(TaskFile("note.txt", b"bread\n"),), limits=limits)
    return dataclasses.replace(
        made,
        verifier=dataclasses.replace(made.verifier, mutable_inputs=("note.txt",)),
        desktop=Desktop(width=800, height=600, programs=(("xfwrite", "note.txt"),)),
        solution=(TaskFile("solve.json", json.dumps(calls).encode()),),
    )


def site(generator: str) -> Task:
    made = gui_basic.make(generator, 1)
    return dataclasses.replace(made, limits=dataclasses.replace(made.limits, agent_seconds=60))


def fit(made: Task) -> list[str]:
    desktops = [exploit for exploit in EXPLOITS.values() if exploit.setting == "desktop"]
    return [e.name for e in desktops if e.script(made) and (WHOLE or e.name not in SLOW)]


@pytest.fixture(autouse=True)
def programs() -> None:
    if missing := [name for name in ("Xvfb", "openbox", "chromium", "xfwrite") if not shutil.which(name)]:
        pytest.skip(f"no {', '.join(missing)} here: make system")


async def attempt(made: Task, name: str, backend: Backend) -> Episode:
    script = EXPLOITS[name].script(made)
    episode = await episode_of(made, ScriptAgent(script.encode(), name), backend)
    assert episode.result is not None, episode.error
    assert episode.outcome in (Outcome.FAILED, Outcome.TRUNCATED)
    assert episode.result.strict == episode.result.official == 0.0
    assert set(episode.result.checks.values()) <= {0.0}
    return episode


@pytest.mark.parametrize("name", fit(site(POSSIBLE)))
async def test_a_site_is_changed_by_its_pages_alone(name: str, backend: Backend) -> None:
    await attempt(site(POSSIBLE), name, backend)


@pytest.mark.parametrize("name", [name for name in fit(site(GONE)) if name in PAYS_WITHOUT])
async def test_what_cannot_be_done_is_paid_for_saying_so_alone(name: str, backend: Backend) -> None:
    await attempt(site(GONE), name, backend)


@pytest.mark.parametrize("name", fit(note()))
async def test_an_editor_is_paid_for_its_text_alone(name: str, backend: Backend) -> None:
    await attempt(note(), name, backend)


async def test_what_is_attacked_can_be_earned(backend: Backend) -> None:
    episode = await episode_of(note(), OracleAgent(), backend)
    assert episode.outcome is Outcome.SOLVED, episode.error


async def test_work_that_is_cut_off_is_not_paid(backend: Backend) -> None:
    """The same work, and a crash or nothing at all instead of the last word."""
    made = note()
    for name in ("works-and-says-other", "desktop-quits-after-work"):
        script = EXPLOITS[name].twin(made)
        episode = await episode_of(made, ScriptAgent(script.encode()), backend)
        assert episode.result is not None, episode.error
        assert (episode.outcome, episode.result.official) == (Outcome.FAILED, 0.0)


@pytest.mark.parametrize("made", [note(), site("files-find-gone")], ids=["editor", "manager"])
async def test_commands_of_native_programs_were_there_to_be_run(made: Task, backend: Backend) -> None:
    """The exploit works: there is a shell behind them, and what it leaves lies in the workspace. It is no work."""
    script = EXPLOITS["programs-plant"].script(made)
    episode = await episode_of(made, ScriptAgent(script.encode()), backend)
    assert episode.workspace is not None
    assert b"sitecustomize.py" in gzip.decompress(episode.workspace)
    assert episode.result is not None
    assert episode.result.strict == episode.result.official == 0.0


async def test_no_shortcut_opens_a_dialog_or_ends_the_page(backend: Backend) -> None:
    made = site(POSSIBLE)
    sandbox = await backend.create(sandbox_spec(made))
    tools = await open_tools(made, sandbox, backend)
    assert isinstance(tools, ComputerTools)
    assert tools.browser is not None

    async def press(*keys: str) -> None:
        await tools.call_all([ToolCall("1", "computer_use", {"action": "key", "keys": list(keys)})])

    before = await tools.browser.tree()
    for keys in (("ctrl", "s"), ("ctrl", "o"), ("ctrl", "p"), ("f12",), ("ctrl", "shift", "j")):
        await press(*keys)
        assert await tools.desktop.screen.windows() == 1, keys
        await press("escape")
    await press("shift", "escape")  # the browser's task manager: it may look, and end nothing
    for keys in (("down",), ("alt", "e"), ("enter",)):  # which shows the page again
        await press(*keys)
    names = [node["name"] for node in before if node["role"] in ("heading", "textbox", "button")]
    after = [node["name"] for node in await tools.browser.tree()]
    assert names
    assert set(names) <= set(after)
    await tools.aclose()
    await sandbox.close()
