"""Leaderboards: rank run folders by score; entries whose difference is not significant can share a rank.

A board is a folder with rules, entries and the records of their checks; a static site is made from it.
"""

from __future__ import annotations

from clawgym.leaderboards.entries import BoardEntry, load_entry
from clawgym.leaderboards.ranking import Board, Ranked, rank
from clawgym.leaderboards.rendering import to_json, to_markdown, to_view

__all__ = ["Board", "BoardEntry", "Ranked", "load_entry", "rank", "to_json", "to_markdown", "to_view"]
