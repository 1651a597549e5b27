"""The live view: a web page that shows the running environments and evaluations of this user."""

from __future__ import annotations

from clawgym.live.registry import ThisProcess, Watched, add, drop

__all__ = ["ThisProcess", "Watched", "add", "drop"]
