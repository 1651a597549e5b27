"""Run every probe against one backend, in a fixed order, through the public sandbox protocol only."""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Callable, Iterable

from clawgym.errors import ClawGymError, SandboxDied, SandboxUnavailable
from clawgym.redteam.escape.baits import Baits, lay_baits
from clawgym.redteam.escape.context import ProbeContext, module_of
from clawgym.redteam.escape.declared import declared_open
from clawgym.redteam.escape.inside.kit import PROBES as INSIDE
from clawgym.redteam.escape.records import BLOCKED, HOST_PROBES, OPEN, SKIPPED, Column, Probe, ProbeFinding
from clawgym.sandbox import Backend
from clawgym.sandbox import backend as make_backend

__all__ = ["Watch", "attack_all", "escape_suite", "probes"]

Watch = Callable[[str, ProbeFinding, int, int], None]
"""Called with each finding: column name, finding, number of findings so far, total number."""
_SECONDS = 90.0
"""Time limit of a probe. Several probes have waits of 30 s themselves."""


def probes() -> list[Probe]:
    """Every probe, in order."""
    for name in ("files", "network", "processes", "kernel", "limits", "agent"):
        importlib.import_module(f"clawgym.redteam.escape.inside.{name}")
    for name in ("host_files", "host_archives", "host_sandboxes", "host_ends", "host_grading"):
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
    """Attack ``backend`` with every probe. Linux only.

    Args:
        backend: what to attack.
        baits: laid before the backend starts any process, so that inherited descriptors are noticed.
        only: ids of the probes to run; by default all.
        baseline: whether the backend is a baseline, in which probes are expected to be open.
        bare: skip the probes that are harmful without a sandbox.
        watch: called with each finding.

    Returns:
        The findings in the order of :func:`probes`. If the backend does not work here, the reason is in
        ``unavailable`` and there are no findings.
    """
    try:
        isolation = await backend.probe()
    except SandboxUnavailable as error:
        return Column(backend.name, "", baseline, unavailable=str(error))
    declared = {} if baseline else declared_open(isolation)
    wanted = None if only is None else set(only)
    chosen = [probe for probe in probes() if wanted is None or probe.id in wanted]
    context = ProbeContext(backend, baits)
    findings: list[ProbeFinding] = []
    try:
        for probe in chosen:
            if bare and not probe.bare:
                verdict, evidence = SKIPPED, "not run without a sandbox"
            else:
                verdict, evidence = await _answer(context, probe)
            if verdict == BLOCKED and probe.id in declared:
                # Not counted as blocked: a busy machine, for example, looks like a CPU limit.
                verdict, evidence = SKIPPED, f"{declared[probe.id]}, though it did not show: {evidence}"
            finding = ProbeFinding(probe.id, probe.tries, verdict, evidence, declared.get(probe.id, ""))
            findings.append(finding)
            if watch is not None:
                watch(backend.name, finding, len(findings), len(chosen))
    finally:
        await context.drop_sandbox()
    return Column(backend.name, isolation.tier, baseline, findings=tuple(findings))


async def _answer(context: ProbeContext, probe: Probe) -> tuple[str, str]:
    try:
        running = probe.host(context) if probe.host is not None else context.inside(probe.id)
        async with asyncio.timeout(_SECONDS):
            return await running
    except SandboxDied as error:
        await context.drop_sandbox()
        return BLOCKED, f"the sandbox died ({error.cause})"
    except TimeoutError:
        await context.drop_sandbox()
        return OPEN, f"the host was kept waiting for {_SECONDS:.0f} s"
    except ClawGymError as error:
        await context.drop_sandbox()
        return SKIPPED, f"the probe could not run: {error}"


async def attack_all(names: Iterable[str], *, watch: Watch | None = None) -> list[Column]:
    """Attack every backend in ``names``, then the weak baselines, one after the other.

    Raises :class:`SandboxUnavailable` on systems other than Linux.
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
        # Baselines are only useful in comparison with a backend.
        for make in weak if any(column.findings for column in columns) else []:
            place = make()
            try:
                bare = place.name == baseline.NO_SANDBOX
                columns.append(await escape_suite(place, baits, baseline=True, bare=bare, watch=watch))
            finally:
                await place.aclose()
    return columns
