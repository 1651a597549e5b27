"""An environment of your own in one file: an action is a Python program, the observation is what it prints.

python examples/new_environment.py
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym

from clawgym import registry
from clawgym.envs import SandboxEnv
from clawgym.envs.spaces import AnyText


@registry.envs.register("Mine/python-v0")
class PythonEnv(SandboxEnv):
    """Each action is a Python program that runs in the sandbox of the task; ``submit`` has the work graded."""

    default_tasks = "terminal-basic:train"
    action_space = AnyText(100_000)
    observation_space = gym.spaces.Dict({"output": AnyText(10_000), "exit_code": gym.spaces.Discrete(256)})

    async def act(self, sandbox: Any, action: str) -> dict[str, Any]:
        if action == "submit":
            self.submit()
            return {"output": "", "exit_code": 0}
        done = await sandbox.exec(["python3", "-c", action], cwd=self.task.workspace, timeout=self.seconds)
        return {"output": done.text[-10_000:], "exit_code": done.exit_code}


envs = gym.make("Mine/python-v0", num_envs=2)
observations, infos = envs.reset(options={"task_ids": ["write-word-t0000"]})
print(infos["instruction"][0])
programs = ["open('cliff.txt', 'w').write('planet\\n'); print('written')", "1 / 0"]
observations, *_ = envs.step(programs)
for output in observations["output"]:
    print(output.strip().splitlines()[-1])
_, rewards, _, _, infos = envs.step(["submit", "submit"])
for reward, outcome in zip(rewards, infos["outcome"], strict=True):
    print(f"{outcome}, reward {reward}")
envs.close()
