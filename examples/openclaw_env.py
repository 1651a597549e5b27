"""OpenClaw, inside out: an unmodified OpenClaw works on a task, and what answers its model requests is this policy.

python examples/openclaw_env.py     (after: clawgym agents install openclaw)
"""

from __future__ import annotations

import json
from typing import Any

import gymnasium as gym

import clawgym  # noqa: F401  # registers the ids


def call(name: str, **arguments: Any) -> str:
    """An assistant message that calls one tool."""
    return json.dumps({"tool_calls": [{"function": {"name": name, "arguments": arguments}}]})


def policy(messages: list[dict[str, Any]]) -> str:
    """What a model would say: here, two lines of a script."""
    if messages[-1]["role"] == "user":
        return call("write", path="cliff.txt", content="planet\n")
    return "I wrote it."


env = gym.make("ClawGym/openclaw-v0", spare=0)
observation, info = env.reset(options={"task_ids": ["write-word-t0000"]})
print(info["instruction"])
terminated, truncated, reward = False, False, 0.0
while not (terminated or truncated):
    messages = json.loads(observation["messages"])
    print(f"request {observation['request']} ({observation['role']}): {len(messages)} messages")
    observation, reward, terminated, truncated, info = env.step(policy(messages))
print(f"{info['outcome']}, reward {reward}")
env.close()
