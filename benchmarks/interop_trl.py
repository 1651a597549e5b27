"""Compare TRL's ``GRPOTrainer`` on our environments with our own trainer: the same model, tasks and budgets.

    python benchmarks/interop_trl.py [--updates 12]

A tiny model is taught well-formed calls of random commands, for the prompts of both. Then each trainer makes updates on
one task: 16 episodes of at most 3 turns and 48 tokens a turn, in real sandboxes. Our agent offers all of its tools, so
its prompts are longer. One CPU thread each. Rewards are checked by playing TRL's commands again with ``gym.make``.
Needs the extras ``local`` and ``train``, and trl.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import get_json_schema
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer
from trl.chat_template_utils import qwen3_instruct_2507_chat_template

import clawgym
from clawgym.engines.tiny import make_tiny_model
from clawgym.interop.trl import TrlShell, prompts, rewards
from clawgym.tools.shell import SHELL_TOOLS
from clawgym.trainers.config import TrainConfig
from clawgym.trainers.local.main import train

COMMANDS = ["echo one > a", "cat a a > b", "cat a b > c", "rm -f a b c"]
TURNS, GROUP, TOKENS, LR = 3, 16, 48, 1e-3
SYSTEM = "Work."
TASK = """
from clawgym import TaskDraft, task


@task(seeds=range(4))
def three_files(seed):
    return TaskDraft(
        instruction=f"Make the files a, b and c, each from those before it. {seed}",
        check=check,
        solution=f"echo one > a; cat a a > b; cat a b > c # {seed}",
        wrong={"nothing in them": "touch a b c"},
    )


def check(workspace):
    lines = dict.fromkeys("abc", 0)
    for name in lines:
        if (workspace / name).exists():
            lines[name] = (workspace / name).read_text().count("one")
    return {"a": lines["a"] == 1, "b": lines["b"] == 2, "c": lines["c"] == 3}
