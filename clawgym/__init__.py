"""ClawGym: Claw-style agent work as Gymnasium environments, in real sandboxes, graded by code in a clean sandbox.

Importing it registers the environments (``ClawGym/terminal-v0`` and others) with Gymnasium and re-exports the public
names; everything heavy loads when it is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from clawgym._version import __version__
from clawgym.envs import register_known as _register
from clawgym.errors import ClawGymError
from clawgym.records import (
    Episode,
    GradingMode,
    Limits,
    Outcome,
    Step,
    Task,
    TaskFile,
    TaskSet,
    Turn,
    VerifierResult,
    VerifierSpec,
)

if TYPE_CHECKING:
    from clawgym.agents import make_agent
    from clawgym.evaluation.runner import EvalConfig, evaluate
    from clawgym.rollout import Ended, EpisodeRequest, run_episode
    from clawgym.sandbox import SandboxSpec, backend
    from clawgym.tasks.python import TaskDraft, task
    from clawgym.tasks.sets import load

__all__ = [
    "ClawGymError",
    "Ended",
    "Episode",
    "EpisodeRequest",
    "EvalConfig",
    "GradingMode",
    "Limits",
    "Outcome",
    "SandboxSpec",
    "Step",
    "Task",
    "TaskDraft",
    "TaskFile",
    "TaskSet",
    "Turn",
    "VerifierResult",
    "VerifierSpec",
    "__version__",
    "backend",
    "evaluate",
    "load",
    "make_agent",
    "run_episode",
    "task",
]

_LATE = {
    "Ended": "clawgym.rollout",
    "EpisodeRequest": "clawgym.rollout",
    "EvalConfig": "clawgym.evaluation.runner",
    "SandboxSpec": "clawgym.sandbox",
    "TaskDraft": "clawgym.tasks.python",
    "backend": "clawgym.sandbox",
    "evaluate": "clawgym.evaluation.runner",
    "load": "clawgym.tasks.sets",
    "make_agent": "clawgym.agents",
    "run_episode": "clawgym.rollout",
    "task": "clawgym.tasks.python",
}


def __getattr__(name: str) -> Any:
    if name in _LATE:
        return getattr(importlib.import_module(_LATE[name]), name)
    raise AttributeError(f"module 'clawgym' has no attribute {name!r}")


_register()
