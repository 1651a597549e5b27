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
    Grader,
    Task,
    TaskFile,
    TaskSet,
    Turn,
    VerifierSpec,
)

if TYPE_CHECKING:
    from clawgym.agents import make_agent
    from clawgym.agents.protocol import Agent
    from clawgym.engines import Engine
    from clawgym.evaluation.runner import EvalConfig, evaluate
    from clawgym.gateway.server import Gateway
    from clawgym.pool import Pool
    from clawgym.records.judge import Judge
    from clawgym.records.manifest import RunManifest
    from clawgym.rollout import Ended, EpisodeRequest, run_episode
    from clawgym.rollout.collect import collect_episode
    from clawgym.runs import RunView
    from clawgym.sandbox import Sandbox, SandboxSpec, backend
    from clawgym.tasks.python import TaskDraft, task
    from clawgym.tasks.sets import load
    from clawgym.trainers.protocols import train

_LATE = {
    "Agent": "clawgym.agents.protocol",
    "Ended": "clawgym.rollout",
    "Engine": "clawgym.engines",
    "EpisodeRequest": "clawgym.rollout",
    "EvalConfig": "clawgym.evaluation.runner",
    "Gateway": "clawgym.gateway.server",
    "Judge": "clawgym.records.judge",
    "Pool": "clawgym.pool",
    "RunManifest": "clawgym.records.manifest",
    "RunView": "clawgym.runs",
    "Sandbox": "clawgym.sandbox",
    "SandboxSpec": "clawgym.sandbox",
    "TaskDraft": "clawgym.tasks.python",
    "backend": "clawgym.sandbox",
    "collect_episode": "clawgym.rollout.collect",
    "evaluate": "clawgym.evaluation.runner",
    "load": "clawgym.tasks.sets",
    "make_agent": "clawgym.agents",
    "run_episode": "clawgym.rollout",
    "task": "clawgym.tasks.python",
    "train": "clawgym.trainers.protocols",
}

__all__ = [
    "Agent",
    "ClawGymError",
    "Ended",
    "Engine",
    "Episode",
    "EpisodeRequest",
    "EvalConfig",
    "Gateway",
    "Grader",
    "Judge",
    "Pool",
    "RunManifest",
    "RunView",
    "Sandbox",
    "SandboxSpec",
    "Task",
    "TaskDraft",
    "TaskFile",
    "TaskSet",
    "Turn",
    "VerifierSpec",
    "__version__",
    "backend",
    "collect_episode",
    "evaluate",
    "load",
    "make_agent",
    "run_episode",
    "task",
    "train",
]


def __getattr__(name: str) -> Any:
    if name in _LATE:
        return getattr(importlib.import_module(_LATE[name]), name)
    raise AttributeError(f"module 'clawgym' has no attribute {name!r}")


_register()
