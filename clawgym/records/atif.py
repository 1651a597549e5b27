"""Transcripts in ATIF v1.7, the Agent Trajectory Interchange Format that Harbor's tools read.

Invariants: for any transcript the document is valid JSON and valid ATIF. Fields that ATIF lacks go to ``extra``.
:func:`steps_from_atif` returns well-formed steps unchanged, except that pictures lack their data.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from clawgym.errors import TaskError
from clawgym.records import Episode, Image, Observation, Step, ToolCall, Turn, Usage, prompt_ids

__all__ = ["ATIF_VERSION", "PICTURES", "episode_to_atif", "json_safe", "picture_name", "steps_from_atif"]

ATIF_VERSION = "ATIF-v1.7"
PICTURES = "pictures"
"""The folder of the pictures in a run folder; :func:`picture_name` gives the file names."""
_TO_PICTURES = f"../../{PICTURES}/"
"""The path from a transcript to the pictures: paths in ATIF are relative to the document."""
_ENDINGS = {"image/png": "png", "image/jpeg": "jpg", "image/gif": "gif", "image/webp": "webp"}
"""The image types that ATIF supports since v1.6."""
_PICTURE = re.compile(re.escape(_TO_PICTURES) + rf"([0-9a-f]{{64}})\.(?:{'|'.join(_ENDINGS.values())})")
_MAX_DEPTH = 40


def json_safe(value: Any, depth: int = 0) -> Any:
    """Convert ``value`` to plain JSON data.

    Lone surrogates become U+FFFD; NaN, infinities and integers of 64 bits or more become text; other objects their
    ``str``; data nested deeper than 40 levels is left out.
    """
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value if abs(value) < 2**63 else hex(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if depth >= _MAX_DEPTH:
        return f"[nested deeper than {_MAX_DEPTH} levels: left out]"
    if isinstance(value, Mapping):
        return {json_safe(str(k)): json_safe(v, depth + 1) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [json_safe(v, depth + 1) for v in value]
    return json_safe(str(value))


def picture_name(image: Image) -> str | None:
    """The file name of a picture in a run folder, made from its digest; ``None`` if ATIF does not support its type."""
    ending = _ENDINGS.get(image.media_type)
    return None if ending is None else f"{image.sha256}.{ending}"


def episode_to_atif(episode: Episode, *, agent_version: str = "", model: str | None = None) -> dict[str, Any]:
    """The episode's transcript as an ATIF document, ready for ``json.dumps``."""
    turns = _turns_by_step(episode)
    steps = [_step_to_atif(n, step, turns.get(n, {})) for n, step in enumerate(episode.steps, 1)]
    notes = None
    if not steps:
        notes = "The agent recorded no step; ATIF requires at least one."
        steps = [{"step_id": 1, "source": "system", "message": "", "extra": {"clawgym_placeholder": True}}]
    extra: dict[str, Any] = {
        "task_id": episode.task_id,
        "task_hash": episode.task_hash,
        "sample": episode.sample,
        "seed": episode.seed,
        "outcome": str(episode.outcome),
        "cause": episode.cause,
        "final_message": episode.final_message,
    }
    if episode.turns and not turns:
        extra["turns"] = [
            _turn_to_atif(turn, prompt_ids(episode.turns, n)) | {"role": turn.role}
            for n, turn in enumerate(episode.turns)
        ]
    return json_safe(
        _without_none(
            {
                "schema_version": ATIF_VERSION,
                "session_id": f"{episode.task_hash[:12]}-{episode.sample}",
                "trajectory_id": episode.key,
                "agent": _without_none(
                    {"name": episode.agent, "version": agent_version or "unknown", "model_name": model or None}
                ),
                "steps": steps,
                "notes": notes,
                "final_metrics": _without_none(
                    {
                        "total_prompt_tokens": episode.usage.prompt_tokens,
                        "total_completion_tokens": episode.usage.completion_tokens,
                        "total_cached_tokens": episode.usage.cached_tokens,
                        "total_cost_usd": episode.usage.cost_usd,
                        "total_steps": len(steps),
                    }
                ),
                "extra": {"clawgym": _without_none(extra)},
            }
        )
    )


