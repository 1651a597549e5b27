"""The stock way of grading, as a baseline for ``clawgym attack`` and for nothing else.

The public harnesses copy the verifier into the box in which the agent worked, and run it there, with the rights of
the agent, while what the agent left running still runs. This does the same through the sandbox protocol, step for
step: ``reward/`` is merged over whatever lies there, the payload is written through whatever link lies there,
``bash reward.sh`` is looked up on the box's PATH, an exit code other than 0 is worth 0, and the float of the last
non-empty line counts, whatever its size. A verifier that hangs takes the stock harness down with it: no score.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

from clawgym.agents.script import script_command
from clawgym.errors import SandboxDied, SandboxError
from clawgym.records import Task
from clawgym.sandbox.protocol import Backend, Sandbox, SandboxSpec
from clawgym.verifiers.scores import last_line_score

__all__ = ["StockScore", "stock_score_of"]

_STDOUT = 4 * 2**20
_PAYLOAD = ".openclaw_reward_payload.json"


@dataclass(frozen=True, slots=True)
class StockScore:
    """What the stock way gives."""

    score: float | None
    """``None``: the harness itself was brought down."""
    cause: str | None = None


async def stock_score_of(task: Task, script: str, backend: Backend) -> StockScore:
    """Run ``script`` as the agent would, then grade in the same box. Raises InfraError if the host fails."""
    if task.verifier.grader:
        return StockScore(None, "a grader on the host is no part of the task's format")
    mounts = {target: layer.folder for target, layer in task.layers.items()}
    box = await backend.create(SandboxSpec(task.sandbox_image, task.limits, task.env, task.workspace, mounts=mounts))
    try:
        await box.put(task.inputs, task.workspace)
        if script:
            shell = await box.shell()  # stays open: its background jobs live on while the verifier runs
            await shell.run(script_command(script), timeout=task.limits.agent_seconds)
        return await (_harbor(task, box) if task.verifier.protocol == "harbor" else _reward_sh(task, box))
    except SandboxDied as error:
        return StockScore(0.0, error.cause)
    except SandboxError as error:
        return StockScore(0.0, str(error)[:200])
    finally:
        await box.close()


async def _reward_sh(task: Task, box: Sandbox) -> StockScore:
    await box.put(task.verifier.files, f"{task.workspace}/reward")
    payload = json.dumps({"final_message": "", "metadata": dict(task.metadata), "transcript": []}).encode()
    await box.exec(["tee", f"{task.workspace}/{_PAYLOAD}"], stdin=payload)
    done = await box.exec(
        ["bash", f"{task.workspace}/reward/reward.sh"],
        cwd="/",
        env={**task.verifier.env, "OPENCLAW_REWARD_PAYLOAD": f"{task.workspace}/{_PAYLOAD}"},
        timeout=task.limits.verify_seconds,
        max_output=_STDOUT,
        stdout_only=True,
    )
    if done.timed_out:
        return StockScore(None, "timeout")
    if done.exit_code != 0:
        return StockScore(0.0, f"exit code {done.exit_code}")
    return _finite(last_line_score(done.output.decode("utf-8", "replace")))


async def _harbor(task: Task, box: Sandbox) -> StockScore:
    await box.put(task.verifier.files, "/tests")
    await box.put((), "/logs/verifier")
    done = await box.exec(["bash", "/tests/test.sh"], env=task.verifier.env, timeout=task.limits.verify_seconds)
    if done.timed_out:
        return StockScore(None, "timeout")
    for name in ("reward.json", "reward.txt"):
        try:
            data = json.loads(await box.get(f"/logs/verifier/{name}", max_bytes=1 << 20))
        except SandboxDied:
            raise
        except (SandboxError, ValueError):
            continue
        if isinstance(data, dict) and data:
            data = data.get("reward", sum(map(float, data.values())) / len(data))
        if isinstance(data, int | float):
            return _finite(float(data))
    return StockScore(0.0, "no result")


def _finite(score: float) -> StockScore:
    return StockScore(score) if math.isfinite(score) else StockScore(0.0, "not a finite number")
