"""The driver: every probe against one backend, in one order, through the public sandbox protocol only."""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Callable, Iterable

from clawgym.errors import ClawGymError, SandboxDied, SandboxUnavailable
from clawgym.redteam.escape.baits import Baits, lay_baits
from clawgym.redteam.escape.declared import declared_open
from clawgym.redteam.escape.field import Field, module_of
from clawgym.redteam.escape.inside.kit import PROBES as INSIDE
from clawgym.redteam.escape.records import BLOCKED, HOST_PROBES, OPEN, SKIPPED, Column, Finding, Probe
from clawgym.sandbox import Backend
from clawgym.sandbox import backend as make_backend

__all__ = ["Watch", "attack_all", "escape_suite", "probes"]

Watch = Callable[[str, Finding, int, int], None]
"""Told of each finding: the column's name, the finding, how many there are so far and how many there will be."""
_SECONDS = 90.0
"""The longest any probe may take; several are bounded by 30 s waits of their own."""


def probes() -> list[Probe]:
    """Every probe, in order."""
    for name in ("files", "network", "processes", "kernel", "limits", "agent"):
        importlib.import_module(f"clawgym.redteam.escape.inside.{name}")
    for name in ("host_files", "host_archives", "host_boxes", "host_ends", "host_grading"):
        importlib.import_module(f"clawgym.redteam.escape.{name}")
    found = {name: Probe(name, tries, bare, module_of(name)) for name, (_, tries, bare) in INSIDE.items()}
    return sorted((found | HOST_PROBES).values(), key=lambda probe: probe.order)


async def escape_suite(
    backend: Backend,
    baits: Baits,
    *,
    only: Iterable[str] | None = None,
    baseline: bool = False,
    bare: bool = False,
    watch: Watch | None = None,
) -> Column:
    """Attack ``backend`` with every probe (or the ids in ``only``) and say what is open.

    ``baits`` must be laid before the backend starts anything, or what it inherits is not seen. ``bare`` leaves out
    what is not harmless without a sandbox. A backend that cannot work here is a column that says why. Findings come
    in the order of :func:`probes`. A box that dies is replaced. Linux only.
    """
    try:
        isolation = await backend.probe()
    except SandboxUnavailable as error:
        return Column(backend.name, "", baseline, unavailable=str(error))
    declared = {} if baseline else declared_open(isolation)
    wanted = None if only is None else set(only)
    chosen = [probe for probe in probes() if wanted is None or probe.id in wanted]
    field = Field(backend, baits)
    findings: list[Finding] = []
    try:
        for probe in chosen:
            if bare and not probe.bare:
                verdict, evidence = SKIPPED, "not run without a sandbox"
            else:
                verdict, evidence = await _answer(field, probe)
            if verdict == BLOCKED and probe.id in declared:
                # No credit for what is not claimed: a busy machine, say, looks like a limit.
                verdict, evidence = SKIPPED, f"{declared[probe.id]}, though it did not show: {evidence}"
            finding = Finding(probe.id, probe.tries, verdict, evidence, declared.get(probe.id, ""))
            findings.append(finding)
            if watch is not None:
                watch(backend.name, finding, len(findings), len(chosen))
    finally:
        await field.drop_box()
    return Column(backend.name, isolation.tier, baseline, findings=tuple(findings))


async def _answer(field: Field, probe: Probe) -> tuple[str, str]:
    try:
        running = probe.host(field) if probe.host is not None else field.inside(probe.id)
        async with asyncio.timeout(_SECONDS):
            return await running
    except SandboxDied as error:
        await field.drop_box()
        return BLOCKED, f"the box died ({error.cause})"
    except TimeoutError:
        await field.drop_box()
        return OPEN, f"the host was kept waiting for {_SECONDS:.0f} s"
    except ClawGymError as error:
        await field.drop_box()
        return SKIPPED, f"the probe could not run: {error}"


async def attack_all(names: Iterable[str], *, watch: Watch | None = None) -> list[Column]:
    """Every backend in ``names``, and beside them the weak places of :mod:`baseline`, one after the other.

    Raises :class:`SandboxUnavailable` on another system than Linux.
    """
    if sys.platform != "linux":
        raise SandboxUnavailable(f"the probes are Linux system calls, this is {sys.platform}: run them on Linux")
    from clawgym.redteam.escape import baseline

    names = list(names)
    weak = [baseline.no_sandbox, baseline.bare_bubblewrap, *([baseline.docker_run] if "docker" in names else [])]
    columns: list[Column] = []
    with lay_baits() as baits:
        for name in names:
            try:
                backend = make_backend(name)
            except SandboxUnavailable as error:
                columns.append(Column(name, "", unavailable=str(error)))
                continue
            try:
                columns.append(await escape_suite(backend, baits, watch=watch))
            finally:
                await backend.aclose()
        # With nothing to compare them with, they say nothing.
        for make in weak if any(column.findings for column in columns) else []:
            place = make()
            try:
                bare = place.name == baseline.NO_SANDBOX
                columns.append(await escape_suite(place, baits, baseline=True, bare=bare, watch=watch))
            finally:
                await place.aclose()
    return columns