"""


class Recorded(TrlShell):
    """Notes the commands of the last episode."""

    def reset(self, task_id: str, **columns: Any) -> None:
        super().reset(task_id, **columns)
        self._commands: list[str] = []

    def bash(self, command: str) -> str:
        """Run a command in a persistent bash shell. Working directory, variables and background jobs stay.

        Args:
            command: Any bash text, one line or many.
        """
        self._commands.append(command)
        return super().bash(command)


FORMS: list[tuple[list[Any], list[Any]]] = [
    ([get_json_schema(Recorded.bash)], []),
    (list(SHELL_TOOLS), [{"role": "system", "content": SYSTEM}]),
]
"""Tools and first messages of the prompts of TRL and of our agent."""


def taught(folder: Path, tasks: clawgym.TaskSet) -> Path:
    """The folder of a model that calls the tool with random commands."""
    instructions = [task.instruction for task in tasks.tasks]
    words = [qwen3_instruct_2507_chat_template, str(FORMS), *instructions, *COMMANDS, "done"]
    tokenizer = AutoTokenizer.from_pretrained(make_tiny_model(folder / "scratch", corpus=words, spread=0.05))
    tokenizer.chat_template = qwen3_instruct_2507_chat_template
    model = AutoModelForCausalLM.from_pretrained(folder / "scratch", dtype=torch.float32)
    rows = []
    for number in range(960):
        tools, messages = FORMS[number % 2]
        messages = [*messages, {"role": "user", "content": random.choice(instructions)}]
        for _ in range(TURNS):
            call = {"name": "bash", "arguments": {"command": random.choice(COMMANDS)}}
            calls = [{"type": "function", "function": call}]
            messages.append({"role": "assistant", "content": "", "tool_calls": calls})
            messages.append({"role": "tool", "name": "bash", "content": ""})
        rows.append({"messages": [*messages, {"role": "assistant", "content": "done"}], "tools": json.dumps(tools)})
    sft = SFTConfig(learning_rate=0.01, num_train_epochs=1, assistant_only_loss=True, **common(folder))
    SFTTrainer(model, sft, train_dataset=Dataset.from_list(rows), processing_class=tokenizer).train()
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return folder / "model"


def common(folder: Path) -> dict[str, Any]:
    return {
        **{"output_dir": str(folder / "out"), "save_strategy": "no", "logging_strategy": "no", "report_to": "none"},
        **{"disable_tqdm": True, "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "seed": 0},
    }


def with_trl(model: Path, folder: Path, tasks: clawgym.TaskSet, updates: int) -> list[dict[str, float]]:
    rows: list[dict[str, float]] = []

    def graded(environments: list[Recorded], completion_ids: list[list[int]], **columns: Any) -> list[float | None]:
        found = rewards(environments, **columns)
        again = gym.make("ClawGym/terminal-v0", tasks=tasks)
        for one, reward in zip(environments[:2], found, strict=False):  # the same commands once more
            again.reset(options={"task_ids": [tasks.tasks[1].id]})
            for command in one._commands:
                again.step(command)
            assert again.step("submit")[1] == reward
        again.close()
        rows.append(
            {
                "at": time.perf_counter(),
                "reward": sum(reward or 0.0 for reward in found) / len(found),
                "turns": sum(len(one._commands) for one in environments),
            }
        )
        return found

    config = GRPOConfig(
        **{"learning_rate": LR, "lr_scheduler_type": "constant", "beta": 0.0, "max_steps": updates},
        **{"per_device_train_batch_size": GROUP, "num_generations": GROUP, "max_tool_calling_iterations": TURNS},
        max_completion_length=TURNS * (TOKENS + 32),
        **common(folder),
    )
    trainer = GRPOTrainer(
        str(model),
        graded,
        args=config,
        train_dataset=Dataset.from_list(prompts(tasks)[1:2]),
        environment_factory=lambda: Recorded(tasks),
    )
    began = time.perf_counter()
    trainer.train()
    marks = [began, *(row["at"] for row in rows)]  # between two of them: one batch, and one update
    return [
        {"seconds": end - start, "reward": row["reward"], "turns": row["turns"]}
        for row, start, end in zip(rows, marks, marks[1:], strict=False)
    ]


def with_ours(model: Path, folder: Path, task_file: Path, updates: int) -> list[dict[str, float]]:
    config = TrainConfig.model_validate(
        {
            "name": "ours",
            "model": {"path": str(model)},
            "tasks": {
                **{"set": str(task_file), "demonstrations": {"first": 0}, "train": {"first": 1}},
                **{"validation": {"first": 2}, "heldout": {"first": 3}},
            },
            "agent": {"system_prompt": SYSTEM, "max_steps": TURNS, "max_tokens": TOKENS},
            "rollout": {"groups": 1, "group_size": GROUP, "concurrency": GROUP},
            "reward": {"score": "official"},
            "optimizer": {"lr": LR},
            "compute": {"threads": 1},
            "evaluation": {"every": 1000, "before": False, "canary": 0},
            "guards": {"max_kl": 100.0, "min_entropy": 0.0},
            "budget": {"steps": updates},
            "checkpoint_every": 1000,
        }
    )
    asyncio.run(train(config, folder / "ours"))
    rows = [json.loads(line) for line in (folder / "ours/metrics.jsonl").read_text().splitlines()]
    return [
        {
            "seconds": row["timing/step"],
            "reward": row["rollout/avg_reward_submitted"],
            "turns": row["rollout/avg_steps_per_trajectory"] * GROUP,
        }
        for row in rows
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--updates", type=int, default=12)
    updates = parser.parse_args().updates
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    random.seed(0)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        task_file = folder / "three.py"
        task_file.write_text(TASK)
        tasks = clawgym.load(task_file)
        model = taught(folder, tasks)
        found = {
            "TRL": with_trl(model, folder, tasks, updates),
            "ClawGym": with_ours(model, folder, task_file, updates),
        }
        tokenizer = AutoTokenizer.from_pretrained(model)
        for name, (tools, messages) in zip(found, FORMS, strict=True):
            chat = [*messages, {"role": "user", "content": tasks.tasks[1].instruction}]
            size = len(tokenizer.apply_chat_template(chat, tools=tools)["input_ids"])
            print(f"{name}: the first prompt has {size} tokens")
    print("trainer  s/update  turns/update  turns/s  reward first third  last third")
    for trainer, rows in found.items():
        rows = rows[1:]  # the first has what is made once
        seconds, turns = sum(row["seconds"] for row in rows), sum(row["turns"] for row in rows)
        third = max(1, len(rows) // 3)
        first, last = (sum(row["reward"] for row in part) / third for part in (rows[:third], rows[-third:]))
        print(
            f"{trainer:<8} {seconds / len(rows):8.2f}  {turns / len(rows):12.1f}  {turns / seconds:7.1f}"
            f"  {first:18.2f}  {last:10.2f}"
        )


if __name__ == "__main__":
    main()
