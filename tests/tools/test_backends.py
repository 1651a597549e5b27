"""Whole episodes over tool servers, on every backend."""

from __future__ import annotations

import pytest

from clawgym.agents import OracleAgent
from clawgym.records import Outcome
from clawgym.sandbox import local_names

from ..conftest import usable
from ..rollouts import episode_of
from .conftest import opened, sandboxes
from .tasks_with_tools import call, noting, tiny

pytest.importorskip("mcp")
TASK = noting(tiny("two", "b_"))


@pytest.mark.parametrize("name", [n for n in local_names() if n != "namespace"])
async def test_an_episode(name: str, request: pytest.FixtureRequest) -> None:
    """The other tests use ``namespace``."""
    if name == "docker":
        request.getfixturevalue("docker_engine")
    async with usable(name) as backend:
        episode = await episode_of(TASK, OracleAgent(), backend)
        assert (episode.outcome, episode.error) == (Outcome.SOLVED, "")
        assert not sandboxes(backend)
        async with opened(TASK, backend) as made:
            assert await made(call("echo", text="1"), call("b_add", a=1, b=1), call("note", line="x")) == [
                "1",
                "2",
                "noted",
            ]
            (gone,) = await made(call("do", what="die"))
            assert "I am dying" in gone
