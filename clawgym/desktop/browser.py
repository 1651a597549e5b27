"""The browser of a desktop, controlled over a pipe: load pages, wait until they settle, read the accessibility tree.

Invariants: the browser's debugger is reachable by the pipe only, so no page or program of the sandbox can use it. Its
messages are bounded; an invalid one ends the browser with :class:`~clawgym.errors.SandboxDied`.

Format: the Chrome DevTools Protocol (``--remote-debugging-pipe``): JSON, each message ended by a zero byte.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
import time
from collections.abc import Mapping
from functools import cache
from typing import Any

from clawgym.desktop.desktop import RunningDesktop, desktop_env
from clawgym.errors import InfraError, SandboxDied, SandboxError
from clawgym.records import TaskFile
from clawgym.sandbox.program import Program

__all__ = ["Browser", "browser_files"]

_MAX_MESSAGE = 16 * 2**20
_ANSWER_SECONDS = 10.0
_MOST_NODES = 5000
_MOST_PAGES = 20
_NO_SESSION = -32001
_QUIET = 0.035
"""Seconds without a change: two frames, so that animations have ended."""
_POLICIES = "/etc/chromium/policies/managed"
_POLICY = {
    "AllowFileSelectionDialogs": False,
    "AutofillAddressEnabled": False,
    "AutofillCreditCardEnabled": False,
    "BrowserSignin": 0,
    "DefaultBrowserSettingEnabled": False,
    "DownloadRestrictions": 3,
    "ExtensionInstallBlocklist": ["*"],
    "NewTabPageLocation": "about:blank",  # the browser's default page is blocked
    "PasswordManagerEnabled": False,
    "PrintingEnabled": False,
    "TaskManagerEndProcessEnabled": False,
    "TranslateEnabled": False,
    "URLBlocklist": ["file://*", "chrome://*", "devtools://*", "view-source:*", "javascript://*", "data:*", "blob:*"],
}
_FLAGS = (
    "--remote-debugging-pipe",
    "--no-sandbox",  # it already runs in a sandbox
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--disable-sync",
    "--disable-breakpad",
    "--disable-component-update",
    "--disable-background-networking",
    "--disable-search-engine-choice-screen",
    "--disable-features=Translate,MediaRouter,OptimizationHints,InterestFeedContentSuggestions",
    "--no-first-run",
    "--no-default-browser-check",
    "--noerrdialogs",
    "--log-level=3",
    "--test-type",
    "--password-store=basic",
    "--force-device-scale-factor=1",
    "--start-maximized",
    "--user-data-dir=/tmp/browser",
)
_SETTLED = """
document.hidden ? 'hidden' :
  new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(document.readyState))))
"""


@cache
def browser_files() -> Mapping[str, tuple[TaskFile, ...]]:
    """Read-only files that the browser's sandbox needs beside :func:`desktop_files`: folder -> files."""
    policy = TaskFile("clawgym.json", json.dumps(_POLICY).encode())
    # Debian's launcher reads every file of the second folder.
    return {_POLICIES: (policy,), "/etc/chromium.d": (TaskFile("clawgym", b""),)}


