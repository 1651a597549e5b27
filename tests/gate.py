"""Pytest hooks for continuous integration: fail on skipped requirements or too many skips, and list reruns.

``CLAWGYM_REQUIRE=namespace,docker,...`` names requirements (:data:`LACKS`). A test that is skipped for lack of one
fails, and a required sandbox backend that cannot start ends the run before its first test. ``CLAWGYM_MOST_SKIPS`` is
the largest number of other skips. If ``CLAWGYM_SKIPS_SO_FAR`` names a file, the limit holds for all runs together: each
run adds its number to the file. The summary of every run lists the missing requirements.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections import Counter
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import pytest

LACKS: Mapping[str, re.Pattern[str]] = {
    name: re.compile(pattern)
    for name, pattern in {
        "namespace": r"^namespace: ",
        "chroot": r"^chroot: ",
        "docker": r"^docker: |needs the Docker engine|starts dockerd",
        "ray": r"^ray: |could not import 'ray'",
        "root": r"needs root,? (for a uid|to mount)|need root|copies belong to root",
        "ordinary-user": r"another user may run|may use this engine",
        "openclaw": r"clawgym agents install openclaw|OpenClaw is not installed|npm registry",
        "desktop": r"no (Xvfb|desktops|openbox|chromium|xfwrite)|Xvfb or",
        "postgres": r"PostgreSQL",
        "packages": r"python3-(yaml|cryptography|pip)|package index|no apt|has no pip",
        "faketime": r"libfaketime",
        "git": r"git is not installed",
        "node": r"no npm here",
        "atheris": r"atheris",
        "interop": r"clawgym interop check",
    }.items()
}
"""Name of a requirement -> pattern of the skip reasons for lack of it."""
BACKENDS = ("namespace", "chroot")
"""The requirements that are sandbox backends and need no service."""


def required() -> frozenset[str]:
    """The names in ``CLAWGYM_REQUIRE``. Raises :class:`pytest.UsageError` for unknown names."""
    names = frozenset(filter(None, os.environ.get("CLAWGYM_REQUIRE", "").split(",")))
    if unknown := sorted(names - LACKS.keys()):
        raise pytest.UsageError(f"CLAWGYM_REQUIRE names {', '.join(unknown)}: choose of {', '.join(LACKS)}")
    return names


def lacks(reason: str) -> str | None:
    """The requirement for lack of which a test was skipped, from its reason; None for other reasons."""
    return next((name for name, pattern in LACKS.items() if pattern.search(reason)), None)


async def _missing(names: frozenset[str]) -> list[str]:
    from clawgym.errors import SandboxUnavailable
    from clawgym.sandbox import backend

    found = []
    for name in sorted(names.intersection(BACKENDS)):
        try:
            made = backend(name)
            try:
                await made.probe()
            finally:
                await made.aclose()
        except SandboxUnavailable as error:
            found.append(f"{name}: {error}")
    return found


def pytest_sessionstart(session: pytest.Session) -> None:
    if hasattr(session.config, "workerinput"):
        return
    if (names := required()) and (missing := asyncio.run(_missing(names))):
        raise pytest.UsageError(f"CLAWGYM_REQUIRE names what does not work here: {'; '.join(missing)}")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, None]:
    report: pytest.TestReport = (yield).get_result()
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = reason_of(report)
        name = lacks(reason)
        if name in required():
            report.outcome = "failed"
            report.longrepr = f"{name} is required here (CLAWGYM_REQUIRE), and this test was skipped: {reason}"


def reason_of(report: pytest.TestReport | pytest.CollectReport) -> str:
    """The reason why a test was skipped."""
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return text.removeprefix("Skipped: ")


def _skips(config: pytest.Config) -> list[Any]:
    reporter: Any = config.pluginmanager.get_plugin("terminalreporter")
    return [] if reporter is None else reporter.stats.get("skipped", [])


def _skips_before() -> int:
    """The number of skips of earlier runs with the same file."""
    path = os.environ.get("CLAWGYM_SKIPS_SO_FAR")
    return sum(map(int, Path(path).read_text().split())) if path and Path(path).exists() else 0


def pytest_sessionfinish(session: pytest.Session) -> None:
    most = os.environ.get("CLAWGYM_MOST_SKIPS")
    if hasattr(session.config, "workerinput"):
        return
    skips = len(_skips(session.config))
    if most and _skips_before() + skips > int(most):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):  # its skips are reported by the process that started it
        return
    found, most, before = _skips(config), os.environ.get("CLAWGYM_MOST_SKIPS"), _skips_before()
    if found and (most or required()):
        terminalreporter.section(f"{len(found)} skipped" + (f", at most {most} allowed" if most else ""))
        reasons = Counter(f"{report.nodeid.partition('::')[0]}: {reason_of(report)}" for report in found)
        for reason, times in reasons.most_common():
            terminalreporter.line(f"{times:5} {reason[:200]}")
        if before:
            terminalreporter.line(f"{before:5} in earlier parts")
        if most and before + len(found) > int(most):
            terminalreporter.line("Too many tests are skipped: install what they lack (make system).", red=True)
    if missing := Counter(name for report in found if (name := lacks(reason_of(report)))):
        terminalreporter.section("missing here")
        for name, times in missing.most_common():
            terminalreporter.line(f"{times:5} skipped for lack of: {name}")
        terminalreporter.line("`sudo make system` and `make openclaw` install what can be installed.")
    if path := os.environ.get("CLAWGYM_SKIPS_SO_FAR"):
        with Path(path).open("a") as file:
            file.write(f"{len(found)}\n")
    if again := terminalreporter.stats.get("rerun", []):
        terminalreporter.section(f"{len(again)} run again")
        for report in again:
            cause = str(report.longrepr).strip().splitlines()[-1:] or [""]
            terminalreporter.line(f"{report.nodeid}: {cause[0][:300]}")
