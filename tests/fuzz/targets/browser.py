"""What comes over the browser's pipe."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from unittest.mock import patch

from clawgym.desktop import browser as module
from clawgym.desktop.browser import Browser
from clawgym.errors import SandboxDied, SandboxError

from ..source import Source, run

READS = ("desktop.browser",)

_ANSWERS = {
    "Target.getTargets": {"targetInfos": [{"type": "page", "url": "http://x/", "targetId": "1"}]},
    "Target.attachToTarget": {"sessionId": "s"},
    "Runtime.evaluate": {"result": {"value": "[1, 2, 3.5, 4]"}},
    "Accessibility.getFullAXTree": {"nodes": [
        {"nodeId": "1", "role": {"value": "button"}, "name": {"value": "Send"}, "childIds": ["2"]},
        {"nodeId": "2", "parentId": "1", "role": {"value": "link"}, "value": {"value": 3}, "childIds": ["1"]}]},
}  # fmt: skip


class _Program:
    """Answers at once, as the input says."""

    stderr_note = ""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.reader = asyncio.StreamReader(limit=1 << 19)
        self.writer = self
        self._messages = 0

    def write(self, message: bytes) -> None:
        source = self._source
        asked = json.loads(message[:-1])
        self._messages += 1
        if self._messages > 40 or source.byte() > 250:
            self.reader.feed_eof()
            return
        answer = source.json({"id": asked["id"], "result": _ANSWERS.get(asked["method"], {})})
        event = {"method": "Network.requestWillBeSent", "params": {"requestId": "r"}}
        if source.byte() > 200:
            answer = source.json(event) + b"\0" + answer
        self.reader.feed_data(answer + b"\0")

    async def aclose(self, patience: float = 0.0) -> None: ...


def fuzz(data: bytes) -> None:
    with patch.object(module, "_ANSWER_SECONDS", 0.01):
        run(_fuzz(Source(data)))


async def _fuzz(source: Source) -> None:
    browser = Browser(None, _Program(source))  # type: ignore[arg-type]
    browser._task = asyncio.ensure_future(browser._listen())
    try:
        async with asyncio.timeout(5):
            found: list[Any] = await browser.tree()
            assert all(len(node["name"]) <= 500 for node in found)
            await browser.bounding_box("#a")
    except (SandboxDied, SandboxError):
        pass
    finally:
        await browser.aclose()
