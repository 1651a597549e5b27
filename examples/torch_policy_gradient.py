"""Train a policy with REINFORCE in an environment of your own: one file, no trainer of this library.

The task wants three files made in order. An action is one of four commands; the policy sees what it has done so far.
With ``--shuffled`` each action gets the reward of another episode: the control, in which nothing can be trained.

python examples/torch_policy_gradient.py [--shuffled]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import torch

import clawgym
from clawgym import registry
from clawgym.envs import SandboxEnv

COMMANDS = ["echo one > a", "cat a a > b", "cat a b > c", "rm -f a b c"]
STEPS, ENVS, UPDATES = 3, 16, 30
TASKS = clawgym.load(Path(__file__).parent / "tasks" / "three_files.py")


@registry.envs.register("Mine/three-files-v0")
class ThreeFilesEnv(SandboxEnv):
    """An action is the index of a command; the third one ends the episode."""

    action_space = gym.spaces.Discrete(len(COMMANDS))
    observation_space = gym.spaces.Dict({"done": gym.spaces.MultiDiscrete([len(COMMANDS) + 1] * STEPS)})

    async def open(self, sandbox: Any) -> dict[str, Any]:
        self.done = [len(COMMANDS)] * STEPS
        return {"done": self.done}

    async def act(self, sandbox: Any, action: int) -> dict[str, Any]:
        await sandbox.exec(["sh", "-c", COMMANDS[action]], cwd=self.task.workspace, timeout=self.seconds)
        self.done[self.steps - 1] = int(action)
        if self.steps == STEPS:
            self.submit()
        return {"done": self.done}


def encoded(observations: dict[str, Any]) -> torch.Tensor:
    """(N, STEPS * 5) float: what was done at each step, one-hot."""
    return torch.nn.functional.one_hot(torch.as_tensor(observations["done"]), len(COMMANDS) + 1).flatten(1).float()


torch.manual_seed(0)
envs = gym.make("Mine/three-files-v0", num_envs=ENVS, tasks=TASKS, reward="official")
policy = torch.nn.Sequential(
    torch.nn.Linear(STEPS * (len(COMMANDS) + 1), 64), torch.nn.Tanh(), torch.nn.Linear(64, len(COMMANDS))
)
optimizer = torch.optim.Adam(policy.parameters(), lr=0.03)
history = []
for update in range(UPDATES):
    observations, _ = envs.reset(seed=update)
    logps, entropies = [], []
    for _ in range(STEPS):
        chosen = torch.distributions.Categorical(logits=policy(encoded(observations)))
        actions = chosen.sample()
        logps.append(chosen.log_prob(actions))
        entropies.append(chosen.entropy())
        observations, rewards, *_ = envs.step(actions.numpy())
    reward = torch.as_tensor(rewards, dtype=torch.float32)
    history.append(float(reward.mean()))
    if "--shuffled" in sys.argv:
        reward = reward[torch.randperm(ENVS)]
    gain = ((reward - reward.mean()) * torch.stack(logps).sum(0)).mean()
    loss = -gain - 0.05 * torch.stack(entropies).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if update % 5 == 4:
        print(f"update {update + 1}: mean reward {sum(history[-5:]) / 5:.2f}")
envs.close()
