"""ClawGym's protocol: ``reward.sh`` prints the score as its last line.

The standard ``reward.sh`` of the published tasks averages what ``check.py`` prints. Where a task has exactly that
script, ``check.py`` is run directly by an untouched interpreter: the score is the same, and the named checks are kept.

The ``check.py`` of a task with a grader may ask a model. It has no network: it prints its questions, ends, and is run
again with the answers.
"""

from __future__ import annotations

import dataclasses
import json
import re
import secrets
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from clawgym.records import DEFAULT_WORKSPACE, Task, TaskFile
from clawgym.sandbox.protocol import ExecResult, Sandbox
from clawgym.verifiers.protocols.base import (
    MAX_STDOUT,
    Subject,
    VerifierProtocol,
    VerifierReport,
    failure_of,
    log_of,
    scored,
)
from clawgym.verifiers.scan import third_party_imports
from clawgym.verifiers.scores import last_line_score, standard_score

__all__ = ["STANDARD_HOOK", "AskingCheck", "RewardScript", "StandardCheck", "hook_in", "standard_reward_sh"]

STANDARD_HOOK = f"python3 {DEFAULT_WORKSPACE}/reward/check.py {DEFAULT_WORKSPACE}"
"""The command whose output the standard script averages."""

# Byte for byte: the text is part of a task's content hash.
_HEAD = "#!/usr/bin/env bash\nset -euo pipefail\n\n"
_TAIL = (
    " | python3 -c 'import json, sys; raw = sys.stdin.read().strip(); data = json.loads(raw); "
    "print(sum(float(v) for v in data.values()) / len(data) if isinstance(data, dict) and data "
    "else float(data) if isinstance(data, (int, float)) else 0.0)'\n"
)
_MOST_QUESTIONS = 100
"""Questions of one run of a program."""
_PAYLOAD_FOLDER, _PAYLOAD_NAME = "/payload", "openclaw_reward_payload.json"
_ENV = {"OPENCLAW_REWARD_PAYLOAD": f"{_PAYLOAD_FOLDER}/{_PAYLOAD_NAME}"}

# For a checker that ends its own process, the end of its code cannot be observed.
_LEAVES = re.compile(r"\b_exit\b|\bos\s*\.\s*(exec|abort|kill)")


def standard_reward_sh(hook: str = STANDARD_HOOK) -> bytes:
    """The ``reward.sh`` of the published tasks: the mean of the JSON object that ``hook`` prints, or its number."""
    return f"{_HEAD}{hook}{_TAIL}".encode()


def hook_in(script: bytes) -> str | None:
    """The hook with which :func:`standard_reward_sh` makes ``script``, or None if it is another script."""
    text = script.decode("utf-8", "replace")
    if not (text.startswith(_HEAD) and text.endswith(_TAIL)):
        return None
    return text[len(_HEAD) : -len(_TAIL)] or None


class RewardScript(VerifierProtocol):
    """Run a ``reward.sh`` of the task's own."""

    entry = "reward.sh"
    folder = "/verifier"
    own_interpreter = False
    drop = ("reward",)

    def mounts(self, task: Task, subject: Subject) -> Mapping[str, tuple[TaskFile, ...]]:
        """The documented payload, and ``reward/`` in the workspace: the format's harness puts it there, and some
        checkers see it when they list the workspace."""
        payload = TaskFile(_PAYLOAD_NAME, _payload(task, subject))
        return {f"{task.workspace}/reward": task.verifier.files, _PAYLOAD_FOLDER: (payload,)}

    async def run(self, task: Task, sandbox: Sandbox) -> VerifierReport:
        """The last non-empty line is the score, and the only check."""
        argv = [*sandbox.tool("bash"), f"{self.folder}/{self.entry}"]
        done = await _exec(sandbox, argv, task.limits.verify_seconds)
        cause = failure_of(done)
        if cause not in (None, "output"):
            return VerifierReport(0.0, cause=cause, log=log_of(done))
        score = last_line_score(done.output.decode("utf-8", "replace"))
        return scored(score, {"score": score}, log_of(done))


