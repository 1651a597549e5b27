"""A judge behind an OpenAI-compatible endpoint."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import AsyncIterator, Callable

from aiohttp import web

__all__ = ["judge_endpoint"]


@contextlib.asynccontextmanager
async def judge_endpoint() -> AsyncIterator[Callable[[bool], str]]:
    """A judge that finds every step good, with or without a hint; yields its address."""

    async def answer(request: web.Request) -> web.Response:
        marker = re.search(r"<hint (\w+)>", json.dumps((await request.json())["messages"]))
        hinted = marker is not None and request.match_info["hints"] == "True"
        said = f"<hint {marker[1]}>\nWrite the word with echo.\n</hint {marker[1]}>\n" if marker and hinted else ""
        message = {"role": "assistant", "content": f"{said}Verdict: +1"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return web.json_response(
            {"id": "1", "object": "chat.completion", "created": 0, "model": "j", "choices": [choice]}
        )

    app = web.Application()
    app.router.add_post("/{hints}/v1/chat/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port = runner.addresses[0][1]
        yield lambda hints: f"http://127.0.0.1:{port}/{hints}/v1"
    finally:
        await runner.cleanup()
