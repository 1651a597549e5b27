"""Convert a row of a foreign trace file to a :class:`~clawgym.pool.check.TraceTurn`, by commonly used names.

The names are those used by verl, slime, Claw-R1, Agent Lightning, NeMo Gym, vLLM and Harbor. Nothing is guessed: values
under unknown names count as not recorded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from clawgym.pool.check import TraceTurn

__all__ = ["EPISODE", "INDEX", "first", "id_list", "turn_of"]

EPISODE = ("episode", "episode_id", "trajectory_uid", "trajectory_id", "rollout_id", "session_id", "trace_id")
INDEX = ("index", "step_index", "turn_index", "turn", "step", "sequence_id")
_PROMPT = ("prompt_token_ids", "prompt_ids", "prompts")
_RESPONSE = ("completion_token_ids", "completion_ids", "response_ids", "response_token_ids", "generation_token_ids",
             "sampled_ids", "output_ids", "token_ids", "responses")  # fmt: skip
_WHOLE = ("tokens", "input_ids", "row_ids", "ids")
_MASK = ("response_mask", "loss_mask", "completion_mask", "response_loss_mask", "row_mask", "mask")
_LOGPROBS = ("rollout_log_probs", "response_logprobs", "completion_logprobs", "generation_log_probs",
             "generation_logprobs", "sampled_logprobs", "output_log_probs", "row_logprobs", "log_probs",
             "logprobs")  # fmt: skip
_VERSIONS = ("policy_version", "policy_versions", "weight_version", "weight_versions", "model_version")
_TEXT = ("response_text", "completion_text", "response", "completion", "output", "text")


def first(row: Mapping[str, Any], names: Sequence[str]) -> Any:
    """The value of the first of ``names`` in the row, or None."""
    return next((row[name] for name in names if row.get(name) is not None), None)


def id_list(value: Any) -> list[Any] | None:
    """A list of numbers, from a list or array; None for anything else (texts, messages)."""
    if isinstance(value, np.ndarray):
        return value.tolist() if value.ndim == 1 else None
    if isinstance(value, list | tuple) and not any(isinstance(item, str | Mapping | list) for item in value):
        return list(value)
    return None


def _ids_under(row: Mapping[str, Any], names: Sequence[str]) -> tuple[list[Any] | None, list[str]]:
    """The ids under the first name that has some, and complaints about values that are not lists of ids."""
    wrong = []
    for name in names:
        if row.get(name) is None:
            continue
        found = id_list(row[name])
        if found is not None:
            return found, []
        if name.endswith("ids"):
            wrong.append(f"{name} is no list of ids")
    return None, wrong


def _logprobs(row: Mapping[str, Any]) -> tuple[list[Any] | None, list[str]]:
    """The log-probs: numbers, or objects of OpenAI's format with a ``logprob`` each."""
    value = first(row, _LOGPROBS)
    if isinstance(value, Mapping):
        value = value.get("content") or value.get("token_logprobs")
    if isinstance(value, list) and value and all(isinstance(item, Mapping) and "logprob" in item for item in value):
        return [item["logprob"] for item in value], []
    if isinstance(value, list) and value and all(isinstance(item, list | tuple) and item for item in value):
        return [item[0] for item in value], []  # SGLang: (log-prob, id, text)
    found = id_list(value)
    return found, ["the log-probs are no list of numbers"] if value is not None and found is None else []


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten a row with nested ids: ``prompt: {token_ids}, response: {token_ids, logprobs}``, ``choices``,
    ``metrics``."""
    out = dict(row)
    prompt, response = row.get("prompt"), row.get("response")
    if isinstance(prompt, Mapping) and "token_ids" in prompt:
        out["prompt_token_ids"] = prompt["token_ids"]
    if isinstance(response, Mapping) and "token_ids" in response:
        out["completion_token_ids"] = response["token_ids"]
        out.setdefault("logprobs", response.get("logprobs") or response.get("log_probs"))
    for key in ("metrics", "metadata", "extra"):
        inner = row.get(key)
        if isinstance(inner, Mapping):
            out = {**inner, **out}
    choices = row.get("choices")
    if isinstance(choices, list) and choices and isinstance(choices[0], Mapping):
        choice = choices[0]
        out["completion_token_ids"] = choice.get("token_ids")
        out["prompt_token_ids"] = row.get("prompt_token_ids") or choice.get("prompt_token_ids")
        out["logprobs"] = choice.get("logprobs")
    return out


def _split(row: Mapping[str, Any], whole: list[Any], mask: list[Any] | None) -> tuple[Any, Any, Any, list[str]]:
    """Split a row with prompt and response in one list into prompt, response and mask."""
    length = row.get("response_length")
    if isinstance(length, int) and 0 <= length <= len(whole):
        start = len(whole) - length
    elif mask is not None and len(mask) == len(whole):
        start = next((place for place, bit in enumerate(mask) if bit), len(mask))
    elif mask is not None and len(mask) < len(whole):
        start = len(whole) - len(mask)
    elif mask is None:
        return whole, None, None, []
    else:
        return None, None, None, [f"a mask of {len(mask)} for {len(whole)} ids"]
    if mask is not None and len(mask) == len(whole):
        mask = mask[start:]
    return whole[:start], whole[start:], mask, []


def turn_of(row: Mapping[str, Any]) -> TraceTurn:
    """Parse a row with one model call, or one training sequence."""
    row = _flat(row)
    mask = id_list(first(row, _MASK))
    logprobs, wrong = _logprobs(row)
    response, more = _ids_under(row, _RESPONSE)
    prompt, yet_more = _ids_under(row, _PROMPT)
    problems = [*wrong, *more, *yet_more]
    if response is None and not more:
        whole, wrong = _ids_under(row, _WHOLE)
        problems += wrong
        if whole is not None:
            prompt, response, mask, wrong = _split(row, whole, mask)
            problems += wrong
    prompt, response, mask, logprobs = _unpadded(row, prompt, response, mask, logprobs)
    versions: Any = first(row, _VERSIONS)
    text = first(row, _TEXT)
    declared = "parent" in row
    return TraceTurn(
        prompt=prompt,
        response=response,
        mask=mask,
        logprobs=logprobs,
        parent=row.get("parent") if declared else None,
        declared=declared,
        role=row["role"] if isinstance(row.get("role"), str) and row["role"] not in ("assistant", "agent") else "main",
        versions=() if versions is None else id_list(versions) or [versions],
        flaw=row.get("flaw"),
        text=[text] if isinstance(text, str) and text.strip() else None,
        problems=tuple(problems),
    )


def _unpadded(row: Mapping[str, Any], prompt: Any, response: Any, mask: Any, logprobs: Any) -> tuple[Any, ...]:
    """Remove padding, which verl's tensors mark in an ``attention_mask``."""
    attention: Any = id_list(row.get("attention_mask"))
    if attention is None or prompt is None or response is None or len(attention) != len(prompt) + len(response):
        return prompt, response, mask, logprobs
    before, after = attention[: len(prompt)], attention[len(prompt) :]

    def real(values: Any) -> Any:
        if values is None or len(values) != len(after):
            return values
        return [value for value, bit in zip(values, after, strict=True) if bit]

    kept = [value for value, bit in zip(prompt, before, strict=True) if bit]
    return kept, real(response), real(mask), real(logprobs)
