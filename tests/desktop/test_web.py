"""A site in one sandbox and its browser on a desktop in another: played and graded."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import clawgym  # registers the ids
from clawgym.agents import OracleAgent, ScriptAgent
from clawgym.desktop import KINDS
from clawgym.envs.checker import check_vector_env
from clawgym.errors import TaskError
from clawgym.records import Desktop, Limits, Outcome, Site, Task, TaskFile, TaskSet, ToolCall
from clawgym.sandbox import Backend
from clawgym.tasks.formats import write
from clawgym.tools import aimed, open_tools, sandbox_spec
from clawgym.tools.computer import ComputerTools

from ..rollouts import episode_of
from ..verifiers.tasks_for_tests import task

pytestmark = pytest.mark.usefixtures("programs")

SERVER = b'''
import http.server, sqlite3, urllib.parse
db = sqlite3.connect("colours.db", check_same_thread=False, isolation_level=None)
db.execute("CREATE TABLE IF NOT EXISTS chosen (name TEXT)")
PAGE = b"""<!doctype html><title>Colours</title><body style="font: 20px sans-serif"><h1>Choose</h1>
<form method=post><input id=name name=name aria-label=Colour><button id=send>Send</button></form>
<a id=slow href=/slow>slow</a>"""
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def answer(self, body):
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def do_GET(self):
        if self.path == "/slow":
            __import__("time").sleep(0.4)
            return self.answer(b"<title>Slow</title><body style='background: #00ff00'>here")
        self.answer(PAGE)
    def do_POST(self):
        form = urllib.parse.parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
        db.execute("INSERT INTO chosen VALUES (?)", form.get("name", [""]))
        self.answer(PAGE + b"<p>Thank you")
http.server.ThreadingHTTPServer(("127.0.0.1", 8080), Handler).serve_forever()
'''
CHECK = b"""
import json, os, sqlite3, sys
try:
    rows = sqlite3.connect(os.path.join(sys.argv[1], "colours.db")).execute("SELECT name FROM chosen").fetchall()
except sqlite3.Error:
    rows = []
