"""Probes, and the findings of the suite: one per probe, with one of three verdicts."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from clawgym.redteam.escape.context import Answer, ProbeContext
from clawgym.redteam.escape.inside.kit import BLOCKED, OPEN, SKIPPED

__all__ = ["BLOCKED", "HOST_PROBES", "OPEN", "SKIPPED", "Answer", "Column", "ProbeFinding", "Probe", "host_probe"]

HostProbe = Callable[[ProbeContext], Awaitable[Answer]]


@dataclass(frozen=True, slots=True)
class Probe:
    """One attack."""

    id: str
    """The number of its row (``rows.py``) and a letter."""
    tries: str
    """What it tries, in a few words."""
    bare: bool
    """Whether it is harmless even without a sandbox."""
    module: str = ""
    """For a probe that runs in the sandbox: its module in ``inside/``."""
    host: HostProbe | None = None
    """For a probe that also needs code on the host: that code."""

    @property
    def row(self) -> int:
        return int(self.id[:-1])

    @property
    def order(self) -> tuple[int, str]:
        return self.row, self.id[-1]


@dataclass(frozen=True, slots=True)
class ProbeFinding:
    """The result of one probe against one backend."""

    probe: str
    tries: str
    verdict: str
    """``blocked``, ``open`` (abuse is possible) or ``skipped``."""
    evidence: str
    declared: str = ""
    """Why the backend does not claim to stop this here; empty if it claims to."""

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
    """A deliberately weak environment for comparison, in which probes are expected to be open."""
    unavailable: str = ""
    """Why the backend could not be attacked; then there are no findings."""
    findings: tuple[ProbeFinding, ...] = ()

    @property
    def unexpected(self) -> list[ProbeFinding]:
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
    """Register a probe that needs the host's part: ``async (context) -> (verdict, evidence)``."""
    assert re.fullmatch(r"\d+[a-z]", name)

    def register(function: HostProbe) -> HostProbe:
        HOST_PROBES[name] = Probe(name, tries, bare, host=function)
        return function

    return register
