"""One exception class per boundary; every message ends with what to do about it.

The class says whose fault a failure is, and so how an episode that met it is recorded
(see :class:`clawgym.records.Outcome`): only :class:`InfraError` may become ``infra``.
"""

from __future__ import annotations

import traceback

__all__ = [
    "AgentError",
    "BudgetExceeded",
    "ClawGymError",
    "ComparisonRefused",
    "ContextLengthExceeded",
    "EngineError",
    "GatewayError",
    "GradingError",
    "InfraError",
    "MissingDependency",
    "PoolError",
    "RunFolderError",
    "SandboxDied",
    "SandboxError",
    "SandboxUnavailable",
    "TaskError",
    "TaskSetNotFound",
    "TokenIdsStripped",
    "TraceError",
    "TrainingError",
    "TreeTooLarge",
    "UnsupportedTask",
    "traceback_of",
]


class ClawGymError(Exception):
    """Base class of every error that ClawGym raises on purpose."""


class MissingDependency(ClawGymError, ImportError):
    """An optional package is needed for what was asked. The message names the extra to install."""


class TaskError(ClawGymError, ValueError):
    """A task cannot be read or written. The message names the file and the field."""


class TaskSetNotFound(ClawGymError, LookupError):
    """No task set has this name. The message lists where it was looked for."""


class UnsupportedTask(ClawGymError):
    """A well-formed task needs something that cannot be had here (network, an image build).

    It is reported as ``unsupported`` and never scored 0.
    """


class SandboxError(ClawGymError):
    """A sandbox operation was refused: bad path, sandbox already closed, size cap met.

    The caller asked for something that cannot be done; the sandbox itself still works.
    """


class TreeTooLarge(SandboxError):
    """The files in a sandbox exceed a bound, so they are not taken out of it.

    ``bound`` is ``size``, ``entries``, ``depth``, ``path`` or ``names`` (``docs/grading.md``).
    """

    def __init__(self, message: str, *, bound: str = "size") -> None:
        super().__init__(message)
        self.bound = bound


class SandboxDied(SandboxError):
    """The sandbox is gone: killed, out of memory, or its agent process stopped answering.

    Code inside can cause this, so an episode that meets it is ``failed``, not ``infra``.
    ``cause`` is one of ``oom``, ``pids``, ``disk``, ``protocol``, ``unresponsive``, ``died``.
    """

    def __init__(self, message: str, *, cause: str = "died") -> None:
        super().__init__(message)
        self.cause = cause


class SandboxUnavailable(SandboxError):
    """This backend cannot work on this host. The message ends with the command that mends it."""


class InfraError(ClawGymError):
    """The host failed (no memory to fork, Docker engine gone): retried, never scored."""


class EngineError(ClawGymError):
    """A model endpoint failed after its retries. ``retryable`` says whether a later try may work, ``status`` is
    the HTTP status that the endpoint gave, if any, and ``retry_after`` the seconds it asked to wait, if it did."""

    def __init__(
        self, message: str, *, retryable: bool = False, status: int | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.retryable = retryable
        self.status = status
        self.retry_after = retry_after


class TokenIdsStripped(EngineError):
    """An endpoint, or a router before it, leaves out the token ids that training needs. The message names it."""


class GatewayError(ClawGymError):
    """The gateway cannot do what was asked of it: unknown session, closed session, no such upstream."""


class PoolError(ClawGymError):
    """The pool refuses: unknown episode or group, a lease that was lost, a damaged or foreign store."""


class TraceError(ClawGymError, ValueError):
    """A trace file cannot be read. The message names the file, the line and the field."""


class TrainingError(ClawGymError):
    """A training run cannot begin, or has gone wrong. The message names the setting, or the last good checkpoint."""


class BudgetExceeded(ClawGymError):
    """A phase, token or cost budget is used up; the episode ends as ``truncated``.

    ``cause`` says which: ``tokens``, ``cost``, ``context``, or ``budget`` where nobody said.
    """

    def __init__(self, message: str, *, cause: str = "budget") -> None:
        super().__init__(message)
        self.cause = cause


class ContextLengthExceeded(BudgetExceeded):
    """A conversation no longer fits the model's context window: the budget that the model itself has."""

    def __init__(self, message: str, *, cause: str = "context") -> None:
        super().__init__(message, cause=cause)


class AgentError(ClawGymError):
    """An agent cannot run this task (no reference solution, no recorded actions)."""


class GradingError(ClawGymError):
    """Grading could not be carried out. ``cause`` attributes it."""

    def __init__(self, message: str, *, cause: str = "grading") -> None:
        super().__init__(message)
        self.cause = cause


class ComparisonRefused(ClawGymError, ValueError):
    """Two runs cannot be compared so that the answer means something. The message says why and what to do."""


class RunFolderError(ClawGymError, ValueError):
    """A run folder belongs to another configuration, or a file in it is damaged."""


def traceback_of(error: BaseException) -> str:
    """The end of the traceback of ``error``, at most 20,000 characters: its message may hold what an agent wrote."""
    return "".join(traceback.format_exception(error))[-20_000:]
