"""The exception classes. Every message ends with what to do about it.

The class says what caused a failure, and so how an episode is recorded (see :class:`clawgym.records.Outcome`): only
:class:`InfraError` may become ``infra``.
"""

from __future__ import annotations

import traceback

__all__ = [
    "AgentError",
    "BudgetExceeded",
    "ClawGymError",
    "ComparisonRefused",
    "ContextLengthExceeded",
    "DownloadError",
    "EngineError",
    "EnvError",
    "EpisodeClosed",
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
    """Base class of all errors of ClawGym."""


class MissingDependency(ClawGymError, ImportError):
    """An optional package is not installed. The message names the extra to install."""


class TaskError(ClawGymError, ValueError):
    """A task cannot be read or written. The message names the file and the field."""


class TaskSetNotFound(ClawGymError, LookupError):
    """No task set has this name. The message lists where it was searched for."""


class DownloadError(ClawGymError, LookupError):
    """A file of the package index cannot be downloaded, or is not the pinned one."""


class UnsupportedTask(ClawGymError):
    """A valid task needs something that is not supported here (network, an image build).

    It is reported as ``unsupported`` and never scored 0.
    """


class SandboxError(ClawGymError):
    """A sandbox refused an operation: a bad path, a closed sandbox, a size cap. The sandbox itself still works."""


class TreeTooLarge(SandboxError):
    """The files in a sandbox exceed a bound, so they are not copied out.

    ``bound`` is ``size``, ``entries``, ``depth``, ``path`` or ``names`` (``docs/how-to/sandboxes.md``).
    """

    def __init__(self, message: str, *, bound: str = "size") -> None:
        super().__init__(message)
        self.bound = bound


class SandboxDied(SandboxError):
    """The sandbox ended: killed, out of memory, or its process 1 stopped answering.

    Code inside can cause this, so the episode is ``failed``, not ``infra``.
    ``cause`` is one of ``oom``, ``pids``, ``disk``, ``protocol``, ``unresponsive``, ``died``.
    """

    def __init__(self, message: str, *, cause: str = "died") -> None:
        super().__init__(message)
        self.cause = cause


class SandboxUnavailable(SandboxError):
    """This backend does not work on this host. The message ends with the command that fixes it."""


class InfraError(ClawGymError):
    """The host failed (no memory to fork, Docker engine stopped): the episode is tried again and never scored."""


class EngineError(ClawGymError):
    """A model endpoint failed, after its retries.

    ``retryable``: whether a later attempt may succeed. ``status``: the HTTP status, if there was one. ``retry_after``:
    the seconds that the endpoint asked to wait, if it did.
    """

    def __init__(
        self, message: str, *, retryable: bool = False, status: int | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.retryable = retryable
        self.status = status
        self.retry_after = retry_after


class TokenIdsStripped(EngineError):
    """An endpoint, or a router in front of it, removes the token ids that training needs. The message names it."""


class GatewayError(ClawGymError):
    """The gateway cannot serve a request: unknown or closed session, unknown engine."""


class PoolError(ClawGymError):
    """The pool refused an operation: unknown episode or group, a lost lease, a damaged or foreign store."""


class EpisodeClosed(PoolError):
    """A turn came for an episode that is closed."""


class TraceError(ClawGymError, ValueError):
    """A trace file cannot be read. The message names the file, the line and the field."""


class TrainingError(ClawGymError):
    """A training run cannot start, or failed. The message names the setting, or the last good checkpoint."""


class ServiceError(ClawGymError):
    """A service that trains on its use cannot do what was asked; the message says what to do."""


class ServiceUnreachable(ServiceError):
    """A service on another machine did not answer. Trying again later may help."""


class BudgetExceeded(ClawGymError):
    """A phase, token or cost budget is used up; the episode ends as ``truncated``.

    ``cause`` says which: ``tokens``, ``cost``, ``context``, or ``budget`` if unknown.
    """

    def __init__(self, message: str, *, cause: str = "budget") -> None:
        super().__init__(message)
        self.cause = cause


class ContextLengthExceeded(BudgetExceeded):
    """A conversation does not fit into the model's context window any more."""

    def __init__(self, message: str, *, cause: str = "context") -> None:
        super().__init__(message, cause=cause)


class EnvError(ClawGymError, ValueError):
    """No environment has this name, or it does not take an option. The message names the closest one."""


class SnapshotRefused(ClawGymError):
    """The state of an episode cannot be saved or restored. The message says why and what to do."""


class AgentError(ClawGymError):
    """An agent cannot run this task (no reference solution, no recorded actions)."""


class GradingError(ClawGymError):
    """Grading failed. ``cause`` says why."""

    def __init__(self, message: str, *, cause: str = "grading") -> None:
        super().__init__(message)
        self.cause = cause


class ComparisonRefused(ClawGymError, ValueError):
    """Two runs cannot be compared meaningfully. The message says why and what to do."""


class RunFolderError(ClawGymError, ValueError):
    """A run folder belongs to another configuration, or a file in it is damaged."""


def traceback_of(error: BaseException) -> str:
    """The end of the traceback of ``error``, at most 20,000 characters, as its message may contain an agent's text."""
    return "".join(traceback.format_exception(error))[-20_000:]
