"""Programs in Python and Node in chroot sandboxes (without a loopback) and Docker sandboxes, not as root."""

from __future__ import annotations

import os
from typing import Any

import pytest

from clawgym.agents.openclaw.install import installed
from clawgym.agents.pi import Pi
from clawgym.errors import AgentError, SandboxUnavailable
from clawgym.pool import sequences_of
from clawgym.records import Outcome
from clawgym.sandbox import backend as make_backend

from ...rollouts import episode_of
from ...sandbox.conftest import docker_engine
from .conftest import bash, task
from .hands import hands

__all__ = ["docker_engine"]


def pi() -> Pi:
    """The real pi, if it is installed."""
    try:
        installed()
    except AgentError as error:
        pytest.skip(str(error))
    return Pi()


@pytest.mark.parametrize("claw", [hands, pi])
@pytest.mark.parametrize(
    "where",
    [
        pytest.param("chroot", marks=pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for a uid per sandbox")),
        pytest.param("docker", marks=pytest.mark.docker),
    ],
)
async def test_episode_on_every_backend(request: pytest.FixtureRequest, black_box: Any, where: str, claw: Any) -> None:
    if where == "docker":
        request.getfixturevalue("docker_engine")
    said = [bash("mkdir output; echo 6 > output/sum.txt"), "The sum is there.", "It still is."]
    setup = await black_box(said, claw=claw(), engine={"context_window": 65536}, follow_ups=["Look again."])
    made = make_backend(where)
    try:
        await made.probe()
        episode = await episode_of(task(), setup.agent, made)
    except SandboxUnavailable as error:
        pytest.skip(f"{where}: {error}")
    finally:
        await setup.agent.aclose()
        await made.aclose()
    assert (episode.outcome, episode.error) == (Outcome.SOLVED, "")
    assert episode.final_message == "It still is."
    assert len(sequences_of(episode.turns)) == 1
    assert episode.files
