"""Attacks that a backend does not claim to stop, with the reason. Only these probes may be open.

``namespace`` and ``docker`` claim to stop everything, except what the host does not support (for example without a
cgroup controller). The backend's features, measured in a sandbox, say what that is.
"""

from __future__ import annotations

from clawgym.sandbox import Isolation

__all__ = ["declared_open"]

_BY_FEATURE: dict[str, dict[str, str]] = {
    "memory_limit": {
        "29b": "memory is limited for each process here, not for the sandbox",
        "29c": "files in memory are not limited here",
        "29d": "shared mappings are files in memory",
    },
    "own_outer_uid": {"23e": "sandboxes share a uid on the host here"},
    "cpu_limit": {"31a": "processor time is not limited here"},
    "disk_limit": {"32a": "disk is not limited here", "32c": "the number of files is not limited here"},
}
_BY_BACKEND: dict[str, dict[str, str]] = {}


def declared_open(isolation: Isolation) -> dict[str, str]:
    """Probe id -> the reason why it may be open in this backend on this host."""
    found = dict(_BY_BACKEND.get(isolation.backend, {}))
    for feature, probes in _BY_FEATURE.items():
        if not isolation.features.get(feature, True):
            found.update(probes)
    return found
