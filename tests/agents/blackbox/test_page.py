"""The agent of docs/tutorials/plug-in-an-agent.md (tests/test_tutorials.py runs the whole page)."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from clawgym.agents import make_agent
from clawgym.agents.blackbox import Claw, Running
from clawgym.engines import Completion, ReplayEngine

from ...engines.fake_openai import WORDS, FakeOpenAI, Streamed, fake_openai, reply
from .hands import hands, page_source

__all__ = ["fake_openai"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder with the page's file."""
    (tmp_path / "hands.py").write_text(page_source())
    return tmp_path


async def test_page_agent_is_evaluated(folder: Path, fake_openai: FakeOpenAI) -> None:
    async def path_for(request: dict[str, Any]) -> Streamed | web.Response:
        return Streamed(WORDS) if request.get("stream") else await reply("OK")(request)

    fake_openai.default = path_for
    command = ["eval", "terminal-basic", "--limit", "2", "--agent", "hands:Hands", "--model", "m", "--out", "run"]
    env = {**os.environ, "OPENAI_API_KEY": "none", "PYTHONPATH": "."}
    program = Path(sys.executable).with_name("clawgym")
    process = await asyncio.create_subprocess_exec(
        program, *command, "--base-url", fake_openai.base_url, cwd=folder, env=env
    )
    assert await process.wait() == 0
    manifest = json.loads((folder / "run" / "receipt.json").read_text())
    assert "hands" in json.dumps(manifest)
    assert len(fake_openai.requests) == 3, "one call before the run, and one for each task"
    assert all(request["tools"][0]["function"]["name"] == "bash" for request in fake_openai.requests[1:])


@pytest.fixture
def found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make the module ``hands`` importable."""
    monkeypatch.syspath_prepend(folder)
    yield
    sys.modules.pop("hands", None)


@pytest.mark.usefixtures("found")
def test_make_agent_finds_class_by_module_path() -> None:
    agent = make_agent("hands:Hands", engine=ReplayEngine([Completion("Hello.")]))
    assert (agent.name, agent.version) == ("hands", "1")
    assert len(agent.identity()["program_sha256"]) == 64


def test_page_names_every_protocol_member() -> None:
    claw = hands()
    for protocol, text in ((Claw, dir(claw)), (Running, dir(claw.start.__globals__["RunningHands"]))):
        parts = {name for name in {*vars(protocol), *protocol.__annotations__} if not name.startswith("_")}
        assert parts <= set(text)
