"""A local Hub for the tests of pushing and pulling."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from clawgym.agents import make_agent
from clawgym.errors import SandboxUnavailable
from clawgym.evaluation.runner import EvalConfig, evaluate
from clawgym.sandbox import backend as make_backend
from clawgym.tasks import load

from .server import TOKEN, Hub


@pytest.fixture(scope="session")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of ``sloppy`` on six tasks of ``terminal-basic``."""

    async def run(out: Path) -> None:
        backend = make_backend("namespace")
        try:
            await backend.probe()
            config = EvalConfig(load("terminal-basic", limit=6), make_agent("sloppy"), backend, out)
            await evaluate(config)
        except SandboxUnavailable as error:
            pytest.skip(f"namespace: {error}")
        finally:
            await backend.aclose()

    out = tmp_path_factory.mktemp("runs") / "sloppy-run"
    asyncio.run(run(out))
    return out


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A Hub, which the client of this process and of those it starts takes for the Hub."""
    pytest.importorskip("huggingface_hub")
    with Hub() as made:
        home = {"HF_ENDPOINT": made.url, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(tmp_path / "hf")}
        for name, value in home.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", made.url)  # read once, when it was imported
        monkeypatch.setattr(
            "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE",
            made.url + "/{repo_id}/resolve/{revision}/{filename}",
        )
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        yield made
