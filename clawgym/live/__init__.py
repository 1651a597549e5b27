"""Watching: what runs in the processes of this user, shown on a page without stopping it."""

from __future__ import annotations

from clawgym.live.registry import ThisProcess, Watched, add, drop

__all__ = ["ThisProcess", "Watched", "add", "drop"]