class Browser:
    """A browser on a desktop; see :meth:`start`. The caller closes it."""

    def __init__(self, desktop: RunningDesktop, program: Program) -> None:
        self._desktop = desktop
        self._program = program
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._number = 0
        self._session = ""
        self._loading: set[str] = set()
        self._over: str | None = None
        self._task: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, desktop: RunningDesktop, url: str, patience: float) -> Browser:
        """Start the browser on ``url``, in a sandbox with :func:`browser_files`, and wait until the page has loaded.

        Raises:
            InfraError: the page has not loaded within ``patience`` seconds.
            SandboxDied: the sandbox or the browser ended.
        """
        argv = ["chromium", *_FLAGS, url]
        shell = f"exec {shlex.join(argv)} 3<&0 4>&1 </dev/null >/dev/null"
        program = await Program.start(desktop.sandbox, ["sh", "-c", shell], env=desktop_env(), limit=_MAX_MESSAGE)
        browser = cls(desktop, program)
        browser._task = asyncio.ensure_future(browser._listen())
        try:
            await browser._stands(url, patience)
        except BaseException:
            await browser.aclose()
            raise
        return browser

    async def show(self, url: str, patience: float) -> None:
        """Go to ``url`` without leaving history, and wait until it has loaded. Raises the errors of :meth:`start`."""
        await self._attach()
        await self._ask("Page.navigate", url=url)
        await self._stands(url, patience)
        await self._ask("Page.resetNavigationHistory")

    async def _stands(self, url: str, patience: float) -> None:
        try:
            async with asyncio.timeout(patience):
                where = "document.URL + ' ' + document.readyState"
                while await self._value(where) != f"{url} complete":  # noqa: ASYNC110  # asked for over the pipe
                    await asyncio.sleep(0.01)
                while not await self._desktop.screen.windows():  # noqa: ASYNC110  # asked for over the network
                    await asyncio.sleep(0.01)
                await self.settle()
        except TimeoutError:
            raise InfraError(
                f"the browser did not show {url} within {patience:g} s{self._program.stderr_note}: give it longer "
                "(limits.setup_seconds), or lower --concurrency"
            ) from None

    async def _attach(self) -> None:
        """Attach to the first page; again when that was closed."""
        while not self._session:
            if pages := await self._pages():
                await self._talk_to(pages[0])
            else:
                await asyncio.sleep(0.01)

    async def _turn_to_front(self) -> bool:
        """Attach to the visible page. Returns whether it changed. Raises :class:`SandboxError` if there is none."""
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                await self._attach()
        except TimeoutError:
            raise SandboxError("the browser shows no page: open one") from None
        if await self._value("document.hidden") is False:
            return True
        for page in await self._pages():
            await self._talk_to(page)
            if await self._value("document.hidden") is False:
                return True
        return False

    async def _pages(self) -> list[Any]:
        found = (await self._ask("Target.getTargets")).get("targetInfos")
        return [target for target in found if _is_page(target)][:_MOST_PAGES] if isinstance(found, list) else []

    async def _talk_to(self, page: Any) -> None:
        self._session = ""  # requests now go to the browser itself
        answer = await self._ask("Target.attachToTarget", targetId=page.get("targetId"), flatten=True)
        self._loading.clear()
        self._session = str(answer.get("sessionId", ""))
        await self._ask("Network.enable")

    # -- queries

    async def settle(self, longest: float = 3.0) -> bool:
        """Wait until the page has loaded and been drawn, and the screen does not change.

        Returns whether that happened within ``longest`` seconds.
        """
        deadline = time.monotonic() + longest
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(longest):
                while True:
                    state = await self._value(_SETTLED)
                    if state == "complete" and not self._loading:
                        break
                    if state == "hidden" and not await self._turn_to_front():
                        break  # no page is visible: only the screen is watched
                    await asyncio.sleep(0.005)
        return await self._desktop.screen.settle(max(0.05, deadline - time.monotonic()), _QUIET)

    async def bounding_box(self, selector: str) -> tuple[int, int, int, int]:
        """The position on the screen of the first element that matches the CSS ``selector``.

        Scrolls it into view. Returns x, y, width and height in pixels. Raises :class:`SandboxError` if there is none.
        """
        await self._turn_to_front()
        text = await self._value(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); if (!e) return ''; "
            "e.scrollIntoView({block: 'nearest', inline: 'nearest'}); const r = e.getBoundingClientRect(); "
            "const left = window.screenX + (window.outerWidth - window.innerWidth) / 2; "
            "const top = window.screenY + window.outerHeight - window.innerHeight; "
            "return JSON.stringify([r.x + left, r.y + top, r.width, r.height].map(Math.round)); })()"
        )
        try:
            x, y, width, height = json.loads(text)
            return int(x), int(y), int(width), int(height)
        except (TypeError, ValueError, OverflowError, RecursionError):
            raise SandboxError(f"the page has no element {selector!r}: look at the page") from None

    async def tree(self) -> list[dict[str, Any]]:
        """The accessibility tree of the page.

        Returns:
            The nodes that a screen reader would announce, in page order, with ``role``, ``name``, ``value`` (each may
            be empty) and ``depth``.
        """
        await self._turn_to_front()
        nodes = (await self._ask("Accessibility.getFullAXTree")).get("nodes")
        if not isinstance(nodes, list):
            raise self._died("it sent a tree that is none")
        if not all(isinstance(node, dict) for node in nodes[:_MOST_NODES]):
            raise self._died("it sent a tree that is none")
        known = {str(node.get("nodeId")): node for node in nodes[:_MOST_NODES]}
        open_ = [(name, 0, "") for name, node in known.items() if str(node.get("parentId")) not in known][::-1]
        found: list[dict[str, Any]] = []
        while open_:
            which, depth, above = open_.pop()
            node = known.pop(which, None)  # each node once, even if it has several parents
            if node is None:
                continue
            role, name, value = (_text(node.get(key)) for key in ("role", "name", "value"))
            # The text of a heading repeats its name.
            announced = role not in ("", "none", "generic", "InlineTextBox") and (role, name) != ("StaticText", above)
            if announced and not node.get("ignored") and (name or value):
                found.append({"role": role, "name": name, "value": value, "depth": depth})
                depth, above = depth + 1, name
            children = node.get("childIds")
            open_ += [(str(child), depth, above) for child in reversed(children if isinstance(children, list) else [])]
        return found

    async def _value(self, expression: str) -> Any:
        """The value of ``expression``; None while one page replaces another."""
        await self._attach()
        answer = await self._ask(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True, timeout=2000
        )
        result = answer.get("result")
        return result.get("value") if isinstance(result, dict) else None

    # -- the pipe

    async def _ask(self, method: str, **params: Any) -> dict[str, Any]:
        if self._over is not None:
            raise self._died(self._over)
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        answer = self._answers[self._number] = asyncio.get_running_loop().create_future()
        number = self._number
        try:
            self._program.writer.write(json.dumps(message).encode() + b"\0")
            async with asyncio.timeout(_ANSWER_SECONDS):
                return await answer
        except TimeoutError:
            return {}  # the page is busy or shows a dialog, and answers later
        finally:
            self._answers.pop(number, None)

    async def _listen(self) -> None:
        reader = self._program.reader
        try:
            while True:
                message = json.loads((await reader.readuntil(b"\0"))[:-1])
                if not isinstance(message, dict):
                    raise ValueError("it sent a message that is none")
                if "id" in message:
                    self._answered(message)
                else:
                    self._event(message.get("method"), message.get("params"))
        except (OSError, EOFError, ValueError, RecursionError, asyncio.LimitOverrunError) as error:
            self._end(str(error) or type(error).__name__)

    def _answered(self, message: Mapping[str, Any]) -> None:
        error = message.get("error")
        if isinstance(error, dict) and error.get("code") == _NO_SESSION:
            self._session = ""
        waiting = self._answers.get(message["id"]) if isinstance(message["id"], int) else None
        if waiting is not None and not waiting.done():
            result = message.get("result")
            waiting.set_result(result if isinstance(result, dict) else {})

    def _event(self, method: Any, params: Any) -> None:
        which = params.get("requestId") if isinstance(params, dict) else None
        if not isinstance(which, str):
            return
        if method == "Network.requestWillBeSent" and len(self._loading) < 1000:
            self._loading.add(which)
        elif method in ("Network.loadingFinished", "Network.loadingFailed"):
            self._loading.discard(which)

    def _end(self, why: str) -> None:
        if self._over is None:
            self._over = why
        for waiting in self._answers.values():
            if not waiting.done():
                waiting.set_exception(self._died(self._over))
                waiting.exception()

    def _died(self, why: object) -> SandboxDied:
        stderr = self._program.stderr_note
        return SandboxDied(f"the browser is gone ({why}){stderr}: begin the episode again", cause="protocol")

    async def aclose(self) -> None:
        """Close the connection; the browser ends with its sandbox. Idempotent."""
        self._end("it was closed")
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        await self._program.aclose()


def _is_page(target: Any) -> bool:
    """Whether the target is a tab, not a part of the browser's window."""
    return (
        isinstance(target, dict)
        and target.get("type") == "page"
        and not str(target.get("url")).startswith(("chrome://", "devtools://"))
    )


def _text(value: Any) -> str:
    inner = value.get("value") if isinstance(value, dict) else None
    return inner[:500] if isinstance(inner, str) else "" if inner is None else str(inner)[:500]
