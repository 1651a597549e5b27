"""Attacks on the sandboxes: probes that try to escape from a sandbox, or to harm the host from inside.

Probes are harmless even where they succeed: they look, or write back what they read; bombs stop a little above their
limit; none renames, kills or reconfigures anything of the host. :func:`escape_suite` runs them against one backend. A
row of the table is a kind of attack (``rows.py``); each probe is one way to carry it out.
"""

from clawgym.redteam.escape.baits import Baits, lay_baits
from clawgym.redteam.escape.records import BLOCKED, OPEN, SKIPPED, Column, Probe, ProbeFinding
from clawgym.redteam.escape.rows import ROWS
from clawgym.redteam.escape.suite import attack_all, escape_suite, probes

__all__ = [
    "BLOCKED",
    "OPEN",
    "ROWS",
    "SKIPPED",
    "Baits",
    "Column",
    "ProbeFinding",
    "Probe",
    "attack_all",
    "escape_suite",
    "lay_baits",
    "probes",
]
