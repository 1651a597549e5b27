"""Support file for Node programs in sandboxes without a network: ``loopback.cjs`` replaces TCP on the loopback."""

from __future__ import annotations

from functools import cache
from importlib import resources

from clawgym.agents.blackbox.protocol import ModelLink
from clawgym.records import TaskFile

__all__ = ["SUPPORT_FOLDER", "node_options", "preload"]

SUPPORT_FOLDER = "/opt/clawgym"
"""Read-only folder of ClawGym's own files in the sandbox."""
_NAME = "loopback.cjs"


@cache
def preload() -> TaskFile:
    """Return ``loopback.cjs``, to be placed in :data:`SUPPORT_FOLDER`."""
    return TaskFile(_NAME, resources.files("clawgym.agents.blackbox").joinpath(_NAME).read_bytes())


def node_options(link: ModelLink) -> list[str]:
    """Return the options of Node that a program needs to reach ``link``."""
    return [] if link.socket_path is None else ["--require", f"{SUPPORT_FOLDER}/{_NAME}"]