def steps_from_atif(document: Mapping[str, Any]) -> tuple[Step, ...]:
    """Read the steps of an ATIF document (any v1.x).

    Pictures of a run folder become images without data; other pictures become ``[image: path]`` in the text.

    Raises :class:`~clawgym.errors.TaskError` if ``document`` is not a valid ATIF document.
    """
    version, steps = document.get("schema_version"), document.get("steps")
    if not isinstance(version, str) or not version.startswith("ATIF-v1.") or not isinstance(steps, list):
        raise TaskError(f"not an ATIF v1 trajectory (schema_version {version!r}): give a transcript.json")
    try:
        return tuple(
            _step_from_atif(step) for step in steps if not (step.get("extra") or {}).get("clawgym_placeholder")
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise TaskError(f"damaged ATIF trajectory ({type(error).__name__}: {error}): export it again") from error


def _without_none(mapping: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in mapping.items() if value is not None}


def _turns_by_step(episode: Episode) -> dict[int, dict[str, Any]]:
    """Step number -> metrics of its turn. Empty unless the agent steps and the turns, all of role main, match 1:1."""
    agent_steps = [n for n, step in enumerate(episode.steps, 1) if step.source == "agent"]
    if len(agent_steps) != len(episode.turns) or any(turn.role != "main" for turn in episode.turns):
        return {}
    metrics = (_turn_to_atif(turn, prompt_ids(episode.turns, n)) for n, turn in enumerate(episode.turns))
    return dict(zip(agent_steps, metrics, strict=True))


def _turn_to_atif(turn: Turn, prompt: tuple[int, ...]) -> dict[str, Any]:
    return _without_none(
        {
            "prompt_token_ids": list(prompt) or None,
            "completion_token_ids": list(turn.sampled_ids) or None,
            "logprobs": list(turn.logprobs) or None,
            "extra": None if turn.policy_version is None else {"policy_version": turn.policy_version},
        }
    )


def _is_timestamp(text: str) -> bool:
    try:
        datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        return False
    return True


def _step_to_atif(number: int, step: Step, turn: dict[str, Any]) -> dict[str, Any]:
    metrics: dict[str, Any] = {}
    if step.usage is not None:
        metrics |= {
            "prompt_tokens": step.usage.prompt_tokens,
            "completion_tokens": step.usage.completion_tokens,
            "cached_tokens": step.usage.cached_tokens,
            "cost_usd": step.usage.cost_usd,
        }
    metrics |= turn
    agent_only = _without_none(
        {
            "model_name": step.model,
            "reasoning_content": step.reasoning,
            "tool_calls": [
                {"tool_call_id": call.id, "function_name": call.name, "arguments": dict(call.arguments)}
                for call in step.tool_calls
            ]
            or None,
            "metrics": _without_none(metrics) or None,
        }
    )
    extra = dict(step.extra)
    out: dict[str, Any] = {"step_id": number, "source": step.source, "message": step.message}
    if _is_timestamp(step.timestamp):
        out["timestamp"] = step.timestamp
    elif step.timestamp:
        extra["clawgym_timestamp"] = step.timestamp
    if step.source == "agent":
        out |= agent_only
    elif agent_only:  # the format allows these on agent steps only
        extra["clawgym_agent_fields"] = agent_only
    if step.observations:
        known = {call.id for call in step.tool_calls} if step.source == "agent" else set()
        out["observation"] = {"results": [_observation_to_atif(o, known) for o in step.observations]}
    if extra:
        out["extra"] = extra
    return out


def _observation_to_atif(observation: Observation, known: set[str]) -> dict[str, Any]:
    out: dict[str, Any] = {"content": observation.content}
    extra: dict[str, Any] = {}
    if (image := observation.image) is not None:
        if name := picture_name(image):
            text = [{"type": "text", "text": observation.content}] if observation.content else []
            source = {"media_type": image.media_type, "path": _TO_PICTURES + name}
            out["content"] = [*text, {"type": "image", "source": source}]
        else:
            extra["clawgym_image"] = image.sha256
    if observation.call_id in known:
        out["source_call_id"] = observation.call_id
    elif observation.call_id is not None:
        extra["clawgym_call_id"] = observation.call_id
    if extra:
        out["extra"] = extra
    return out


def _text(content: Any) -> str:
    """The text of a message, which is a string or a list of content parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise TypeError(f"content is {type(content).__name__}, not text or a list of parts")
    return "\n".join(_part_text(part) for part in content)


def _part_text(part: Mapping[str, Any]) -> str:
    if part.get("type") == "text":
        return str(part.get("text", ""))
    return f"[{part.get('type')}: {(part.get('source') or {}).get('path', '')}]"


def _step_from_atif(raw: Mapping[str, Any]) -> Step:
    extra = dict(raw.get("extra") or {})
    fields = {**raw, **extra.pop("clawgym_agent_fields", {})}
    metrics = fields.get("metrics") or {}
    usage = None
    if any(key in metrics for key in ("prompt_tokens", "completion_tokens", "cached_tokens", "cost_usd")):
        usage = Usage(
            metrics.get("prompt_tokens") or 0,
            metrics.get("completion_tokens") or 0,
            metrics.get("cached_tokens") or 0,
            metrics.get("cost_usd"),
        )
    step = Step(
        source=raw["source"],
        message=_text(raw["message"]),
        timestamp=raw.get("timestamp") or extra.pop("clawgym_timestamp", ""),
        tool_calls=tuple(_calls(fields.get("tool_calls") or ())),
        observations=tuple(_observations((raw.get("observation") or {}).get("results") or ())),
        reasoning=fields.get("reasoning_content"),
        model=fields.get("model_name"),
        usage=usage,
    )
    if step.source not in ("system", "user", "agent"):
        raise ValueError(f"unknown source {step.source!r}")
    return replace(step, extra=extra)


def _calls(raw: Sequence[Mapping[str, Any]]) -> Iterator[ToolCall]:
    for call in raw:
        yield ToolCall(call["tool_call_id"], call["function_name"], dict(call["arguments"]))


def _observations(raw: Sequence[Mapping[str, Any]]) -> Iterator[Observation]:
    for result in raw:
        call_id = result.get("source_call_id") or (result.get("extra") or {}).get("clawgym_call_id")
        content, image = result.get("content"), None
        if isinstance(content, list) and content and (image := _picture(content[-1])) is not None:
            content = content[:-1]
        yield Observation(_text(content), call_id, image)


def _picture(part: Mapping[str, Any]) -> Image | None:
    """The image of a content part that refers to a picture of a run folder; None for other parts."""
    if part.get("type") != "image":
        return None
    source = part.get("source") or {}
    named = _PICTURE.fullmatch(str(source.get("path", "")))
    return None if named is None else Image(named[1], b"", str(source.get("media_type") or "image/png"))
