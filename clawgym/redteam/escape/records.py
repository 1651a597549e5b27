"""What the suite says: one finding a probe, three verdicts."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from clawgym.redteam.escape.inside.kit import BLOCKED, OPEN, SKIPPED

if TYPE_CHECKING:
    from clawgym.redteam.escape.field import Field

__all__ = ["BLOCKED", "HOST_PROBES", "OPEN", "SKIPPED", "Answer", "Column", "Finding", "Probe", "host_probe"]

Answer = tuple[str, str]
"""Verdict and one line of evidence."""
HostProbe = Callable[["Field"], Awaitable[Answer]]


@dataclass(frozen=True, slots=True)
class Probe:
    """One attack."""

    id: str
    """The number of its row (``rows.py``) and a letter."""
    tries: str
    """What it tries, in words."""
    bare: bool
    """Harmless also where there is no sandbox at all."""
    module: str = ""
    """Of :mod:`inside`, for a probe that runs in the box."""
    host: HostProbe | None = None
    """For a probe that needs the host's part."""

    @property
    def row(self) -> int:
        return int(self.id[:-1])

    @property
    def order(self) -> tuple[int, str]:
        return self.row, self.id[-1]


@dataclass(frozen=True, slots=True)
class Finding:
    """What one probe found in one backend."""

    probe: str
    tries: str
    verdict: str
    """``blocked``, ``open`` (abuse is possible) or ``skipped``."""
    evidence: str
    declared: str = ""
    """Why the backend does not claim to stop this here; empty if it does."""

    @property
    def unexpected(self) -> bool:
        return self.verdict == OPEN and not self.declared

    def as_dict(self) -> dict[str, Any]:
        """A JSON-ready dict."""
        return {name: getattr(self, name) for name in self.__slots__} | {"unexpected": self.unexpected}


@dataclass(frozen=True, slots=True)
class Column:
    """One backend, or one baseline, of the table."""

    name: str
    tier: str
    baseline: bool = False
    """A weak place to compare with: open is what it is there to show."""
    unavailable: str = ""
    """Why there are no findings."""
    findings: tuple[Finding, ...] = ()

    @property
    def unexpected(self) -> list[Finding]:
        return [] if self.baseline else [finding for finding in self.findings if finding.unexpected]

    def as_dict(self) -> dict[str, Any]:
        """A JSON-ready dict."""
        return {
            "name": self.name,
            "tier": self.tier,
            "baseline": self.baseline,
            "unavailable": self.unavailable,
            "findings": [finding.as_dict() for finding in self.findings],
        }


HOST_PROBES: dict[str, Probe] = {}


def host_probe(name: str, tries: str, *, bare: bool = False) -> Callable[[HostProbe], HostProbe]:
    """Register a probe that needs the host's part: ``async (field) -> (verdict, evidence)``."""
    assert re.fullmatch(r"\d+[a-z]", name)

    def register(function: HostProbe) -> HostProbe:
        HOST_PROBES[name] = Probe(name, tries, bare, host=function)
        return function

    return register