class StandardCheck(RewardScript):
    """Run the ``check.py`` of a task with the standard ``reward.sh``."""

    own_interpreter = True

    async def run(self, task: Task, sandbox: Sandbox) -> VerifierReport:
        """The mean of the named checks that ``check.py`` prints as JSON."""
        files = task.verifier.files
        sources = [file.read().decode("utf-8", "replace") for file in files if file.path.endswith(".py")]
        beside = {file.path.rpartition(".")[0].split("/")[0] for file in files}
        foreign = {name for source in sources for name in third_party_imports(source)} - beside
        flags = ["-I", "-B"] if foreign else ["-I", "-S", "-B"]
        argv = [*sandbox.tool("python3"), *flags, "-c", _runner(), f"{self.folder}/check.py", task.workspace]
        mark = secrets.token_hex(16).encode()
        done = await _exec(sandbox, argv, task.limits.verify_seconds, stdin=mark)
        cause = failure_of(done)
        if cause is None and mark not in done.stderr and not any(map(_LEAVES.search, sources)):
            cause = "unfinished"
        done = dataclasses.replace(done, stderr=done.stderr.replace(mark, b""))
        if cause is None:
            try:
                return self._report(done.output.decode("utf-8"), log_of(done))
            except (ValueError, TypeError, OverflowError, RecursionError):
                cause = "output"
        return VerifierReport(0.0, cause=cause, log=log_of(done))

    def _report(self, printed: str, log: str) -> VerifierReport:
        """Raises ValueError, TypeError, OverflowError or RecursionError for anything but scores."""
        return scored(*standard_score(printed), log)


class AskingCheck(StandardCheck):
    """Run a ``check.py`` that prints ``{"questions": {ID: MESSAGES}}`` while it lacks an answer, and scores then.

    ``answers``: id of a question -> answer; they are mounted as ``/answers/answers.json``.
    """

    def __init__(self, answers: Mapping[str, str]) -> None:
        self._answers = answers

    def mounts(self, task: Task, subject: Subject) -> Mapping[str, tuple[TaskFile, ...]]:
        """Those of every ``check.py``, and the answers."""
        answers = TaskFile("answers.json", json.dumps(self._answers).encode())
        return {**super().mounts(task, subject), "/answers": (answers,)}

    def _report(self, printed: str, log: str) -> VerifierReport:
        said = json.loads(printed)
        if not isinstance(said, dict) or said.keys() != {"questions"}:
            return super()._report(printed, log)
        return VerifierReport(0.0, log=log, questions=_questions(said["questions"]))


def _questions(said: Any) -> dict[str, list[dict[str, str]]]:
    """Raises ValueError for anything but an object of ids and lists of messages."""
    if not isinstance(said, dict) or not 0 < len(said) <= _MOST_QUESTIONS:
        raise ValueError(f"1 to {_MOST_QUESTIONS} questions are an object of ids and messages")
    for messages in said.values():
        if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
            raise ValueError("a question is a list of messages with role and content")
    return {str(name): messages for name, messages in said.items()}


def _is_message(said: Any) -> bool:
    return (
        isinstance(said, dict)
        and said.keys() == {"role", "content"}
        and said["role"] in ("system", "user", "assistant")
        and isinstance(said["content"], str)
    )


async def _exec(sandbox: Sandbox, argv: list[str], timeout: float, stdin: bytes = b"") -> ExecResult:
    return await sandbox.exec(
        argv, cwd="/", env=_ENV, stdin=stdin, timeout=timeout, max_output=MAX_STDOUT, stdout_only=True
    )


def _payload(task: Task, subject: Subject) -> bytes:
    """The documented keys of ClawGym's payload."""
    body = {
        "task_id": task.id,
        "user_query": task.instruction,
        "metadata": dict(task.metadata),
        "final_message": subject.final_message,
        "transcript": [dict(entry) for entry in subject.transcript],
    }
    return json.dumps(body, ensure_ascii=False, default=str).encode("utf-8", "replace")


@cache
def _runner() -> str:
    return resources.files("clawgym.verifiers").joinpath("_runner.py").read_text(encoding="utf-8")
