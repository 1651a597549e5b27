"""The schema of the files of an entry."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["GradedRow", "ManifestEntry", "OtherRow"]

_Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_Unit = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
_Amount = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=0, le=10**12)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)


class _Used(_Strict):
    prompt_tokens: _Count = 0
    completion_tokens: _Count = 0
    cached_tokens: _Count = 0
    cost_usd: _Amount | None = None


class _Graded(_Strict):
    checks: dict[str, _Unit]
    official: _Unit
    strict: _Unit
    corrected: _Unit | None = None
    floor: _Unit | None = None
    mode: Literal["clean", "fork", "live"]
    verifier_hash: str
    tampered: bool
    cause: str | None = None
    judged_by: str = ""


class OtherRow(_Strict):
    """A row of ``results.jsonl`` without a grading."""

    key: Annotated[str, Field(max_length=300)]
    task_id: Annotated[str, Field(max_length=200)]
    task_hash: _Digest
    sample: Annotated[int, Field(ge=0, lt=10_000)]
    outcome: str
    cause: str | None = None
    finished: Annotated[str, Field(max_length=40)]
    seal: _Digest


class GradedRow(OtherRow):
    """The row of an episode that was graded."""

    outcome: Annotated[str, Field(pattern="^(solved|failed|truncated)$")]
    seed: Annotated[int, Field(ge=0, lt=2**31)]
    attempt: Annotated[int, Field(ge=0, lt=10_000)]
    agent: Annotated[str, Field(max_length=200)]
    result: _Graded | None
    steps: _Count
    tool_calls: _Count
    usage: _Used
    final_message: Annotated[str, Field(max_length=8_000)]
    seconds: dict[str, _Amount]
    files: dict[str, _Digest]


class ManifestEntry(_Strict):
    """The run manifest of an entry."""

    kind: Literal["eval"]
    task_set: dict[str, Any]
    tasks: Annotated[dict[str, dict[str, Any]], Field(min_length=1, max_length=100_000)]
    agent: dict[str, Any]
    engine: dict[str, Any]
    sampling: dict[str, Any]
    seed: int
    samples: Annotated[int, Field(ge=1, le=100)]
    config: dict[str, Any]
    isolation: dict[str, Any]
    library: Annotated[str, Field(min_length=1, max_length=100)]
    grader: dict[str, Any]
    created: Annotated[str, Field(min_length=1, max_length=40)]
    resumed: list[dict[str, Any]]
