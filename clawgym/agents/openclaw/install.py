"""The installed OpenClaw, by version (:mod:`clawgym.agents.programs.install`)."""

from __future__ import annotations

from clawgym.agents.programs import install as programs
from clawgym.agents.programs.install import Installation, Progress
from clawgym.agents.programs.releases import OPENCLAW_VERSION as DEFAULT_VERSION
from clawgym.agents.programs.releases import release_of

__all__ = ["DEFAULT_VERSION", "install", "installed"]


def installed(version: str = DEFAULT_VERSION) -> Installation:
    """Return the installation of this version: see :func:`clawgym.agents.programs.install.installed`."""
    return programs.installed(release_of("openclaw", version))


def install(version: str = DEFAULT_VERSION, *, progress: Progress | None = None) -> Installation:
    """Install this version: see :func:`clawgym.agents.programs.install.install`."""
    return programs.install(release_of("openclaw", version), progress=progress)
