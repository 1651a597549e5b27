"""The original graders of the task formats, as a baseline for attacks only.

The public harnesses copy the verifier into the sandbox in which the agent worked, and run it there with the agent's
rights while the agent's processes still run. This module does the same through the sandbox protocol: ``reward/`` is
merged over existing files, the payload is written through an existing link, and ``bash reward.sh`` is looked up on the
sandbox's PATH. An exit code other than 0 scores 0; otherwise the float on the last non-empty line counts, whatever its
size. If the verifier hangs, so does the harness: there is no score.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

from clawgym.agents.script import script_command
from clawgym.errors import SandboxDied, SandboxError
from clawgym.records import Task
from clawgym.sandbox.protocol import Backend, Sandbox, SandboxSpec
from clawgym.statistics import as_float
from clawgym.verifiers.scores import last_line_score

__all__ = ["OriginalScore", "original_score_of"]

_STDOUT = 4 * 2**20
_PAYLOAD = ".openclaw_reward_payload.json"


@dataclass(frozen=True, slots=True)
class OriginalScore:
    """The original grader's result."""

    score: float | None
    """None if the harness itself failed."""
    cause: str | None = None


async def original_score_of(task: Task, script: str, backend: Backend) -> OriginalScore:
    """Run ``script`` as the agent would, then grade in the same sandbox. Raises :class:`InfraError` if the host
    fails."""
    if task.verifier.grader:
        return OriginalScore(None, "a grader on the host is not part of the task's format")
    mounts = {target: layer.folder for target, layer in task.layers.items()}
    sandbox = await backend.create(
        SandboxSpec(task.sandbox_image, task.limits, task.env, task.workspace, mounts=mounts)
    )
    try:
        await sandbox.put(task.inputs, task.workspace)
        if script:
            shell = await sandbox.shell()  # stays open: its background jobs run while the verifier runs
            await shell.run(script_command(script), timeout=task.limits.agent_seconds)
        return await _ORIGINAL[task.verifier.protocol](task, sandbox)
    except SandboxDied as error:
        return OriginalScore(0.0, error.cause)
    except SandboxError as error:
        return OriginalScore(0.0, str(error)[:200])
    finally:
        await sandbox.close()


async def _reward_sh(task: Task, sandbox: Sandbox) -> OriginalScore:
    await sandbox.put(task.verifier.files, f"{task.workspace}/reward")
    payload = json.dumps({"final_message": "", "metadata": dict(task.metadata), "transcript": []}).encode()
    await sandbox.exec(["tee", f"{task.workspace}/{_PAYLOAD}"], stdin=payload)
    done = await sandbox.exec(
        ["bash", f"{task.workspace}/reward/reward.sh"],
        cwd="/",
        env={**task.verifier.env, "OPENCLAW_REWARD_PAYLOAD": f"{task.workspace}/{_PAYLOAD}"},
        timeout=task.limits.verify_seconds,
        max_output=_STDOUT,
        stdout_only=True,
    )
    if done.timed_out:
        return OriginalScore(None, "timeout")
    if done.exit_code != 0:
        return OriginalScore(0.0, f"exit code {done.exit_code}")
    return _finite(last_line_score(done.output.decode("utf-8", "replace")))


async def _harbor(task: Task, sandbox: Sandbox) -> OriginalScore:
    await sandbox.put(task.verifier.files, "/tests")
    await sandbox.put((), "/logs/verifier")
    done = await sandbox.exec(["bash", "/tests/test.sh"], env=task.verifier.env, timeout=task.limits.verify_seconds)
    if done.timed_out:
        return OriginalScore(None, "timeout")
    for name in ("reward.json", "reward.txt"):
        try:
            data = json.loads(await sandbox.get(f"/logs/verifier/{name}", max_bytes=1 << 20))
        except SandboxDied:
            raise
        except (SandboxError, ValueError):
            continue
        if isinstance(data, dict) and data:
            data = data.get("reward", sum(map(as_float, data.values())) / len(data))
        if isinstance(data, int | float):
            return _finite(as_float(data))
    return OriginalScore(0.0, "no result")


_ORIGINAL = {"reward_sh": _reward_sh, "harbor": _harbor}
"""Verifier protocol -> how its format's own harness grades."""


def _finite(score: float) -> OriginalScore:
    return OriginalScore(score) if math.isfinite(score) else OriginalScore(0.0, "not a finite number")
