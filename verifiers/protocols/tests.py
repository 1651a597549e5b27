"""A verifier made of tests (:mod:`clawgym.tasks.swe.verifier`): each test is a check, and all must pass."""

from __future__ import annotations

import json
from collections.abc import Mapping

from clawgym.records import Task
from clawgym.sandbox.protocol import Sandbox
from clawgym.verifiers.protocols.base import LOG_BYTES, MAX_STDOUT, VerifierProtocol, VerifierReport, failure_of, log_of

__all__ = ["TESTS_REWARD_SH", "StandardTests", "checks_of"]

TESTS_REWARD_SH = """\
#!/usr/bin/env bash
set -euo pipefail

here="$(cd "$(dirname "$0")" && pwd)"
exec python3 -I -S -B "$here/run_tests.py" "$(dirname "$here")"
"""
"""The ``reward.sh`` of such a task: prints 1 if all tests passed, else 0."""

_MARGIN = 3.0
"""Seconds before the time limit at which the run stops its tests and reports those that ended."""


class StandardTests(VerifierProtocol):
    """Run ``run_tests.py`` of a task whose ``reward.sh`` is :data:`TESTS_REWARD_SH`."""

    entry = "reward.sh"
    folder = "/verifier"
    own_interpreter = True

    async def run(self, task: Task, sandbox: Sandbox) -> VerifierReport:
        """1 if all tests passed, else 0."""
        timeout = task.limits.verify_seconds
        argv = [*sandbox.tool("python3"), "-I", "-S", "-B", f"{self.folder}/run_tests.py", task.workspace]
        argv.append(str(max(timeout - _MARGIN, timeout / 2)))
        done = await sandbox.exec(argv, cwd="/", timeout=timeout, max_output=MAX_STDOUT, stdout_only=True)
        cause = failure_of(done)
        if cause is not None:
            return VerifierReport(0.0, cause=cause, log=log_of(done))
        try:
            found, _ = done.output.decode("utf-8").splitlines()
            told = json.loads(found)
            outcomes, cause = dict(told["outcomes"]), told["cause"]
            if not all(isinstance(word, str) for word in (*outcomes, *outcomes.values(), cause or "")):
                raise TypeError
        except (ValueError, TypeError, KeyError, RecursionError):
            return VerifierReport(0.0, cause="output", log=log_of(done))
        checks = checks_of(outcomes)
        resolved = cause is None and bool(checks) and all(checks.values())
        failed = [f"{outcome} {test}" for test, outcome in outcomes.items() if not checks[test]]
        log = "\n".join([*failed[:200], done.stderr.decode("utf-8", "backslashreplace")[-2 * LOG_BYTES :]])
        return VerifierReport(float(resolved), checks, cause, log)


def checks_of(outcomes: Mapping[str, str]) -> dict[str, float]:
    """Test -> 1 if it passed or failed as expected, else 0. A task is resolved if all of them are 1."""
    return {test: float(outcome in ("passed", "xfailed")) for test, outcome in outcomes.items()}
