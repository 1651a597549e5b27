"""Attacks on the sandboxes: probes that try to get out of a box, or to hurt the host from in there.

Harmless by construction, since a broken backend lets them through: they look, or write back what they read; bombs
stop a little above their limit; nothing renames, kills or reconfigures the host. :func:`escape_suite` runs them
against one backend; a row of the table is a kind of attack (``rows.py``), a probe one way to carry it out.
"""

from clawgym.redteam.escape.baits import Baits, lay_baits
from clawgym.redteam.escape.records import BLOCKED, OPEN, SKIPPED, Column, Finding, Probe
from clawgym.redteam.escape.rows import ROWS
from clawgym.redteam.escape.suite import attack_all, escape_suite, probes

__all__ = [
    "BLOCKED",
    "OPEN",
    "ROWS",
    "SKIPPED",
    "Baits",
    "Column",
    "Finding",
    "Probe",
    "attack_all",
    "escape_suite",
    "lay_baits",
    "probes",
]
