"""Harbor's protocol: ``test.sh`` writes its result to ``/logs/verifier``; its exit code does not count."""

from __future__ import annotations

import json
import math

from clawgym.errors import SandboxDied, SandboxError
from clawgym.records import Task
from clawgym.sandbox.protocol import Sandbox
from clawgym.verifiers.protocols.base import LOG_BYTES, VerifierProtocol, VerifierReport, log_of, scored

__all__ = ["HarborTests"]

_LOGS = "/logs/verifier"


class HarborTests(VerifierProtocol):
    """Run ``test.sh`` and read ``reward.json`` (named numbers) or ``reward.txt`` (one number)."""

    entry = "test.sh"
    folder = "/tests"
    own_interpreter = False

    async def run(self, task: Task, sandbox: Sandbox) -> VerifierReport:
        """The score is the number ``reward``, or the mean of all."""
        await sandbox.put((), _LOGS)
        argv = [*sandbox.tool("bash"), f"{self.folder}/{self.entry}"]
        done = await sandbox.exec(argv, timeout=task.limits.verify_seconds, max_output=LOG_BYTES * 2)
        if done.timed_out:
            return VerifierReport(0.0, cause="timeout", log=log_of(done))
        for name in ("reward.json", "reward.txt"):
            try:
                text = (await sandbox.get(f"{_LOGS}/{name}", max_bytes=1 << 20)).decode("utf-8", "replace")
            except SandboxDied:
                raise
            except SandboxError:
                continue
            try:
                data = json.loads(text) if name.endswith("json") else float(text.strip())
                named = isinstance(data, dict)
                values = {str(k): float(v) for k, v in data.items()} if named else {"reward": float(data)}
                score = values["reward"] if "reward" in values else math.fsum(values.values()) / len(values)
            except (ValueError, TypeError, ArithmeticError, RecursionError):
                return VerifierReport(0.0, cause="output", log=log_of(done))
            return scored(score, values, log_of(done))
        return VerifierReport(0.0, cause="crash", log=log_of(done))
