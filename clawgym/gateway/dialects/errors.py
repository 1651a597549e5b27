"""Errors in the form that OpenAI's clients expect: the status and the JSON body."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from clawgym.errors import BudgetExceeded, ClawGymError, ContextLengthExceeded, EngineError
from clawgym.gateway.calls import Refusal

__all__ = ["ApiFailure", "envelope", "failure_of"]


@dataclass(frozen=True, slots=True)
class ApiFailure:
    """One error, independent of the dialect."""

    status: int
    message: str
    code: str | None = None
    param: str | None = None
    retry_after: float | None = None

    @property
    def kind(self) -> str:
        """OpenAI's error ``type``."""
        match self.status:
            case 401:
                return "authentication_error"
            case 403:
                return "permission_error"
            case 404:
                return "not_found_error"
            case 429:
                return "rate_limit_error"
            case status if status >= 500:
                return "server_error"
        return "invalid_request_error"

    @property
    def headers(self) -> dict[str, str]:
        """Headers that tell a client whether to retry, and after how many seconds."""
        headers = {"x-should-retry": "true" if self.status in (408, 409, 429) or self.status >= 500 else "false"}
        if self.retry_after is not None:
            headers["retry-after"] = f"{self.retry_after:g}"
        return headers


def failure_of(error: Exception) -> ApiFailure:
    """Return ``error`` as a client gets it. An unexpected exception is a plain 500, without its text."""
    match error:
        case Refusal():
            return ApiFailure(error.status, str(error), error.code, error.param, error.retry_after)
        case ContextLengthExceeded():
            return ApiFailure(400, str(error), "context_length_exceeded", "messages")
        case BudgetExceeded():
            return ApiFailure(403, str(error), "budget_exceeded")
        case EngineError():
            return _from_engine(error)
        case ClawGymError():
            return ApiFailure(500, str(error), "internal_error")
    return ApiFailure(500, "the gateway failed unexpectedly: see its log", "internal_error")


def _from_engine(error: EngineError) -> ApiFailure:
    if error.status == 429:
        return ApiFailure(429, str(error), "rate_limit_exceeded", retry_after=error.retry_after or 1.0)
    if error.status is not None and 400 <= error.status < 500:
        # The endpoint's key belongs to the gateway, so its 401 is not the agent's failure.
        status = 502 if error.status in (401, 403) else error.status
        return ApiFailure(status, str(error), "upstream_refused")
    if error.retryable:
        return ApiFailure(503, str(error), "upstream_unavailable", retry_after=error.retry_after or 1.0)
    return ApiFailure(502, str(error), "upstream_failed")


def envelope(failure: ApiFailure) -> dict[str, Any]:
    """Return OpenAI's error body."""
    return {
        "error": {
            "message": failure.message,
            "type": failure.kind,
            "param": failure.param,
            "code": failure.code,
        }
    }
