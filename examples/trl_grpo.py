"""Train a model with TRL's ``GRPOTrainer`` on a task of this library: several commands per episode, clean grading.

TRL offers the public methods of an environment to the model as tools, and trains on the tokens that it sampled.
``Shell`` is such an environment for every task set. The model is a tiny one made from scratch. It first imitates calls
of random commands: then it can call the tool, but does not know what to run.
With ``--shuffled`` each episode gets the reward of another one: the control, in which nothing can be trained.
The mean reward of five updates goes from 0.23 to 0.35, and with ``--shuffled`` from 0.13 to 0.18 (one seed, two minutes
of CPU time each). The task is not solved: that would be 1.

pip install 'clawgym[local]' trl jmespath
python examples/trl_grpo.py [--shuffled]
"""

from __future__ import annotations

import random
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gymnasium as gym
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import get_json_schema
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer
from trl.chat_template_utils import qwen3_instruct_2507_chat_template

import clawgym
from clawgym.engines.tiny import make_tiny_model

COMMANDS = ["echo one > a", "cat a a > b", "cat a b > c", "rm -f a b c"]
TURNS, GROUP, UPDATES = 3, 16, 25
TASKS = clawgym.load(Path(__file__).parent / "tasks" / "three_files.py")


class Shell:
    """``ClawGym/terminal-v0`` for TRL, which makes one instance for each episode of a batch."""

    def __init__(self) -> None:
        self._env = gym.make("ClawGym/terminal-v0", tasks=TASKS)

    def reset(self, task_id: str, **columns: Any) -> None:
        """Start a sandbox with the task; the arguments are the columns of the dataset."""
        self._env.reset(options={"task_ids": [task_id]})
        self._reward: float | None = 0.0
        self._over = False

    def bash(self, command: str) -> str:
        """Run a command in the shell.

        Args:
            command: A bash command.
        """
        observation, reward, terminated, truncated, info = self._env.step(command)
        self._over = terminated or truncated
        self._reward = None if info.get("outcome") == "infra" else float(reward)  # TRL leaves None out of the group
        return observation["output"]

    def _grade(self) -> float | None:
        if not self._over:
            self.bash("submit")
        return self._reward


def score(environments: list[Shell], trainer_state: Any, **columns: Any) -> list[float | None]:
    """The rewards of a batch; its episodes are graded at the same time."""
    with ThreadPoolExecutor() as threads:
        rewards = list(threads.map(Shell._grade, environments))
    graded.extend(reward for reward in rewards if reward is not None)
    update = trainer_state.global_step + 1
    if update % 5 == 0:
        print(f"update {update}: mean reward {sum(graded) / len(graded):.2f}", flush=True)
        graded.clear()
    if "--shuffled" in sys.argv:
        random.shuffle(rewards)
    return rewards


def demonstration(task: clawgym.Task) -> dict[str, Any]:
    """A conversation of well-formed calls with random commands."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": task.instruction}]
    for _ in range(TURNS):
        call = {"name": "bash", "arguments": {"command": random.choice(COMMANDS)}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]})
        messages.append({"role": "tool", "name": "bash", "content": ""})
    return {"messages": [*messages, {"role": "assistant", "content": "done"}], "tools": [TOOL]}


random.seed(0)
graded: list[float] = []
TOOL = get_json_schema(Shell().bash)
out = Path(tempfile.mkdtemp())
common: dict[str, Any] = {
    **{"output_dir": out, "save_strategy": "no", "logging_strategy": "no", "report_to": "none", "disable_tqdm": True},
    **{"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "lr_scheduler_type": "constant"},
}

words = [qwen3_instruct_2507_chat_template, str(TOOL), *(task.instruction for task in TASKS.tasks), *COMMANDS, "done"]
tokenizer = AutoTokenizer.from_pretrained(make_tiny_model(out / "scratch", corpus=words))
tokenizer.chat_template = qwen3_instruct_2507_chat_template  # TRL can parse the tool calls of this one
model = AutoModelForCausalLM.from_pretrained(out / "scratch")
shown = Dataset.from_list([demonstration(task) for task in TASKS.tasks for _ in range(640)])
sft = SFTConfig(learning_rate=0.01, num_train_epochs=1, assistant_only_loss=True, **common)
SFTTrainer(model, sft, train_dataset=shown, processing_class=tokenizer).train()
model.save_pretrained(out / "sft")

prompts = [{"prompt": [{"role": "user", "content": task.instruction}], "task_id": task.id} for task in TASKS.tasks]
grpo = GRPOConfig(
    **{"learning_rate": 0.001, "beta": 0.05, "max_steps": UPDATES, "max_tool_calling_iterations": TURNS},
    **{"per_device_train_batch_size": GROUP, "num_generations": GROUP, "max_completion_length": 128},
    **common,
)
trainer = GRPOTrainer(
    str(out / "sft"),
    score,
    args=grpo,
    train_dataset=Dataset.from_list(prompts),
    processing_class=tokenizer,
    environment_factory=Shell,
)
trainer.train()
