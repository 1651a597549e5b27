"""What a program of Node needs in a box beside its own files: ``loopback.cjs``, where there is no network."""

from __future__ import annotations

from functools import cache
from importlib import resources

from clawgym.agents.blackbox.protocol import ModelLink
from clawgym.records import TaskFile

__all__ = ["OURS", "node_options", "preload"]

OURS = "/opt/clawgym"
"""A read-only folder of ours, in every box."""
_NAME = "loopback.cjs"


@cache
def preload() -> TaskFile:
    """The file, for :data:`OURS`."""
    return TaskFile(_NAME, resources.files("clawgym.agents.blackbox").joinpath(_NAME).read_bytes())


def node_options(link: ModelLink) -> list[str]:
    """Options of Node with which a program reaches ``link``."""
    return [] if link.socket_path is None else ["--require", f"{OURS}/{_NAME}"]
