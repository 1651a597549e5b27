"""Trials: run the whole test suite of a repository in a sandbox, with or without a bug.

Invariant: code of a package runs only in a sandbox. Results from it are validated before use.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

from clawgym.errors import SandboxError, TaskError
from clawgym.records import Layer, Limits, TaskFile
from clawgym.sandbox.protocol import Backend, SandboxSpec

__all__ = ["LIMITS", "SITE", "WORKSPACE", "TrialFailure", "Suite", "environment", "run_suite"]

WORKSPACE = "/repo"
SITE = "/opt/layers/site"
_TRIAL = "/opt/trial"
_REPORT = "/tmp/trial.json"
LIMITS = Limits(memory_mb=1024, pids=256, agent_seconds=900.0, verify_seconds=120.0, command_seconds=120.0)


@dataclass(frozen=True, slots=True)
class TrialFailure:
    """How one test failed."""

    file: str
    line: int | None
    """The innermost line of the traceback in the test's file."""
    type: str
    message: str


@dataclass(frozen=True)
class Suite:
    """The results of one run of a test suite."""

    tests: Mapping[str, str]
    """Node id -> ``passed``, ``failed`` or ``skipped``."""
    failures: Mapping[str, TrialFailure]
    seconds: float = 0.0
    fault: str | None = None
    """Why the results are unusable: ``hang``, ``crash``, ``collection``; or None."""
    log: str = ""

    def named(self, outcome: str) -> frozenset[str]:
        return frozenset(test for test, found in self.tests.items() if found == outcome)


def environment(root: str) -> dict[str, str]:
    """Environment variables of a sandbox: the package is imported from its repository, all else from the layer."""
    package = f"{WORKSPACE}/{root}" if root else WORKSPACE
    return {"PYTHONPATH": f"{package}:{SITE}", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0", "TZ": "UTC"}


async def run_suite(
    backend: Backend,
    files: Sequence[TaskFile],
    root: str,
    site: Layer,
    arguments: Sequence[str],
    *,
    seconds: float,
) -> Suite:
    """Run pytest on a repository of ``files`` in a new sandbox, for at most ``seconds``.

    Raises the errors of :meth:`~clawgym.sandbox.protocol.Backend.create`.
    """
    plugin = resources.files("clawgym.tasks.swe").joinpath("clawgym_trial.py").read_bytes()
    env = environment(root)
    spec = SandboxSpec(
        limits=replace(LIMITS, command_seconds=seconds),
        env={**env, "PYTHONPATH": f"{env['PYTHONPATH']}:{_TRIAL}", "CLAWGYM_TRIAL": _REPORT},
        workdir=WORKSPACE,
        readonly={_TRIAL: (TaskFile("clawgym_trial.py", plugin),)},
        mounts={SITE: site.folder},
    )
    box = await backend.create(spec)
    try:
        await box.put(files, WORKSPACE)
        argv = ["python3", "-S", "-m", "pytest", "-p", "clawgym_trial", "-p", "no:cacheprovider", "-q", "--tb=no"]
        started = time.monotonic()
        done = await box.exec([*argv, *arguments], cwd=WORKSPACE, timeout=seconds)
        took = time.monotonic() - started
        log = done.text[-4000:]
        if done.timed_out:
            return Suite({}, {}, took, "hang", log)
        try:
            return replace(_read(await box.get(_REPORT)), seconds=took, log=log)
        except (SandboxError, ValueError, TaskError) as error:
            return Suite({}, {}, took, "crash", f"{error}\n{log}")
    except SandboxError as error:
        return Suite({}, {}, 0.0, "crash", str(error))
    finally:
        await box.close()


def _read(text: bytes) -> Suite:
    """Parse the plugin's report. Raises ValueError or TaskError if it is invalid."""
    body = json.loads(text)
    try:
        tests = {str(k): str(v) for k, v in body["tests"].items() if v is not None}
        failures = {str(k): _failure(v) for k, v in body["failures"].items()}
        fault = "collection" if body["broken"] or body["exit"] not in (0, 1) else None
    except (AttributeError, KeyError, TypeError) as error:
        raise TaskError(f"the report of a trial is invalid ({error}): run it again") from error
    return Suite(tests, failures, fault=fault)


def _failure(body: Mapping[str, Any]) -> TrialFailure:
    line = body["line"]
    return TrialFailure(
        str(body["file"]), line if isinstance(line, int) else None, str(body["type"]), str(body["message"])
    )
