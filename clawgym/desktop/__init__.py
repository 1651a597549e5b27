"""Desktops in sandboxes: screenshots, mouse and keyboard, all controlled from outside of the sandbox."""

from __future__ import annotations

from clawgym.desktop.actions import COMPUTER_USE, KINDS, Action, Unit, parse, schema
from clawgym.desktop.desktop import FILES_DIR, PROGRAMS, RunningDesktop, desktop_files, settings_files

__all__ = [
    "COMPUTER_USE",
    "FILES_DIR",
    "KINDS",
    "PROGRAMS",
    "Action",
    "RunningDesktop",
    "Unit",
    "desktop_files",
    "parse",
    "schema",
    "settings_files",
]
