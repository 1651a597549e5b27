"""Records shared by all packages: tasks, steps, turns, episodes and results.

Invariant: records are frozen and hold no open resource.
"""

from clawgym.records.dialogue import Dialogue, DialogueUser, UserTurn
from clawgym.records.episode import (
    EXECUTED,
    Episode,
    Fault,
    Image,
    Observation,
    Outcome,
    Phase,
    Step,
    ToolCall,
    Usage,
    executed_step,
)
from clawgym.records.grader import Grader, ProgramResult, Submission
from clawgym.records.result import JudgeVotes, VerifierResult
from clawgym.records.task import (
    DEFAULT_WORKSPACE,
    Desktop,
    DesktopStep,
    GradingMode,
    Layer,
    Limits,
    Site,
    Task,
    TaskFile,
    TaskSet,
    ToolServer,
    VerifierSpec,
    check_relative_path,
    packages_of,
)
from clawgym.records.turn import Role, TrainingSequence, Turn, common_prefix, continued, ids_array, prompt_ids

__all__ = [
    "DEFAULT_WORKSPACE",
    "Desktop",
    "DesktopStep",
    "Dialogue",
    "EXECUTED",
    "Episode",
    "Fault",
    "Grader",
    "GradingMode",
    "Image",
    "JudgeVotes",
    "Layer",
    "Limits",
    "Observation",
    "Outcome",
    "Phase",
    "ProgramResult",
    "Role",
    "TrainingSequence",
    "Site",
    "Step",
    "Submission",
    "Task",
    "TaskFile",
    "TaskSet",
    "ToolCall",
    "ToolServer",
    "Turn",
    "Usage",
    "DialogueUser",
    "UserTurn",
    "VerifierResult",
    "VerifierSpec",
    "check_relative_path",
    "common_prefix",
    "continued",
    "executed_step",
    "ids_array",
    "packages_of",
    "prompt_ids",
]
