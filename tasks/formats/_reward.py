"""Entry scripts of verifiers: the standard ``reward.sh``, and scripts that run a verifier of the other protocol."""

from __future__ import annotations

import re
import shlex

from clawgym.errors import TaskError
from clawgym.records import DEFAULT_WORKSPACE, Task, TaskFile
from clawgym.verifiers.protocols import protocol_of
from clawgym.verifiers.protocols.harbor import HarborTests
from clawgym.verifiers.protocols.reward_sh import STANDARD_HOOK, RewardScript, hook_in

__all__ = ["harbor_files", "hook_of", "normal_hook", "reward_sh_files"]


def hook_of(script: bytes) -> str | None:
    """The hook of a ``script`` that :func:`standard_reward_sh` wrote, or ``None`` for any other script."""
    hook = hook_in(script)
    return hook if hook is not None and normal_hook(hook) == hook else None


def normal_hook(hook: str | None) -> str:
    """A row's ``hook_code`` in the form of published folders, with the absolute path of ``check.py``."""
    if not hook or not hook.strip():
        return STANDARD_HOOK
    reward = rf"(?:{re.escape(DEFAULT_WORKSPACE)}/|(?<![\w./-])(?:\./)?)reward/(?:test|check)\.py(?![\w.])"
    return re.sub(reward, f"{DEFAULT_WORKSPACE}/reward/check.py", hook.strip())


def _with_entry(task: Task, entry: str, script: str) -> tuple[TaskFile, ...]:
    """The verifier's files; with ``script`` as ``entry`` if its protocol has another entry script."""
    if protocol_of(task.verifier).entry == entry:
        return task.verifier.files
    if any(file.path == entry for file in task.verifier.files):
        raise TaskError(f"task {task.id}: its verifier has a file {entry}, a name that this format reserves: rename it")
    return (*task.verifier.files, TaskFile(entry, script.encode(), executable=True))


def harbor_files(task: Task) -> tuple[TaskFile, ...]:
    """The files of Harbor's ``tests/``. For a ``reward_sh`` verifier a ``test.sh`` that runs it is added.

    Raises :class:`TaskError` if a ``reward_sh`` verifier already has a file ``test.sh``.
    """
    home = shlex.quote(f"{task.workspace}/reward")
    return _with_entry(
        task,
        HarborTests.entry,
        f"""#!/bin/bash
# Runs the ClawGym verifier and leaves its score where Harbor reads it.
mkdir -p /logs/verifier
rm -rf {home}
mkdir -p {home}
cp -R /tests/. {home}/
cd /
set -o pipefail
score="$(bash {home}/reward.sh | grep -v '^[[:space:]]*$' | tail -n 1)" || score=0
python3 -I -c '
import math, sys
try:
    score = float(sys.argv[1])
except ValueError:
    score = 0.0
print(score if math.isfinite(score) else 0.0)
' "$score" > /logs/verifier/reward.txt
""",
    )


def reward_sh_files(task: Task) -> tuple[TaskFile, ...]:
    """The files of ClawGym's ``reward/``. For a ``harbor`` verifier a ``reward.sh`` that runs it is added.

    Raises :class:`TaskError` if a ``harbor`` verifier already has a file ``reward.sh``.
    """
    return _with_entry(
        task,
        RewardScript.entry,
        f"""#!/usr/bin/env bash
# Runs the Harbor verifier beside this file and prints its reward.
set -eu
here="$(cd "$(dirname "$0")" && pwd)"
rm -rf /logs/verifier /tests
mkdir -p /logs/verifier /tests
cp -R "$here"/. /tests/
cd {shlex.quote(task.workspace)}
bash /tests/test.sh 1>&2 || true
python3 -I -c '
import json, pathlib
logs = pathlib.Path("/logs/verifier")
try:
    if (logs / "reward.json").is_file():
        data = json.loads((logs / "reward.json").read_text())
        score = sum(map(float, data.values())) / len(data) if isinstance(data, dict) else float(data)
    else:
        score = float((logs / "reward.txt").read_text())
except (OSError, ValueError, TypeError, ZeroDivisionError):
    score = 0.0
print(score)
'
""",
    )