print(json.dumps({"chosen": float(rows == [("teal",)])}))
"""
RIGHT = [
    {"name": "computer_use", "arguments": {"action": "left_click", "coordinate": "#name"}},
    {"name": "computer_use", "arguments": {"action": "type", "text": "teal"}},
    {"name": "computer_use", "arguments": {"action": "left_click", "coordinate": "#send"}},
    {"name": "computer_use", "arguments": {"action": "done", "text": "sent"}},
]
LIMITS = Limits(max_steps=5, memory_mb=1024, pids=256, agent_seconds=120, verify_seconds=20, setup_seconds=90)
SITE = Site(("python3", "/tools/site/server.py"), (TaskFile("server.py", SERVER),))


def colours(**changes: Any) -> Task:
    desktop = Desktop(width=640, height=480, site=SITE, page="/")
    made = task(CHECK, id="colours", inputs=(), desktop=desktop, limits=LIMITS, instruction="Choose teal.")
    return dataclasses.replace(made, solution=(TaskFile("solve.json", json.dumps(RIGHT).encode()),), **changes)


FILES = dataclasses.replace(
    task(id="files", limits=LIMITS),
    desktop=Desktop(width=640, height=480, programs=(("xfe",),)),
)
"""No caret is in sight, which would blink."""


async def test_solution_solves_the_task_with_screenshots_in_the_transcript(backend: Backend) -> None:
    episode = await episode_of(colours(), OracleAgent(), backend)
    assert episode.outcome is Outcome.SOLVED, episode.error
    assert episode.final_message == "sent"
    images = [seen.image for step in episode.steps for seen in step.observations]
    assert [image is None for image in images] == [False, False, False, True]
    assert images[0] is not None
    assert images[0].data.startswith(b"\x89PNG")


async def test_an_element_that_is_not_there_is_an_observation(backend: Backend) -> None:
    wrong = [{"name": "computer_use", "arguments": {"action": "left_click", "coordinate": "#nowhere"}}, *RIGHT]
    episode = await episode_of(colours(), ScriptAgent(json.dumps(wrong).encode()), backend)
    assert episode.outcome is Outcome.SOLVED
    assert "give [x, y]" in episode.steps[1].observations[0].content


async def test_doing_nothing_does_not_solve_the_task(backend: Backend) -> None:
    nothing = ScriptAgent(json.dumps(RIGHT[-1:]).encode())
    episode = await episode_of(colours(), nothing, backend)
    assert (episode.outcome, episode.result and episode.result.official) == (Outcome.FAILED, 0.0)


async def test_page_is_awaited_read_and_not_left(backend: Backend) -> None:
    made = colours()
    sandbox = await backend.create(sandbox_spec(made))
    tools = await open_tools(made, sandbox, backend)
    assert isinstance(tools, ComputerTools)
    assert tools.browser is not None

    async def do(**arguments: Any) -> None:
        call = await aimed(tools, ToolCall("1", "computer_use", arguments))
        (seen,) = await tools.call_all([call])
        assert not seen.content

    names = [(node["role"], node["name"]) for node in await tools.browser.tree()]
    assert ("heading", "Choose") in names
    assert ("textbox", "Colour") in names
    await do(action="left_click", coordinate="#slow")
    assert (await tools.desktop.picture())[400, 300].tolist() == [0, 255, 0]
    await do(action="key", keys=["ctrl", "t"])
    await do(action="type", text="127.0.0.1:8080/?another\n")
    assert 'button "Send"' in await tools.tree(), "the page of the other tab is meant"
    before = len(backend.sandboxes)  # type: ignore[attr-defined]
    await do(action="key", keys=["ctrl", "l"])
    await do(action="type", text="file:///etc/passwd\n")
    assert not any("root" in node["name"] for node in await tools.browser.tree())
    await tools.aclose()
    assert len(backend.sandboxes) == before - 1  # type: ignore[attr-defined]
    await sandbox.close()


@pytest.mark.filterwarnings("ignore:.*render")
def test_one_env_passes_gymnasiums_checker() -> None:
    env = gym.make("ClawGym/gui-v0", tasks=TaskSet("t", (FILES,)), width=640, height=480, render_mode="rgb_array")
    check_env(env.unwrapped)
    env.close()


def test_an_episode() -> None:
    tasks = TaskSet("t", (colours(),))
    env = gym.make("ClawGym/gui-v0", tasks=tasks, width=640, height=480, render_mode="rgb_array", unit="relative")
    observation, info = env.reset(seed=1)
    assert info["instruction"] == "Choose teal."
    shown = env.render()
    assert (shown == observation["screenshot"]).all()
    _, reward, *over, info = env.step({"action": "fly"})
    assert "use one of" in info["message"]
    assert (reward, over) == (0.0, [False, False])
    action = env.action_space.sample()
    action |= {"action": KINDS.index("mouse_move"), "coordinate": np.array([250, 250], np.float32)}
    assert (env.step(action)[0]["screenshot"] != shown).any()
    *_, terminated, truncated, info = env.step({"action": "fail", "text": "I cannot"})
    assert (terminated, truncated, info["outcome"]) == (True, False, "failed")
    env.close()


def test_a_batch_passes_our_checker() -> None:
    batch = gym.make_vec(
        "ClawGym/gui-v0",
        num_envs=2,
        tasks=TaskSet("t", (FILES,)),
        width=640,
        height=480,
    )
    check_vector_env(batch, end_action={"action": "done"}, action={"action": "screenshot"})
    batch.close()


def test_the_accessibility_tree_is_there_if_asked_for() -> None:
    tasks = TaskSet("t", (colours(), FILES))
    env = gym.make("ClawGym/gui-v0", tasks=tasks, width=640, height=480, accessibility_tree=True)
    page, _ = env.reset(options={"task_ids": ["colours"]})
    assert 'heading "Choose"' in page["accessibility_tree"]
    assert '\n  textbox "Colour"' in page["accessibility_tree"]
    assert env.observation_space.contains(page)
    native, _ = env.reset(options={"task_ids": ["files"]})
    assert native["accessibility_tree"].startswith('window "')
    env.close()


@pytest.mark.parametrize("format", ["rows", "harbor"])
def test_no_format_drops_a_desktop(tmp_path: Path, format: Any) -> None:
    with pytest.raises(TaskError, match="has a desktop"):
        write([FILES], tmp_path / "out", format)


def test_tasks_that_do_not_fit_are_refused() -> None:
    env = gym.make("ClawGym/gui-v0", tasks=TaskSet("t", (FILES,)))
    with pytest.raises(clawgym.ClawGymError, match="width=640, height=480"):
        env.reset()
    env.close()
