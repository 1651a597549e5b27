"""The versions of OpenClaw that can be installed (:mod:`clawgym.agents.programs.install`)."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path

from clawgym.agents.programs import install as programs
from clawgym.agents.programs.install import Installation, Progress
from clawgym.agents.programs.releases import LOCKS, Release
from clawgym.errors import AgentError

__all__ = ["DEFAULT_VERSION", "TESTED", "install", "installed", "release_of_openclaw", "tested_release"]

_log = logging.getLogger("clawgym.agents")
DEFAULT_VERSION = "2026.4.1"
ENTRY = "node_modules/openclaw/openclaw.mjs"
_NODE_OF_UNTESTED = "24.21.0"  # in the range of every release so far
_OVERRIDES = {"linkedom": "0.18.12"}  # later versions need a package that the registry does not have


def _release(version: str, node: str, lock: Path | None) -> Release:
    wanted: Mapping[str, str] = {} if lock else {"openclaw": version}
    default = version == DEFAULT_VERSION
    return Release("openclaw", version, "OpenClaw", ENTRY, lock, node, None, wanted, _OVERRIDES, default=default)


def tested_release(version: str, node: str, lock: Path | None) -> Release:
    """Return the release of a tested version, whose packages are in a lock."""
    return _release(version, node, lock or LOCKS / f"openclaw-{version}.json.gz")


TESTED: dict[str, Release] = {
    "2026.4.1": tested_release("2026.4.1", "22.23.3", None),
    "2026.9.6": tested_release("2026.9.6", "24.21.0", None),
}


def release_of_openclaw(version: str | None = None) -> Release:
    """Return the release of a version, by default the tested one. Raises AgentError unless it is exact."""
    version = DEFAULT_VERSION if version is None else version
    if not re.fullmatch(r"\d+\.\d+\.\d+(-[0-9A-Za-z.-]+)?", version):
        raise AgentError(f"OpenClaw version {version!r}: give an exact one, such as {DEFAULT_VERSION}")
    return TESTED.get(version) or _release(version, _NODE_OF_UNTESTED, None)


def installed(version: str = DEFAULT_VERSION) -> Installation:
    """Return the installation of this version: see :func:`clawgym.agents.programs.install.installed`."""
    return programs.installed(release_of_openclaw(version))


def install(version: str = DEFAULT_VERSION, *, progress: Progress | None = None) -> Installation:
    """Install this version: see :func:`clawgym.agents.programs.install.install`."""
    return programs.install(release_of_openclaw(version), progress=progress)
