"""Watching desktops while they run."""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import re
import urllib.error
import urllib.request
from pathlib import Path

import gymnasium as gym
import numpy as np
import PIL.Image
import pytest

import clawgym  # noqa: F401  # registers the ids
from clawgym import live
from clawgym.agents import OracleAgent
from clawgym.evaluation.runner import EvalConfig, evaluate
from clawgym.records import Desktop, Limits, TaskFile, TaskSet
from clawgym.sandbox import Backend

from ..verifiers.tasks_for_tests import task
from .test_web import RIGHT, colours

pytestmark = pytest.mark.usefixtures("programs")
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


NOTE = Desktop(width=640, height=480, programs=(("xfwrite", "input/numbers.txt"),))
LIMITS = Limits(max_steps=5, memory_mb=1024, pids=256, setup_seconds=90)
TASKS = TaskSet("t", (task(id="note", limits=LIMITS, desktop=NOTE),))


def get(url: str) -> bytes:
    with opener.open(url, timeout=10) as answer:
        return answer.read()


def pixels(png: bytes) -> np.ndarray:
    return np.asarray(PIL.Image.open(io.BytesIO(png)))


def test_human_shows_every_frame_on_a_page_and_returns_none(capfd: pytest.CaptureFixture[str]) -> None:
    env = gym.make("ClawGym/gui-v0", tasks=TASKS, width=640, height=480, render_mode="human")
    assert "human" in env.unwrapped.metadata["render_modes"]
    observation, _ = env.reset(seed=1)
    (url,) = re.findall(r"http://127\.0\.0\.1:\d+/\S+", capfd.readouterr().err)
    assert env.render() is None
    (before,) = json.loads(get(url + "all"))
    assert (before["task"], before["step"]) == ("note", 0)
    assert (pixels(get(f"{url}picture/{before['id']}")) == observation["screenshot"]).all()
    observation, *_ = env.step({"action": "mouse_move", "coordinate": [70, 60]})
    assert env.render() is None
    (after,) = json.loads(get(url + "all"))
    assert (after["id"], after["step"]) == (before["id"], 1)
    assert after["picture"] > before["picture"]
    assert "mouse_move" in after["action"]
    assert (pixels(get(f"{url}picture/{after['id']}")) == observation["screenshot"]).all()
    env.step({"action": "done"})
    (last,) = json.loads(get(url + "all"))
    assert last["step"] == 2, "the last frame stays until the next reset"
    env.reset()
    assert json.loads(get(url + "all"))[0]["step"] == 0
    assert "http" not in capfd.readouterr().err, "it is said once"
    env.close()
    with pytest.raises(urllib.error.URLError):
        get(url)


async def test_an_evaluation_keeps_what_was_seen_and_its_report_shows_it(backend: Backend, tmp_path: Path) -> None:
    wrong = TaskFile("solve.json", json.dumps([RIGHT[0], RIGHT[-1]]).encode())
    tasks = TaskSet("t", (colours(), dataclasses.replace(colours(), id="half", solution=(wrong,))))
    summary = await evaluate(EvalConfig(tasks, OracleAgent(), backend, tmp_path / "run"), retry_seconds=0)
    assert summary.outcomes == {"solved": 1, "failed": 1}
    document = json.loads((tmp_path / "run/episodes/colours.0/transcript.json").read_bytes())
    contents = [seen["content"] for step in document["steps"][1:] for seen in step["observation"]["results"]]
    for content, nth in zip(contents[:-1], range(3), strict=True):
        path = (tmp_path / "run/episodes/colours.0" / content[0]["source"]["path"]).resolve()
        assert path.parent == tmp_path / "run" / "pictures", nth
        assert pixels(path.read_bytes()).shape == (480, 640, 3)
    assert contents[-1] == "done"
    shown = re.findall(r"data:image/png;base64,([\w+/=]+)", (tmp_path / "run/report.html").read_text())
    frames = [PIL.Image.open(io.BytesIO(base64.b64decode(png))).size for png in shown]
    assert frames.count((512, 384)) == 2 * (3 + 1), "in the list of an episode's pictures, and at their steps"


def test_a_batch_is_watched_from_outside() -> None:
    with pytest.raises(ValueError, match="clawgym view"):
        gym.make("ClawGym/gui-v0", num_envs=2, tasks=TASKS, width=640, height=480, render_mode="human")
    envs = gym.make("ClawGym/gui-v0", num_envs=2, tasks=TASKS, width=640, height=480)
    observations, _ = envs.reset(seed=1)
    seen = live.ThisProcess().all()
    assert [entry["task"] for entry in seen] == ["note", "note"]
    pictures = [pixels(live.ThisProcess().picture(entry["id"]) or b"") for entry in seen]
    for shown in observations["screenshot"]:
        assert any((picture == shown).all() for picture in pictures)
    envs.close()
    assert live.ThisProcess().all() == []
