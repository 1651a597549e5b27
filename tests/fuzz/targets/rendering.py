"""Requests in every dialect, rendered to ids by a chat template, and ids of an engine read as a reply."""

from __future__ import annotations

import importlib.util
from collections.abc import AsyncIterator
from functools import cache
from pathlib import Path
from typing import Any

from clawgym.engines.protocol import GenerateRequest, Tokens
from clawgym.gateway.core import Core
from clawgym.gateway.gate import Gate
from clawgym.gateway.render import Renderer

from ..source import Source, run, scratch_folder
from .dialects import Writer, converse

READS = ("gateway.render", "gateway.template")

_WORDS = (
    *("hi", "<think>", "</think>", "<tool_call>", '{"name": "f", "arguments": {"x": 1}}', "</tool_call>", "<|im_end|>"),
    *("\ud83d".encode("utf-8", "replace").decode(), "é", '{"x":' * 450, "1", "}" * 450, "<|im_start|>", "\n"),
)


def _models() -> Any:
    """The small models that the gateway's tests are made with."""
    path = Path(__file__).parents[2] / "gateway" / "models.py"
    spec = importlib.util.spec_from_file_location("small_models", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def _renderers() -> tuple[Renderer, ...]:
    models = _models()
    made = []
    for name in ("CHATML", "CODER", "THINKING"):
        folder = scratch_folder() / name
        made.append(Renderer(str(models.write_model(folder, getattr(models, name)))))
    return tuple(made)


class _Engine:
    """Samples what the input says."""

    name = "fuzz"
    context_window = 1 << 20
    constrains = True

    def __init__(self, source: Source, renderer: Renderer) -> None:
        self._source, self._renderer = source, renderer
        self.tokenizer = ""

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Tokens]:
        source = self._source
        assert all(type(token) is int and 0 <= token < 2**31 for token in request.prompt_ids)
        for _step in range(source.number(0, 6)):
            ids = self._renderer.encode(source.pick(_WORDS)) if source.byte() < 230 else (source.number(0, 2**20),)
            yield Tokens(ids, (-1.0,) * len(ids), 1)
        yield Tokens((min(self._renderer.stop_ids),), (-0.5,), 1, source.pick(("stop", "length")), 3)

    def identity(self) -> dict[str, Any]:
        return {}

    async def aclose(self) -> None: ...


def fuzz(data: bytes) -> None:
    source, writer = Source(data), Writer()
    renderer = source.pick(_renderers())
    engine: Any = _Engine(source, renderer)
    core = Core(engine, writer, Gate(streams=1, waiting=1), renderer=renderer)  # type: ignore[arg-type]
    run(converse(source, core, writer))
