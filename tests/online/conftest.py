"""A tiny model, the folder of a service, and a client."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from clawgym.engines.tiny import make_tiny_model
from clawgym.online.config import ServiceFolder, load_service_config
from clawgym.pool import Pool

if TYPE_CHECKING:
    import openai

SETTINGS = [
    "redact=false", "held_out=0", "gate.on=false", "training.rollout.groups=2", "training.reward.judge=complaints",
    "training.optimizer.lr=0.01",
]  # fmt: skip


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model", spread=0.05)


@pytest.fixture
def folder(model: Path, tmp_path: Path) -> ServiceFolder:
    made = ServiceFolder(tmp_path / "service")
    made.create(load_service_config(None, str(model), SETTINGS))
    return made


class Client:
    """An unmodified client of OpenAI, which keeps its history."""

    def __init__(self, client: openai.AsyncOpenAI) -> None:
        self._client = client
        self.messages: list[dict[str, Any]] = []
        self.replies: list[Any] = []

    async def say(self, text: str) -> Any:
        self.messages.append({"role": "user", "content": text})
        messages: Any = self.messages
        got = await self._client.chat.completions.create(model="any", messages=messages, max_tokens=6, temperature=1.0)
        self.messages.append({"role": "assistant", "content": got.choices[0].message.content or ""})
        self.replies.append(got)
        return got

    async def tell(self, path: str, **body: Any) -> Any:
        return await self._client.post(f"/{path}", body={"id": self.replies[-1].id, **body}, cast_to=object)


async def judged(folder: ServiceFolder) -> None:
    """Judge the conversations that have ended."""
    from clawgym.online.judging import ConversationJudge

    with Pool(folder.pool) as pool:
        judge = ConversationJudge(folder, folder.config, pool)
        for episode in [e for e in pool.episodes(state="open") if not e.secret_sha256]:
            assert await judge(episode)
