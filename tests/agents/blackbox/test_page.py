"""Run docs/tutorials/plug-in-an-agent.md: the code blocks as one file, and the commands with the output shown."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
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
from .hands import PAGE, hands, page_source

__all__ = ["fake_openai"]


def shown() -> list[tuple[str, str]]:
    """Each command of the page, and the output shown for it."""
    text = "".join(re.findall(r"^```console\n(.*?)^```", PAGE.read_text(), re.M | re.S))
    return [(command, output) for command, output in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n?)*)", text, re.M)]


async def types(command: str, folder: Path, **env: str) -> tuple[int, str]:
    """Run a command of the page in ``folder``; return its exit code and output."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    process = await asyncio.create_subprocess_exec(
        "bash", "-c", command, cwd=folder, env={**os.environ, "PATH": path, **env},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, stdin=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        output, _ = await process.communicate()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    assert process.returncode is not None
    return process.returncode, output.decode()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder with the page's file."""
    (tmp_path / "hands.py").write_text(page_source())
    return tmp_path


async def test_page_commands_give_shown_output(folder: Path, fake_openai: FakeOpenAI) -> None:
    (alone, expected), (evaluated, _) = shown()
    assert alone == "python hands.py"
    code, output = await types(alone, folder)
    assert (code, output) == (0, expected)

    async def path_for(request: dict[str, Any]) -> Streamed | web.Response:
        return Streamed(WORDS) if request.get("stream") else await reply("OK")(request)

    fake_openai.default = path_for
    command = evaluated.replace("MODEL", "m").replace("URL", fake_openai.base_url)
    assert command != evaluated
    code, output = await types(f"{command} --out run", folder, OPENAI_API_KEY="none")
    assert code == 0, output
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
