"""What the checker of a tau2-bench task compares, by the rules of the set: databases, assertions, actions, information.

Standard library only: it is mounted as ``tau2_checks.py`` beside the checker, ``tau2_stage.py`` and the set's package.

The calls of both sides are repeated on a fresh environment, and the reference actions on another. A task names what
counts: ``DB`` (both sides' databases are equal), ``ENV_ASSERTION`` (functions of the environment give the wanted
value), ``ACTION`` (each reference action was called with these arguments), ``COMMUNICATE`` (each information is in a
message of the agent). A conversation that the customer did not end scores 0, as does one with too many failed calls.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from tau2_stage import DomainStage  # pyright: ignore[reportMissingImports]

__all__ = ["rewards"]

MOST_ERRORS = 10
"""Failed calls with which the set's own harness ends a conversation."""


def transcript() -> list[Any]:
    """The messages of the episode."""
    path = os.environ.get("OPENCLAW_REWARD_PAYLOAD", "/payload/openclaw_reward_payload.json")
    with open(path, encoding="utf-8", errors="replace") as file:
        return json.load(file)["transcript"]


def logged(path: str) -> list[dict[str, Any]]:
    """The calls of both sides, in order."""
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def rewards(
    data: Mapping[str, Any], folder: str, messages: Sequence[Mapping[str, Any]], calls: Sequence[Mapping[str, Any]]
) -> dict[str, float]:
    """By basis of the reward, 1 or 0; the reward is their product. Empty if the conversation did not end."""
    said = [message for message in messages if message["role"] == "assistant"]
    if not said or messages[-1] is not said[-1] or said[-1].get("tool_calls"):
        return {}
    played = DomainStage(folder, data["domain"], data["start"])
    errors = sum(played.call(**call)[1] for call in calls)
    if errors >= MOST_ERRORS:
        return {}
    played.environment.sync_tools()
    found: dict[str, bool] = {}
    actions, assertions = data["actions"], data["assertions"]
    if "DB" in data["basis"]:
        found["DB"] = (actions is None and assertions is None) or _same_state(data, folder, played)
    if "ENV_ASSERTION" in data["basis"]:
        found["ENV_ASSERTION"] = all(played.run(one) == one["assert_value"] for one in assertions or ())
    if "ACTION" in data["basis"]:
        found["ACTION"] = all(any(_is(action, call) for call in calls) for action in actions or ())
    if "COMMUNICATE" in data["basis"]:
        texts = [str(message.get("content") or "").lower().replace(",", "") for message in said]
        found["COMMUNICATE"] = all(any(one.lower() in text for text in texts) for one in data["communicate"] or ())
    return {name: float(met) for name, met in found.items()}


def _same_state(data: Mapping[str, Any], folder: str, played: DomainStage) -> bool:
    wanted = DomainStage(folder, data["domain"], data["start"])
    for action in data["actions"] or ():
        wanted.call(action.get("requestor") or "assistant", action["name"], action["arguments"], sync=False)
    return wanted.state() == played.state()


def _is(action: Mapping[str, Any], call: Mapping[str, Any]) -> bool:
    """Whether a call is the action, in the arguments that are compared: those that the task names, or the call has."""
    if action["name"] != call["name"]:
        return False
    compared = action.get("compare_args")
    names = call["arguments"].keys() if compared is None else compared
    return all(
        (name in call["arguments"]) == (name in action["arguments"])
        and call["arguments"].get(name) == action["arguments"].get(name)
        for name in names
    )
