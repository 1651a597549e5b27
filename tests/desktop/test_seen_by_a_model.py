"""A model gets the screenshots of the transcript, byte for byte, also through the gateway."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from clawgym.agents import make_agent
from clawgym.agents.protocol import Agent
from clawgym.gateway.server import Gateway
from clawgym.pool import Pool
from clawgym.records import Desktop, Episode, Limits, Outcome, Task, prompt_ids
from clawgym.rollout import EpisodeRequest
from clawgym.rollout.collect import collect_episode, over_http
from clawgym.sandbox import Backend

from ..engines.fake_openai import FakeOpenAI, call, fake_openai, reply
from ..gateway import models
from ..gateway.scripted import ScriptedEngine
from ..rollouts import episode_of
from ..verifiers.tasks_for_tests import task

__all__ = ["fake_openai"]

pytestmark = pytest.mark.usefixtures("programs")

LIMITS = Limits(max_steps=6, memory_mb=1024, pids=256, setup_seconds=90)
ACTIONS = (
    {"action": "screenshot"},
    {"action": "mouse_move", "coordinate": [100, 100]},
    {"action": "fly"},
    {"action": "done", "text": "seen"},
)


def look() -> Task:
    return task(id="look", inputs=(), limits=LIMITS, desktop=Desktop(width=320, height=240), instruction="Look.")


def pictures(episode: Episode) -> list[str]:
    images = [seen.image for step in episode.steps for seen in step.observations]
    return [image.sha256 for image in images if image is not None]


def sent(request: dict[str, Any]) -> list[str]:
    """Digests of the pictures in the messages of a request, in order."""
    urls = [
        part["image_url"]["url"]
        for message in request["messages"]
        for part in (message["content"] if isinstance(message["content"], list) else ())
    ]
    assert all(url.startswith("data:image/png;base64,") for url in urls)
    return [hashlib.sha256(base64.b64decode(url.partition(",")[2])).hexdigest() for url in urls]


async def test_an_endpoint_gets_every_picture(fake_openai: FakeOpenAI, backend: Backend) -> None:
    for action in ACTIONS:
        fake_openai.script.append(reply(None, tool_calls=[call("computer_use", action)], finish_reason="tool_calls"))
    agent = make_agent("tool-loop", model="m", base_url=fake_openai.base_url, api_key="k")
    episode = await episode_of(look(), agent, backend)
    await agent.aclose()
    assert (episode.outcome, episode.final_message) == (Outcome.FAILED, "seen")
    first, second = pictures(episode)
    assert first != second, "the pointer moved"
    assert [sent(request) for request in fake_openai.requests] == [[], [first], [first, second], [first, second]]
    roles = [message["role"] for message in fake_openai.requests[-1]["messages"]]
    assert roles == ["system", "user", *["assistant", "tool", "user"] * 2, "assistant", "tool"]
    assert "use one of" in fake_openai.requests[-1]["messages"][-1]["content"]


async def test_recorded_turns_have_the_images_that_the_model_saw(backend: Backend, tmp_path: Path) -> None:
    parts = "{% for part in message.content %}{{ part.text or '<picture>' }}{% endfor %}"
    shown = f"{{% if message.content is string %}}{{{{ message.content }}}}{{% else %}}{parts}{{% endif %}}"
    template = models.CHATML.replace("'\\n' + message.content", f"'\\n' }}}}{shown}{{{{ ''")
    assert "<picture>" in template
    folder = models.write_model(tmp_path / "model", template)

    def say(prompt: str, number: int) -> str:
        arguments = json.dumps({"name": "computer_use", "arguments": ACTIONS[number]})
        return f"<tool_call>\n{arguments}\n</tool_call>"

    engine = ScriptedEngine(folder, say, context_window=65536)

    def agent(base_url: str, key: str) -> Agent:
        return make_agent("tool-loop", model="policy", base_url=base_url, api_key=key)

    with contextlib.closing(Pool(tmp_path / "pool.db")) as pool:
        async with Gateway(engine, pool) as gateway:
            await gateway.listen()
            ended = await collect_episode(EpisodeRequest(task=look(), seed=0), over_http(agent), backend, gateway)
            episode = ended.episode
        first, second = pictures(episode)
        assert [turn.images for turn in episode.turns] == [(), (first,), (second,), ()]
        assert [turn.flaw for turn in episode.turns] == [None] * 4
        assert [turn.parent for turn in episode.turns] == [None, 0, 1, 2]
        assert [seen.images for seen in engine.seen] == [(), (first,), (first, second), (first, second)]
        for number, seen in enumerate(engine.seen):
            assert prompt_ids(episode.turns, number) == seen.prompt
        for step in episode.steps:
            for each in step.observations:
                if each.image is not None:
                    assert pool.image(each.image.sha256).data == each.image.data
