"""``render_mode="human"``: show the frames of one environment on a local web page."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from clawgym.records.atif import json_safe

if TYPE_CHECKING:
    from clawgym.live.page import Page

__all__ = ["HumanRenderer"]


class HumanRenderer:
    """Serves the frames of one environment (:class:`~clawgym.live.page.PageSource`).

    The URL is printed once, with the first frame.
    """

    def __init__(self) -> None:
        self._page: Page | None = None
        self._shown: tuple[dict[str, Any], np.ndarray] | None = None

    def show(self, task: str, step: int, action: Any, screen: np.ndarray) -> None:
        """Show ``screen``, uint8 of shape (height, width, 3), on the page.

        Raises :class:`~clawgym.errors.MissingDependency` without Pillow.
        """
        from clawgym.console import Console
        from clawgym.live.page import Page
        from clawgym.tools.computer import encoded

        number = self._shown[0]["picture"] + 1 if self._shown else 1
        said = "" if action is None else json.dumps(json_safe(action))[:200]
        about = {"id": "0", "task": task, "agent": "env", "step": step, "action": said, "text": "", "picture": number}
        self._shown = about, screen
        if self._page is None:
            encoded(screen)
            self._page = Page(self)
            Console(stderr=True).say(f"shown at {self._page.url}")

    def all(self) -> list[dict[str, Any]]:
        """See :class:`~clawgym.live.page.PageSource`."""
        return [self._shown[0]] if self._shown else []

    def picture(self, id: str) -> bytes | None:
        """See :class:`~clawgym.live.page.PageSource`."""
        from clawgym.tools.computer import encoded

        return encoded(self._shown[1]) if self._shown else None

    def close(self) -> None:
        """Stop serving the page. Idempotent."""
        if self._page is not None:
            self._page.close()
            self._page = None
