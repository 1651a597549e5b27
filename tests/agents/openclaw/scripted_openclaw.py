"""A real OpenClaw over a scripted token engine, with one script per task."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from clawgym.agents.blackbox import BlackBoxAgent
from clawgym.agents.openclaw.claw import OpenClaw
from clawgym.gateway.server import Gateway
from clawgym.pool import Pool

from ...gateway.scripted import ScriptedEngine

START = "<|im_start|>assistant"


def call(name: str, **arguments: Any) -> str:
    """A tool call as the model samples it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


class Scripts:
    """``say`` for a :class:`ScriptedEngine`: the next line of the script whose instruction is in the prompt."""

    def __init__(self, scripts: Mapping[str, Sequence[str | Exception]]) -> None:
        self.scripts = dict(scripts)

    def __call__(self, prompt: str, number: int) -> str | Exception:
        script = next(lines for words, lines in self.scripts.items() if words.strip() in prompt)
        return script[min(prompt.count(START) - 1, len(script) - 1)]


@contextlib.asynccontextmanager
async def scripted_openclaw(
    model_folder: Path, pool_file: Path, scripts: Mapping[str, Sequence[str | Exception]], **options: Any
) -> AsyncIterator[tuple[BlackBoxAgent, ScriptedEngine, Pool]]:
    """An agent whose model replies from ``scripts``, its engine, and the pool with the exact turns."""
    claw = OpenClaw(**{key: options.pop(key) for key in ("prompt", "image") if key in options})
    engine = ScriptedEngine(model_folder, Scripts(scripts), at_once=256, context_window=200_000)
    with contextlib.closing(Pool(pool_file)) as pool:
        async with Gateway(engine, pool) as gateway:
            agent = BlackBoxAgent(claw, gateway=gateway, **options)
            try:
                yield agent, engine, pool
            finally:
                await agent.aclose()
